"""Placements: how one tensor lies on one mesh axis, together with its gradient.

The four placements, in the words of the ``spmd_types`` package:

=============  ===============================================  ====================
placement      each rank's value                                each rank's gradient
=============  ===============================================  ====================
``Shard(d)``   a slice along dim ``d``                          that slice
``Invariant``  the whole, one computation done by all           the whole
``Replicate``  the whole, to be used differently by each rank   a summand
``Partial``    a summand                                        the whole
=============  ===============================================  ====================

[Note: duality] The gradient of a value is itself a placed tensor: a Shard's gradient is a Shard, an Invariant's is
Invariant, a Replicate's is Partial and a Partial's is Replicate.  The transpose of the redistribution ``a -> b`` is
therefore the redistribution ``dual(b) -> dual(a)``, which is again in the table below.  So the table closes under
differentiation: the backward of every redistribution, and the backward of that, is right by construction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from torch.distributed.tensor import Partial as DTensorPartial
from torch.distributed.tensor import Replicate as DTensorReplicate
from torch.distributed.tensor import Shard as DTensorShard
from torch.distributed.tensor.placement_types import Placement as DTensorPlacement


@dataclass(frozen=True, slots=True)
class Placement:
    """How a tensor lies on one mesh axis; ``kind`` is one of ``I``, ``R``, ``P``, ``S``, ``dim`` is for ``S`` only."""

    kind: str
    dim: int = -1

    def __str__(self) -> str:
        return f"S{self.dim}" if self.kind == "S" else self.kind

    __repr__ = __str__


Invariant = Placement("I")
Replicate = Placement("R")
Partial = Placement("P")


@cache
def Shard(dim: int) -> Placement:  # noqa: N802 - it reads as the placement it makes
    """The placement that slices a tensor along ``dim`` (not negative)."""
    if dim < 0:
        raise ValueError(f"a shard dim is counted from the left, got {dim}")
    return Placement("S", dim)


Layout = tuple[Placement, ...]
"""One placement for each axis of the mesh, in the mesh's order."""


@cache
def parse_placement(text: str) -> Placement:
    """The placement written as ``I``, ``R``, ``P`` or ``S<dim>``."""
    if text in ("I", "R", "P"):
        return {"I": Invariant, "R": Replicate, "P": Partial}[text]
    if text.startswith("S") and text[1:].isdigit():
        return Shard(int(text[1:]))
    raise ValueError(f"not a placement: {text!r}; expected I, R, P or S<dim>")


def format_layout(layout: Layout) -> str:
    """A layout as short text, ``S0,I`` for a tensor sharded over the first axis and Invariant on the second."""
    return ",".join(str(p) for p in layout)


def parse_layout(text: str) -> Layout:
    """The inverse of :func:`format_layout`."""
    return tuple(parse_placement(part) for part in text.split(","))


def dual(placement: Placement) -> Placement:
    """The placement of the gradient of a value that has ``placement`` (see [Note: duality])."""
    return {"R": Partial, "P": Replicate}.get(placement.kind, placement)


def dual_layout(layout: Layout) -> Layout:
    """The layout of the gradient of a value that has ``layout``."""
    return tuple(dual(p) for p in layout)


# What each redistribution does to a rank's value.  Its backward is the entry of the dual pair.
ACTIONS: dict[tuple[str, str], str] = {
    ("S", "I"): "all_gather",
    ("S", "R"): "all_gather",
    ("S", "S"): "all_to_all",
    ("S", "P"): "pad",
    ("I", "R"): "nothing",
    ("I", "S"): "slice",
    ("I", "P"): "keep_on_one",
    ("R", "I"): "nothing",
    ("R", "S"): "slice",
    ("R", "P"): "keep_on_one",
    ("P", "I"): "all_reduce",
    ("P", "R"): "all_reduce",
    ("P", "S"): "reduce_scatter",
}

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""The actions that communicate."""


def action(src: Placement, dst: Placement) -> str:
    """What a rank does to turn ``src`` into ``dst``: a collective of ``COLLECTIVES`` or a local action."""
    if src == dst:
        return "nothing"
    return ACTIONS[src.kind, dst.kind]


def sent_bytes(kind: str, full_bytes: int, group_size: int) -> float:
    """Bytes each rank sends in a bandwidth-optimal (ring) algorithm; the ranks' mean, where they send differently.

    Args:
        kind: one of ``COLLECTIVES``, or ``broadcast``, ``reduce``, ``gather``, ``scatter``, ``send``.  Anything else
            (a local action, ``recv``, ``barrier``) sends nothing.
        full_bytes: size of the whole tensor as seen by the group: the reduced tensor of an all-reduce, the gathered
            result of an all-gather, the input of a reduce-scatter, the sum of all ranks' inputs of an all-to-all, the
            tensor that is broadcast, reduced or sent, the parts of all ranks together of a gather or scatter.
        group_size: number of ranks in the group.
    """
    n = group_size
    if kind == "all_reduce":
        return 2 * full_bytes * (n - 1) / n
    if kind in ("all_gather", "reduce_scatter", "broadcast", "reduce"):
        return full_bytes * (n - 1) / n
    if kind in ("all_to_all", "gather", "scatter"):
        return full_bytes * (n - 1) / (n * n)
    return float(full_bytes) if kind == "send" else 0.0


def shards_of(layout: Layout, dim: int) -> tuple[int, ...]:
    """The mesh axes (by index, outermost first) that shard ``dim``.

    [Note: order of axes] A dim that is sharded by several axes is cut by the mesh's first axis first, as ``DTensor``
    does; only the innermost, the last in the mesh's order, may be gathered or moved alone.
    """
    return tuple(axis for axis, p in enumerate(layout) if p.kind == "S" and p.dim == dim)


def cut_along(layout: Layout, axis: int) -> tuple[Placement, tuple[int, ...]]:
    """What ranks along one axis have: its placement, and for shards the axes before it that cut the same dim, within
    whose shards they lie.  Where two layouts differ in this, ranks have other rows (see [Note: order of axes])."""
    placement = layout[axis]
    return placement, shards_of(layout[:axis], placement.dim)


def count_pieces(layout: Layout, dim: int, axis_sizes: Sequence[int]) -> int:
    """Into how many pieces the mesh cuts ``dim``."""
    return math.prod(axis_sizes[axis] for axis in shards_of(layout, dim))


def chunk(size: int, count: int, index: int) -> tuple[int, int]:
    """Where piece ``index`` of a dim begins, and its length.

    [Note: uneven shards] A dim whose size does not divide is cut as ``torch.chunk`` and ``DTensor`` cut it: every piece
    has ``ceil(size / count)`` but the last ones, which are shorter or empty.  A dim that several axes shard is cut by
    the first axis, and then each piece by the next.  The longest piece is always the first rank's.  Only parameters at
    rest, and their gradients, lie so: what an operator reads or makes divides.  Messages have the longest piece's
    size on every rank, filled up with zeros, which no rank keeps.
    """
    step = -(-size // count)
    start = min(index * step, size)
    return start, min(step, size - start)


def largest_piece(shape: Sequence[int], layout: Layout, axis_sizes: Sequence[int]) -> tuple[int, ...]:
    """The local shape of a tensor of a global shape, on the rank that has most of it."""
    local = list(shape)
    for placement, n in zip(layout, axis_sizes, strict=True):
        if placement.kind == "S":
            local[placement.dim] = -(-local[placement.dim] // n)
    return tuple(local)


def divides(shape: Sequence[int], layout: Layout, axis_sizes: Sequence[int]) -> bool:
    """Whether all ranks have equal parts of a tensor of a global shape."""
    return all(size % count_pieces(layout, dim, axis_sizes) == 0 for dim, size in enumerate(shape))


def fills_up(shape: Sequence[int], padded: Sequence[int], layout: Layout, axis_sizes: Sequence[int]) -> bool:
    """Whether the uneven pieces of a tensor with a row for each rank, filled up, are the even ones of the padded."""
    for dim, (size, whole) in enumerate(zip(shape, padded, strict=True)):
        for axis in shards_of(layout, dim):
            size, rest = -(-size // axis_sizes[axis]), whole % axis_sizes[axis]
            whole //= axis_sizes[axis]
            if rest or size != whole:
                return False
    return reaches_all(shape, layout, axis_sizes)


def reaches_all(shape: Sequence[int], layout: Layout, axis_sizes: Sequence[int]) -> bool:
    """Whether every dim that is sharded has at least as many rows as ranks that shard it."""
    return all((count := count_pieces(layout, dim, axis_sizes)) == 1 or size >= count for dim, size in enumerate(shape))


def to_dtensor_placements(layout: Layout) -> tuple[DTensorPlacement, ...]:
    """The layout in the words of ``torch.distributed.tensor``, for values that leave the program."""
    table: dict[str, DTensorPlacement] = {"I": DTensorReplicate(), "R": DTensorReplicate(), "P": DTensorPartial()}
    return tuple(DTensorShard(p.dim) if p.kind == "S" else table[p.kind] for p in layout)


def from_dtensor_placements(placements: tuple[DTensorPlacement, ...]) -> Layout:
    """The layout of a ``DTensor`` that enters the program.

    Raises:
        ValueError: for placements other than ``Shard(d)`` and ``Replicate()``.
    """
    layout: list[Placement] = []
    for placement in placements:
        if type(placement) is DTensorShard:
            layout.append(Shard(placement.dim))
        elif placement.is_replicate():
            layout.append(Invariant)
        else:
            raise ValueError(
                f"a DTensor given to the model has placement {placement}; only Shard(dim) and Replicate() can enter: "
                "redistribute it first"
            )
    return tuple(layout)
