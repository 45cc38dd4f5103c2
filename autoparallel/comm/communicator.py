"""What communicates over a mesh: collectives, and messages between two ranks.

[Note: gloo reads host memory] What lies on a device goes through the host, both ways.  Gloo itself knows some of the
collectives of GPUs, and ends the process in others.

[Note: gloo's reduce-scatter] Gloo reduces and scatters by an all-reduce of a copy, which sends twice as much.  So with
gloo every rank is sent its row by all others, and adds them up in their order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoparallel import _torch
from autoparallel.comm import ranges, waiting
from autoparallel.comm.current import Current

T = TypeVar("T")

Wait = Callable[[], torch.Tensor]


CARRIED_OUT: Current[str | None] = Current(None)
"""The kind of the collective that this thread carries out by one of another kind, if it does."""


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
class Group:
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
    def of(cls, group: dist.ProcessGroup, row: Sequence[int], rank: int) -> Group:
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
    groups: dict[str, Group]
    gloo: bool = False
    first: Callable[[], None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether its process groups have not been destroyed."""
        return all(_torch.distributed.is_open(one.group) for one in self.groups.values())

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
            with CARRIED_OUT.using("reduce_scatter"):
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


def as_real(x: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as real numbers, which are all that every backend can send."""
    return torch.view_as_real(x) if x.is_complex() else x


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, whatever its dtype: backends move bytes, but not all kinds of numbers."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)  # view() keeps any stride of a single element


def _clone(x: torch.Tensor) -> Wait:
    out = x.clone()
    return lambda: out
