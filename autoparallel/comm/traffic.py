"""Counting what a program sends: collectives and bytes, by kind and mesh axis.

    with autoparallel.count_traffic() as traffic:
        model(x, y).backward()
    print(traffic)

[Note: what is counted] Every operator of ``torch.distributed`` that the thread runs inside the context, plain ones
(``c10d::allreduce_``, also those of DDP's reducer and of FSDP2) and functional ones (``_c10d_functional``, also
DTensor's), in the forward and in a backward that is called inside.  Bytes are what each rank sends in a ring
algorithm (``placements.sent_bytes``), whatever the backend really does.  A group of one rank sends nothing, a ``recv``
and a ``barrier`` count but send nothing; rows that travel to their experts count as if all experts were used alike;
what a compiler traces inside with fake tensors is not counted.

What ranks say to agree on a call, before it (``runtime.ranks.agreement``), is not training traffic: it is counted
apart, in ``control``, and is in no other number.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autoparallel import _torch
from autoparallel.comm.collectives import dims_of_rows, ends_of_chunks
from autoparallel.comm.communicator import CARRIED_OUT
from autoparallel.comm.groups import CONTROL, active_axes, axis_of_group, communicator_of, names_of_groups
from autoparallel.placements import COLLECTIVES, action, parse_placement, sent_bytes
from autoparallel.text import Table, plain_text, units

Volumes = dict[tuple[str, str, int], tuple[int, int]]
"""By the kind of a collective, the mesh axis and how many ranks its group has: how many collectives, and the bytes of
their whole tensors as ``placements.sent_bytes`` means them."""


@dataclass(frozen=True)
class Traffic:
    """What one rank sent.

    Attributes:
        volumes: what was sent, in whole numbers, so that two counts are equal or not.
        control: what ranks said to agree on calls; in no other number.
    """

    volumes: Volumes = field(default_factory=dict)
    control: Volumes = field(default_factory=dict, compare=False)

    @property
    def collectives(self) -> dict[tuple[str, str], int]:
        """(kind, axis) to the number of collectives."""
        counts: dict[tuple[str, str], int] = {}
        for (kind, axis, _), (count, _) in sorted(self.volumes.items()):
            counts[kind, axis] = counts.get((kind, axis), 0) + count
        return counts

    @property
    def bytes(self) -> dict[tuple[str, str], float]:
        """(kind, axis) to the bytes that each rank sent."""
        volumes: dict[tuple[str, str], float] = {}
        for (kind, axis, ranks), (_, full) in sorted(self.volumes.items()):
            volumes[kind, axis] = volumes.get((kind, axis), 0.0) + sent_bytes(kind, full, ranks)
        return volumes

    @property
    def total_collectives(self) -> int:
        """The number of all collectives."""
        return sum(self.collectives.values())

    @property
    def total_bytes(self) -> float:
        """The bytes that each rank sent in all."""
        return sum(self.bytes.values())

    @property
    def control_collectives(self) -> int:
        """How often ranks talked in order to agree on a call."""
        return sum(count for count, _ in self.control.values())

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(_sum(self.volumes, other.volumes, 1), _sum(self.control, other.control, 1))

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(_sum(self.volumes, other.volumes, -1), _sum(self.control, other.control, -1))

    def __mul__(self, times: int) -> Traffic:
        return Traffic(_sum({}, self.volumes, times), _sum({}, self.control, times))

    def table(self) -> Table:
        """The numbers as a table."""
        volumes, numbers = self.bytes, ("count", "bytes sent")
        rows = [(*key, str(count), units(volumes[key])) for key, count in self.collectives.items()]
        if len(rows) != 1:
            rows.append(("all", "", str(self.total_collectives), units(self.total_bytes)))
        return Table(("collective", "mesh axis", *numbers), rows, right=numbers)

    def __str__(self) -> str:
        return plain_text(self.table())


def _sum(volumes: Volumes, others: Volumes, times: int) -> Volumes:
    """Some volumes, and others so many times."""
    total = dict(volumes)
    for key, (count, full) in others.items():
        before = total.get(key, (0, 0))
        total[key] = (before[0] + times * count, before[1] + times * full)
    return {key: value for key, value in sorted(total.items()) if value != (0, 0)}


class TrafficCounter(Traffic):
    """A count that is still running: what has been sent so far."""

    def add(self, kind: str, axis: str, full_bytes: int, ranks: int) -> None:
        """Counts one collective (see ``placements.sent_bytes`` for its bytes)."""
        counted = self.control if axis == CONTROL else self.volumes
        if axis == CONTROL or ranks > 1:
            count, full = counted.get((kind, axis, ranks), (0, 0))
            counted[kind, axis, ranks] = (count + 1, full + full_bytes)

    def result(self) -> Traffic:
        """What has been counted so far, which grows no more."""
        return self + Traffic()


@contextlib.contextmanager
def count_traffic(mesh: DeviceMesh | None = None) -> Iterator[TrafficCounter]:
    """Counts the collectives, and the bytes each rank sends, of what runs inside (see [Note: what is counted]).

    Args:
        mesh: the mesh whose axes name the groups.  Without it, they are named after the meshes that models were
            compiled for (the last of them, where a group belongs to several).  Other groups are called "world" or by
            their description.

    Yields:
        The running count; its ``result()`` is a :class:`Traffic`.
    """
    counter = TrafficCounter()
    with CountingMode(counter.add, {} if mesh is None else names_of_groups(mesh)):
        yield counter


class CountingMode(TorchDispatchMode):
    """Reports every collective that runs: its kind, its axis, the bytes of the whole tensor, the ranks of its group.

    Args:
        add: called with these.
        names: process group name to axis, before what is known of bound meshes.
    """

    def __init__(self, add: Callable[[str, str, int, int], None], names: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._add = add
        self._names = names or {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Has torch compile what is called here, and show this mode what is sent of it."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # it comes back as operators on local tensors and as collectives
        if func.namespace in _NAMESPACES and not any(map(_is_meta, pytree.tree_leaves(args))):
            self.count(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def count(self, func: Any, args: Any, kwargs: Any) -> None:
        """Reports what an operator sends, if it sends anything."""
        if func.namespace not in _NAMESPACES:
            return
        name = func._schema.name.partition("::")[2]
        arguments = {a.name: a.default_value for a in func._schema.arguments}
        arguments |= dict(zip(arguments, args, strict=False)) | kwargs
        if func.namespace == "autoparallel":
            self._count_own(name, arguments)
            return
        if name in _SILENT:
            return
        if name == "batch_p2p_ops":
            for kind, tensor in zip(arguments["op_list"], arguments["tensors"], strict=True):
                axis, ranks = self._group(arguments["group_name"])
                self._add(kind.removeprefix("i"), axis, _torch.tensors.bytes_in(tensor), ranks)
            return
        if name not in _OPERATORS:
            raise NotImplementedError(f"count_traffic() does not know the operator {func}: its bytes would be missing")
        kind, argument, part = _OPERATORS[name]
        if CARRIED_OUT.value == "reduce_scatter":  # by an all-to-all of the same tensor
            kind, part = "reduce_scatter", False
        group = arguments["process_group"] if "process_group" in arguments else arguments["group_name"]
        axis, ranks = self._group(group)
        full = _torch.tensors.bytes_in(arguments[argument]) if argument else 0
        self._add(kind, axis, full * ranks if part else full, ranks)

    def _group(self, argument: Any) -> tuple[str, int]:
        """The axis of the group that an operator is given, and its ranks."""
        group = _torch.distributed.process_group(argument)
        return self._axis(group), group.size()

    def _axis(self, group: dist.ProcessGroup) -> str:
        name = group.group_name
        axis = self._names.get(name) or axis_of_group(name)
        if axis:
            return axis
        if dist.group.WORLD is not None and name == dist.group.WORLD.group_name:
            return "world"
        return group.group_desc if group.group_desc not in ("", "undefined") else name

    def _count_own(self, name: str, arguments: Mapping[str, Any]) -> None:
        """Our own operators: a collective inside one would run below this mode, unseen."""
        if name in ("grouped_linear_exchanged", "grouped_linear_exchanged_backward"):
            self._count_exchange(name, arguments)
            return
        if name == "all_reduce":
            self._add_own("all_reduce", _torch.tensors.bytes_in(arguments["x"]), False, arguments["group"])
            return
        if name in ("transfer", "start_transfer"):
            sizes = [_torch.tensors.bytes_in(arguments["x"])]
        elif name in _CHUNKED:
            sizes = _bytes_of_chunks(name, arguments)
        else:
            return
        src, dst = parse_placement(arguments["src"]), parse_placement(arguments["dst"])
        kind = action(src, dst)
        for size in sizes if kind in COLLECTIVES else ():
            self._add_own(kind, size, src.kind == "S", arguments["group"])

    def _add_own(self, kind: str, size: int, part: bool, group: str) -> None:
        communicator, axis = communicator_of(group)
        ranks = communicator.size(axis)
        self._add(kind, active_axes(axis, communicator.size), size * ranks if part else size, ranks)

    def _count_exchange(self, name: str, arguments: Mapping[str, Any]) -> None:
        """How many rows each expert gets, the rows there, and what was made of them back."""
        communicator, axis = communicator_of(arguments["group"])
        ranks = communicator.size(axis)
        x, weight = arguments["x"], arguments["weight"]
        row = x.shape[0] * x.element_size()
        there, back = x.shape[1], weight.shape[2]
        if name.endswith("backward"):
            there, back = there + back, there
        for size in (8 * ranks * weight.shape[0], row * there, row * back):
            self._add_own("all_to_all", int(size), True, arguments["group"])


_CHUNKED = ("gathered_linears", "gathered_linears_backward", "reduced_linear", "reduced_linear_backward")


def _bytes_of_chunks(name: str, arguments: Mapping[str, Any]) -> list[int]:
    """What linear layers send of each chunk of rows: what they read, or what they make."""
    backward = name.endswith("backward")
    if name.startswith("gathered") and backward:
        if not arguments["wanted"][0]:
            return []
        like = arguments["grads"][0]
        shape = (*like.shape[:-1], arguments["weights"][0].shape[1])
    elif name.startswith("reduced") and not backward:
        like = arguments["x"]
        shape = (*like.shape[:-1], arguments["weight"].shape[0])
    else:
        like = arguments["grad" if backward else "x"]
        shape = like.shape
    dims = dims_of_rows(len(shape), arguments["src"], arguments["dst"])
    rows, row = math.prod(shape[:dims]), math.prod(shape[dims:]) * like.element_size()
    ends = ends_of_chunks(rows, arguments["chunks"])
    return [(end - begin) * row for begin, end in itertools.pairwise(ends) if end > begin]


_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "autoparallel")
_SILENT = ("wait_tensor", "_wrap_tensor_autograd", "check_for_nan", "mesh_get_process_group")

_OPERATORS: dict[str, tuple[str, str, bool]] = {
    "allreduce_": ("all_reduce", "tensors", False),
    "allreduce_coalesced_": ("all_reduce", "tensors", False),
    "all_reduce": ("all_reduce", "input", False),
    "all_reduce_": ("all_reduce", "input", False),
    "all_reduce_coalesced": ("all_reduce", "inputs", False),
    "all_reduce_coalesced_": ("all_reduce", "inputs", False),
    "allgather_": ("all_gather", "input_tensors", True),
    "_allgather_base_": ("all_gather", "input_tensor", True),
    "allgather_coalesced_": ("all_gather", "input_list", True),
    "allgather_into_tensor_coalesced_": ("all_gather", "inputs", True),
    "all_gather_into_tensor": ("all_gather", "input", True),
    "all_gather_into_tensor_coalesced": ("all_gather", "inputs", True),
    "all_gather_into_tensor_out": ("all_gather", "input", True),
    "reduce_scatter_": ("reduce_scatter", "input_tensors", False),
    "_reduce_scatter_base_": ("reduce_scatter", "input_tensor", False),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs", False),
    "reduce_scatter_tensor": ("reduce_scatter", "input", False),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", "inputs", False),
    "reduce_scatter_tensor_out": ("reduce_scatter", "input", False),
    "alltoall_": ("all_to_all", "input_tensors", True),
    "alltoall_base_": ("all_to_all", "input", True),
    "all_to_all_single": ("all_to_all", "input", True),
    "shard_dim_alltoall": ("all_to_all", "input", True),
    "broadcast_": ("broadcast", "tensors", False),
    "broadcast": ("broadcast", "input", False),
    "reduce_": ("reduce", "tensors", False),
    "gather_": ("gather", "input_tensors", True),
    "scatter_": ("scatter", "output_tensors", True),
    "send": ("send", "tensors", False),
    "isend": ("send", "tensor", False),
    "recv_": ("recv", "tensors", False),
    "recv_any_source_": ("recv", "tensors", False),
    "irecv": ("recv", "tensor", False),
    "barrier": ("barrier", "", False),
    "monitored_barrier_": ("barrier", "", False),
}
"""Operator to the kind of collective, the argument that has its bytes, and whether that is one rank's part of them."""


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta
