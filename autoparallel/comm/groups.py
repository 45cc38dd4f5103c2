"""Process groups by name.

A rewritten program is the same text on every rank: what depends on a rank (its group, its coordinate) is asked for at
run time, by the name of a mesh axis.  This module keeps that table, and the one seam through which our operators
communicate, so that a test can run all ranks of a mesh as threads of one process (see ``simulate``).

An axis is named ``"dp"``; several axes at once (one group over all of them) are named ``"dp+tp"``.

[Note: gloo reads host memory] What lies on a device goes through the host, both ways.  Gloo itself knows some of the
collectives of GPUs, and ends the process in others.

[Note: gloo's reduce-scatter] Gloo reduces and scatters by an all-reduce of a copy, which sends twice as much.  So with
gloo every rank is sent its row by all others, and adds them up in their order.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoparallel import _torch
from autoparallel.comm import ranges, waiting

CONTROL = "autoparallel control"
"""The description of the groups over which ranks agree; what they say there is not training traffic."""

T = TypeVar("T")

Wait = Callable[[], torch.Tensor]


class Communicator(Protocol):
    """What operators and the runtime need of a mesh: sizes, coordinates, collectives, and messages between two ranks.

    ``peer`` is a place on an axis.
    """

    def size(self, axis: str) -> int: ...
    def index(self, axis: str) -> int: ...
    def ranks(self, axis: str) -> list[int]: ...
    def settle(self) -> None: ...
    def send(self, x: torch.Tensor, axis: str, peer: int) -> Wait: ...
    def receive(self, out: torch.Tensor, axis: str, peer: int) -> Wait: ...
    def all_reduce(self, x: torch.Tensor, axis: str, op: str = "sum") -> Wait: ...
    def all_gather(self, x: torch.Tensor, axis: str) -> Wait: ...
    def reduce_scatter(self, x: torch.Tensor, axis: str) -> Wait: ...
    def all_to_all(self, x: torch.Tensor, axis: str) -> Wait: ...
    def all_to_all_rows(
        self, x: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], axis: str
    ) -> torch.Tensor: ...


_REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


@dataclass(frozen=True)
class _Group:
    """The ranks along some axes of a mesh, through this one.

    Attributes:
        group: the process group, in which ranks always stand by their numbers.
        size: how many there are.
        index: this rank's place among them, by the mesh.
        order: for each place of the mesh the place in the process group; None where they are the same.
    """

    group: dist.ProcessGroup
    size: int
    index: int
    order: list[int] | None = None

    @classmethod
    def of(cls, group: dist.ProcessGroup, row: Sequence[int], rank: int) -> _Group:
        """The group of a row of ranks, as the mesh has them."""
        members = sorted(row)
        order = [members.index(one) for one in row]
        return cls(group, len(row), row.index(rank), None if members == list(row) else order)

    def by_place(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows in the order of the process group, in that of the mesh."""
        return rows if self.order is None else rows[self.order]

    def by_number(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows in the order of the mesh, in that of the process group."""
        return rows if self.order is None else rows[_inverse(self.order)]


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _permute(items: Sequence[T], order: Sequence[int]) -> list[T]:
    return [items[i] for i in order]


def _through_host(start: Callable[[MeshGroups, torch.Tensor, str], Wait]) -> Callable[..., Wait]:
    """Has gloo carry out a collective of what lies on a device (see [Note: gloo reads host memory])."""

    @functools.wraps(start)
    def begin(self: MeshGroups, x: torch.Tensor, axis: str) -> Wait:
        if not self.gloo or x.is_cpu:
            return start(self, x, axis)
        wait = start(self, x.cpu(), axis)
        return lambda: wait().to(x.device)

    return begin


@dataclass
class MeshGroups:
    """The communicator of a ``DeviceMesh``; every collective is started at once and returns a function that waits.

    A group of one rank is never called: what it would compute is a copy.

    Attributes:
        mesh: the mesh.
        groups: by name.
        gloo: whether gloo carries collectives out: waiting for one may be interrupted (see ``waiting.wait``), and its
            reduce-scatter is not used (see [Note: gloo's reduce-scatter]).
        first: what must be done before the next collective (see ``before_next_collective``).
    """

    mesh: DeviceMesh
    groups: dict[str, _Group]
    gloo: bool = False
    first: Callable[[], None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether its process groups have not been destroyed."""
        return all(_torch.distributed.is_open(one.group) for one in self.groups.values())

    @property
    def axes(self) -> dict[str, str]:
        """The mesh axes that process groups stand for, by the groups' names."""
        return {one.group.group_name: active_axes(name, self.size) for name, one in self.groups.items()}

    def size(self, axis: str) -> int:
        return self.groups[axis].size

    def index(self, axis: str) -> int:
        return self.groups[axis].index

    def ranks(self, axis: str) -> list[int]:
        """The ranks along an axis through this one, by their numbers in the world, in the order of the mesh."""
        one = self.groups[axis]
        ranks = dist.get_process_group_ranks(one.group)
        return ranks if one.order is None else _permute(ranks, one.order)

    def settle(self) -> None:
        """Does what must be done before the next collective."""
        first, self.first = self.first, None
        if first is not None:
            first()

    def _start(
        self, kind: str, axis: str, out: torch.Tensor, begin: Callable[[dist.ProcessGroup], Any], sliced: bool = True
    ) -> Wait:
        """Begins a collective over an axis.

        Args:
            out: what it leaves.
            sliced: whether waiting for it may be interrupted, where the backend can do that.
        """
        self.settle()
        with ranges.named(lambda: f"{kind} {axis}"):
            work = begin(self.groups[axis].group)

        def wait() -> torch.Tensor:
            with ranges.named(lambda: f"wait for {kind} {axis}"):
                waiting.wait(work, sliced and self.gloo)
            return out

        return wait

    def send(self, x: torch.Tensor, axis: str, peer: int) -> Wait:
        """Sends a contiguous ``x``; what is returned waits until its memory may be written to again."""
        rank = self.ranks(axis)[peer]
        x = x.cpu() if self.gloo else x  # see [Note: gloo reads host memory]
        return self._start("send", axis, x, lambda group: dist.isend(x, rank, group), False)

    def receive(self, out: torch.Tensor, axis: str, peer: int) -> Wait:
        """Receives what a rank sends into ``out``."""
        rank = self.ranks(axis)[peer]
        host = out if out.is_cpu or not self.gloo else torch.empty_like(out, device="cpu")
        wait = self._start("receive", axis, out, lambda group: dist.irecv(host, rank, group), False)
        return wait if host is out else lambda: wait().copy_(host)

    def all_reduce(self, x: torch.Tensor, axis: str, op: str = "sum") -> Wait:
        """Reduces the contiguous ``x`` in place."""
        if self.size(axis) == 1:
            return lambda: x
        host = x.cpu() if self.gloo else x
        data = as_real(host)
        wait = self._start("all_reduce", axis, host, lambda group: dist.all_reduce(data, _REDUCE[op], group, True))
        return wait if host is x else lambda: x.copy_(wait())

    @_through_host
    def all_gather(self, x: torch.Tensor, axis: str) -> Wait:
        """Gathers a contiguous ``[...]`` from each of n ranks into ``[n, ...]``."""
        if self.size(axis) == 1:
            return _clone(x.unsqueeze(0))
        out = x.new_empty((self.size(axis), *x.shape))
        data, received = as_bytes(x), as_bytes(out)
        gather = _torch.distributed.all_gather_single
        wait = self._start("all_gather", axis, out, lambda group: gather(received, data, group=group, async_op=True))
        return lambda: self.groups[axis].by_place(wait())

    @_through_host
    def reduce_scatter(self, x: torch.Tensor, axis: str) -> Wait:
        """Sums a contiguous ``[n, ...]`` over n ranks and leaves rank i with row i."""
        if self.size(axis) == 1:
            return _clone(x[0])
        x = self.groups[axis].by_number(x)
        if self.gloo:
            return self._sum_of_rows(x, axis)
        out = x.new_empty(x.shape[1:])
        data, received = as_real(x).view(-1), as_real(out).view(-1)
        return self._start(
            "reduce_scatter", axis, out,
            lambda group: _torch.distributed.reduce_scatter_single(received, data, group=group, async_op=True),
        )  # fmt: skip

    def _sum_of_rows(self, x: torch.Tensor, axis: str) -> Wait:
        """See [Note: gloo's reduce-scatter]; rows are in the order of the process group."""
        rows = torch.empty_like(x)
        received, data = as_bytes(rows), as_bytes(x)

        def exchange(group: dist.ProcessGroup) -> Any:
            with _in_place_of("reduce_scatter"):
                return dist.all_to_all_single(received, data, group=group, async_op=True)

        wait = self._start("reduce_scatter", axis, rows, exchange)

        def add_up() -> torch.Tensor:
            first, second, *others = wait()
            total = first + second
            for row in others:
                total += row
            return total

        return add_up

    @_through_host
    def all_to_all(self, x: torch.Tensor, axis: str) -> Wait:
        """Sends row i of a contiguous ``[n, ...]`` to rank i; row i of the result came from rank i."""
        if self.size(axis) == 1:
            return _clone(x)
        out = torch.empty_like(x)
        received, data = as_bytes(out), as_bytes(self.groups[axis].by_number(x))
        wait = self._start(
            "all_to_all", axis, out, lambda group: dist.all_to_all_single(received, data, group=group, async_op=True)
        )
        return lambda: self.groups[axis].by_place(wait())

    def all_to_all_rows(
        self, x: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], axis: str
    ) -> torch.Tensor:
        """Sends the first ``sent[0]`` rows of ``x`` to rank 0, and so on; returns the rows received, by rank."""
        if self.size(axis) == 1:
            return x.clone()
        if self.gloo and not x.is_cpu:
            return self.all_to_all_rows(x.cpu(), send_counts, receive_counts, axis).to(x.device)
        order = self.groups[axis].order
        if order is not None:
            inverse = _inverse(order)
            x = torch.cat(_permute(x.split(list(send_counts)), inverse))
            send_counts, receive_counts = _permute(send_counts, inverse), _permute(receive_counts, inverse)
        out = x.new_empty((sum(receive_counts), *x.shape[1:]))
        rows, parts = as_real(x.contiguous()), as_real(out)
        wait = self._start(
            "all_to_all", axis, out,
            lambda group: dist.all_to_all_single(parts, rows, list(receive_counts), list(send_counts), group, True),
        )  # fmt: skip
        wait()
        return out if order is None else torch.cat(_permute(out.split(list(receive_counts)), order))


@contextmanager
def _in_place_of(kind: str) -> Iterator[None]:
    """What is started inside is how a collective of another kind is carried out."""
    _LOCAL.carried_out = kind
    try:
        yield
    finally:
        _LOCAL.carried_out = None


def carried_out() -> str | None:
    """The kind of the collective that this thread carries out by one of another kind, if it does."""
    kind: str | None = getattr(_LOCAL, "carried_out", None)
    return kind


def as_real(x: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as real numbers, which are all that every backend can send."""
    return torch.view_as_real(x) if x.is_complex() else x


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, whatever its dtype: backends move bytes, but not all kinds of numbers."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)  # view() keeps any stride of a single element


def _clone(x: torch.Tensor) -> Wait:
    out = x.clone()
    return lambda: out


_BOUND: dict[str, MeshGroups] = {}
"""By prefix; the mesh that was bound last is the last."""

_LOCAL = threading.local()


def bind(mesh: DeviceMesh, whole: DeviceMesh | None = None) -> str:
    """Registers ``mesh`` and returns the prefix under which its axes are known, the same on every rank.

    It is made of meshes alone: ranks may have bound others before, such as one of a teacher on some of them.
    The groups over several axes are made here, all at once, because making one is itself a collective.

    Args:
        whole: of which it is one of the slices, such as a stage's, which have one prefix.
    """
    names = mesh.mesh_dim_names or ()
    _forget_closed()
    ranks = (mesh if whole is None else whole).mesh.tolist()
    first = f"mesh{zlib.crc32(repr((mesh.device_type, names, ranks)).encode()):08x}"
    key = next(name for name in (first + "x" * i for i in itertools.count()) if name not in _BOUND)
    for prefix, bound in _BOUND.items():
        if bound.mesh == mesh and prefix.rstrip("x") == first:
            _BOUND[prefix] = _BOUND.pop(prefix)
            return prefix
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError("this rank is not part of the mesh")
    groups = {name: _Group(mesh.get_group(i), mesh.size(i), coordinate[i]) for i, name in enumerate(names)}
    for count in range(2, len(names) + 1):
        for axes in itertools.combinations(range(len(names)), count):
            groups["+".join(names[i] for i in axes)] = _joint_group(mesh, axes)
    _BOUND[key] = MeshGroups(mesh, groups, _torch.distributed.is_gloo(dist.group.WORLD, mesh.device_type))
    return key


def _forget_closed() -> None:
    """Forgets meshes whose process groups have been destroyed: one that is made later may be equal to them."""
    for key, bound in list(_BOUND.items()):
        if not bound.is_open:
            del _BOUND[key]
    for mesh, (_, groups) in list(_EXPANDED.items()):
        if not all(map(_torch.distributed.is_open, groups)):
            del _EXPANDED[mesh]


def active_axes(axis: str, size: Callable[[str], int]) -> str:
    """The name of a group without the axes of one rank: over axes of sizes 2 and 1, "dp" and "dp+tp" are one group."""
    return "+".join(name for name in axis.split("+") if size(name) > 1) or axis


def _joint_group(mesh: DeviceMesh, axes: Sequence[int]) -> _Group:
    """One process group over several axes, the first axis outermost."""
    rest = [i for i in range(mesh.ndim) if i not in axes]
    rows = mesh.mesh.permute(*rest, *axes).reshape(-1, math.prod(mesh.size(i) for i in axes)).tolist()
    rank = dist.get_rank()
    row_here = next(row for row in rows if rank in row)
    if len(row_here) == dist.get_world_size():
        assert dist.group.WORLD is not None
        return _Group.of(dist.group.WORLD, row_here, rank)
    part = mesh.mesh.numel() < dist.get_world_size()  # then the other ranks take no part in making groups
    timeout = _torch.distributed.timeout_of(dist.group.WORLD, mesh.device_type)
    groups = [
        dist.new_group(row, timeout=timeout, use_local_synchronization=part)
        for row in rows
        if row is row_here or not part
    ]
    return _Group.of(groups[0 if part else rows.index(row_here)], row_here, rank)


_EXPANDED: dict[DeviceMesh, tuple[DeviceMesh, list[dist.ProcessGroup]]] = {}
"""With their groups, which a mesh itself knows by names that groups made later may have, too."""


def with_data_axis(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh itself, or, where it has one axis only, with an axis "dp" of one rank behind it.

    Raises:
        ValueError: where other ranks would have to take part in making it.
    """
    if mesh.ndim > 1:
        return mesh
    _forget_closed()
    if mesh not in _EXPANDED:
        names = tuple(mesh.mesh_dim_names or ())
        if mesh.mesh.numel() != dist.get_world_size():
            raise ValueError(f"a mesh of some ranks with the one axis {names[0]!r}: give it an axis 'dp' of size 1")
        expanded = DeviceMesh(mesh.device_type, mesh.mesh.unsqueeze(-1), mesh_dim_names=(*names, "dp"))
        _EXPANDED[mesh] = expanded, expanded.get_all_groups()
    return _EXPANDED[mesh][0]


def inner_mesh(mesh: DeviceMesh, axis: str) -> DeviceMesh:
    """The mesh of all axes but one, through this rank."""
    return mesh[tuple(name for name in mesh.mesh_dim_names or () if name != axis)]


def other_slices(mesh: DeviceMesh, axis: str, slice_here: DeviceMesh) -> list[DeviceMesh]:
    """For each place on an axis, the mesh of the other axes there; this rank's is ``slice_here``."""
    names = list(mesh.mesh_dim_names or ())
    rest = tuple(name for name in names if name != axis)
    here = mesh.get_local_rank(axis)
    return [
        slice_here
        if i == here
        else _torch.dtensor.mesh_without_groups(mesh.device_type, mesh.mesh.select(names.index(axis), i), rest)
        for i in range(mesh.size(names.index(axis)))
    ]


def whole_group_name(key: str) -> str:
    """How programs name the group of all ranks of a bound mesh."""
    return f"{key}/{'+'.join(_BOUND[key].mesh.mesh_dim_names or ())}"


def whole_group(key: str) -> dist.ProcessGroup:
    """The process group of all ranks of a bound mesh."""
    return _BOUND[key].groups["+".join(_BOUND[key].mesh.mesh_dim_names or ())].group


def before_next_collective(key: str, check: Callable[[], None]) -> None:
    """Has ``check`` called before the next of our collectives on a bound mesh is entered, or when ``settle`` is."""
    bound = _BOUND[key]
    bound.settle()
    bound.first = check


def settle(key: str) -> None:
    """Does what must be done before the next collective on a mesh, if anything."""
    communicator_of(f"{key}/")[0].settle()


def axis_of_group(group_name: str) -> str | None:
    """The mesh axis that a process group stands for, if it is one of ours; that of the mesh that was bound last, where
    several share it."""
    _forget_closed()  # groups that are made later get the names of destroyed ones
    return next((bound.axes[group_name] for bound in reversed(_BOUND.values()) if group_name in bound.axes), None)


def names_of_groups(mesh: DeviceMesh) -> dict[str, str]:
    """Group name to mesh axis; with the groups over several axes, where the mesh is bound."""
    _forget_closed()
    for bound in _BOUND.values():
        if bound.mesh == mesh:
            return bound.axes
    return {mesh.get_group(i).group_name: name for i, name in enumerate(mesh.mesh_dim_names or ())}


def use_communicator(communicator: Communicator | None) -> Communicator | None:
    """Makes this thread's operators talk to ``communicator`` instead of the bound meshes (simulations and dry runs).

    Returns:
        What they talked to before.
    """
    before: Communicator | None = getattr(_LOCAL, "communicator", None)
    _LOCAL.communicator = communicator
    return before


def communicator_of(group: str) -> tuple[Communicator, str]:
    """The communicator and axis that a group name such as ``mesh0/dp`` stands for on this rank."""
    key, _, axis = group.rpartition("/")
    simulated = getattr(_LOCAL, "communicator", None)
    if simulated is not None:
        return simulated, axis
    try:
        return _BOUND[key], axis
    except KeyError:
        raise RuntimeError(f"the program names the process group {group!r}, but its mesh is not bound") from None


def axis_index(group: str) -> int:
    """This rank's coordinate on the axis."""
    communicator, axis = communicator_of(group)
    return communicator.index(axis)


def axis_size(group: str) -> int:
    """The number of ranks along the axis."""
    communicator, axis = communicator_of(group)
    return communicator.size(axis)


def group_name(prefix: str, names: Sequence[str], axes: Sequence[int]) -> str:
    """How programs name the group over some mesh axes."""
    return f"{prefix}/{'+'.join(names[i] for i in axes)}"
