"""The redistributions, each with its transpose.

``redistribute(x, "S0", "R", "mesh0/dp")`` turns one placement of a tensor into another along one mesh axis.  Its
backward is ``redistribute(grad, dual("R"), dual("S0"), ...)``: never derived by autograd from local arithmetic (see
[Note: duality] in ``placements``).  It runs in eager autograd, under AOTAutograd and Inductor, where the part that
communicates is one opaque operator, and in ``simulate``, where the ranks are threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoparallel import _torch
from autoparallel.comm import ranges
from autoparallel.comm.communicator import Communicator, Wait
from autoparallel.comm.groups import axis_index, axis_size, communicator_of
from autoparallel.placements import (
    Invariant,
    Partial,
    Placement,
    Replicate,
    action,
    chunk,
    dual,
    largest_piece,
    parse_placement,
    shards_of,
)
from autoparallel.placements.redistribution import Step


@dataclass(frozen=True)
class Extent:
    """What a rank must know to redistribute a tensor whose shards differ in size (see [Note: uneven shards]).

    Attributes:
        padded: the shape in which every rank sends its value, which is that of the largest.
        lengths: how long each rank's piece is along the dim that is gathered; empty where none is.
        room: how long the longest piece is along the dim that is cut; 0 where none is.
    """

    padded: tuple[int, ...]
    lengths: tuple[int, ...] = ()
    room: int = 0


def extent_of(step: Step, axes: Sequence[str]) -> Extent | None:
    """This rank's view of a step; None where all shards are equal.

    Args:
        axes: the mesh axes in order, as programs name them: ``mesh0/dp``, ``mesh0/tp``.
    """
    before = step.before
    if before is None:
        return None
    sizes = [axis_size(axis) for axis in axes]
    lengths: tuple[int, ...] = ()
    room = 0
    if step.src.kind == "S":
        whole = before.shape[step.src.dim]
        for axis in shards_of(before.layout, step.src.dim)[:-1]:  # the step's own axis is the innermost
            whole = chunk(whole, sizes[axis], axis_index(axes[axis]))[1]
        n = sizes[step.axes[0]]
        lengths = tuple(chunk(whole, n, i)[1] for i in range(n))
    if step.dst.kind == "S":
        room = largest_piece(before.shape, step.apply(before.layout), sizes)[step.dst.dim]
    return Extent(largest_piece(before.shape, before.layout, sizes), lengths, room)


@dataclass(slots=True)
class _Item:
    """One tensor of a transfer: its shape, and where it goes.

    Not the tensor itself, so that what waits for a collective does not keep alive what was copied to be sent.
    """

    shape: torch.Size
    src: Placement
    dst: Placement
    extent: Extent | None

    def piece(self, n: int) -> list[int]:
        """The shape in which every rank sends each of the n pieces along the dim that is cut."""
        shape = list(self.shape if self.extent is None else self.extent.padded)
        shape[self.dst.dim] = shape[self.dst.dim] // n if self.extent is None else self.extent.room
        return shape

    def cut(self, x: torch.Tensor, shape: list[int], n: int) -> torch.Tensor:
        """The value as n rows: for each rank of the group its piece, of a shape, along the dim that is cut."""
        dim = self.dst.dim
        if self.extent is not None:
            x = torch.stack([_filled_up(x.narrow(dim, *chunk(x.shape[dim], n, i)), shape) for i in range(n)])
        elif dim:
            x = x.unflatten(dim, (n, shape[dim])).movedim(dim, 0)
        return x.reshape(n, math.prod(shape))

    def part(self, piece: torch.Tensor, shape: list[int], index: int, n: int) -> torch.Tensor:
        """The part that rank ``index`` keeps of its piece, of a shape, along the dim that is cut."""
        piece = piece.view(shape)
        if self.extent is None:
            return piece
        shape = list(self.shape)
        shape[self.dst.dim] = chunk(shape[self.dst.dim], n, index)[1]
        return _corner(piece, shape)

    def joined(self, rows: torch.Tensor, shape: Sequence[int], index: int) -> torch.Tensor:
        """What rank ``index`` makes of every rank's piece, a row each: one tensor along the dim that is gathered.

        Args:
            shape: of a piece.
        """
        dim, n = self.src.dim, rows.shape[0]
        if self.extent is None:
            if dim == 0:
                return rows.reshape(n * shape[0], *shape[1:])
            return rows.view(n, *shape).movedim(0, dim).flatten(dim, dim + 1)
        lengths, pieces = self.extent.lengths, rows.view(n, *shape)
        for d, size in enumerate(self.shape):
            if d == dim:
                size = lengths[0]  # the others are as long, but for the last ones
            elif self.dst.kind == "S" and d == self.dst.dim:
                size = chunk(size, n, index)[1]
            pieces = pieces.narrow(d + 1, 0, size)
        return pieces.movedim(0, dim).flatten(dim, dim + 1).narrow(dim, 0, sum(lengths)).contiguous()


def _filled_up(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """``x`` in the corner of a tensor of zeros."""
    if list(x.shape) == list(shape):
        return x
    out = corner = x.new_zeros(shape)
    for dim, size in enumerate(x.shape):
        corner = corner.narrow(dim, 0, size)
    corner.copy_(x)
    return out


def _corner(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The part of ``x`` where it begins, contiguous."""
    for dim, size in enumerate(shape):
        x = x.narrow(dim, 0, size)
    return x.contiguous()


def transfer(x: torch.Tensor, src: Placement, dst: Placement, group: str) -> torch.Tensor:
    """This rank's value after the redistribution, not differentiable.  A result never shares memory with ``x``
    unless the action is "nothing" or "slice"."""
    return start_transfers([x], [src], [dst], group)()[0]


def start_transfers(
    tensors: Sequence[torch.Tensor],
    srcs: Sequence[Placement],
    dsts: Sequence[Placement],
    group: str,
    extents: Sequence[Extent | None] | None = None,
    owned: bool = False,
) -> Callable[[], list[torch.Tensor]]:
    """Starts the redistribution of many tensors in one collective, and returns a function that waits for them.

    All pairs must have the same action; they may have different dims.  One dtype and device per call.

    Args:
        extents: for each tensor what ``extent_of`` says; None where all shards are equal.
        owned: whether the tensors' memory may be written to: an all-reduce of what ``pack`` made then copies nothing.
    """
    pairs = {(id(s), id(d)): (s, d) for s, d in zip(srcs, dsts, strict=True)}  # most often a few, of many tensors
    kinds = {action(*pair) for pair in pairs.values()}
    if len(kinds) != 1:
        raise ValueError(f"one collective cannot serve different redistributions: {sorted(kinds)}")
    kind = kinds.pop()
    extents = extents or [None] * len(tensors)
    if kind == "all_reduce":
        return _start_all_reduce(tensors, extents, group, owned)
    items = list(map(_Item, [t.shape for t in tensors], srcs, dsts, extents))
    return _STARTERS[kind](tensors, items, group)


def settled(x: torch.Tensor) -> torch.Tensor:
    """The same values without a conjugation or a negation that is still to be done: memory is sent as it is."""
    return x.resolve_conj().resolve_neg()


Starter = Callable[[Sequence[torch.Tensor], Sequence[_Item], str], Callable[[], list[torch.Tensor]]]


def pack(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of tensors of one dtype that lie one behind the other in one piece of memory."""
    return _torch.tensors.split_like(_torch.tensors.join(tensors), tensors)


def _flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """All elements one behind the other: the tensors' own memory where they lie like that, or a copy."""
    if len(tensors) == 1:
        return settled(tensors[0]).contiguous().view(-1)
    if are_adjacent(tensors):
        return tensors[0].as_strided((sum(t.numel() for t in tensors),), (1,))
    return _torch.tensors.join(tensors)


def are_adjacent(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether tensors lie one behind the other in one piece of memory, which holds their values as they are."""
    storage, end = tensors[0].untyped_storage(), tensors[0].storage_offset()
    for t in tensors:
        if t.untyped_storage() is not storage or t.storage_offset() != end or not t.is_contiguous():
            return False
        if t.is_conj() or t.is_neg():
            return False
        end += t.numel()
    return True


def _payloads(tensors: Sequence[torch.Tensor], extents: Sequence[Extent | None]) -> list[torch.Tensor]:
    """The values in the shapes in which every rank sends them."""
    pairs = zip(tensors, extents, strict=True)
    return [x if extent is None else _filled_up(x, extent.padded) for x, extent in pairs]


def _start_all_reduce(
    tensors: Sequence[torch.Tensor], extents: Sequence[Extent | None], group: str, owned: bool
) -> Callable[[], list[torch.Tensor]]:
    communicator, axis = communicator_of(group)
    payloads = _payloads(tensors, extents)
    flat = _flatten(payloads)
    if _torch.tensors.storage_mark(flat) == _torch.tensors.storage_mark(payloads[0]) and not owned:
        flat = flat.clone()
    wait = communicator.all_reduce(flat, axis)
    sums = _torch.tensors.split_like(flat, payloads)  # it is reduced in place
    shapes = [None if extent is None else x.shape for x, extent in zip(tensors, extents, strict=True)]

    def finish() -> list[torch.Tensor]:
        wait()
        return [x if shape is None else _corner(x, shape) for x, shape in zip(sums, shapes, strict=True)]

    return finish


def _start_all_gather(
    tensors: Sequence[torch.Tensor], items: Sequence[_Item], group: str
) -> Callable[[], list[torch.Tensor]]:
    communicator, axis = communicator_of(group)
    index, payloads = communicator.index(axis), _payloads(tensors, [item.extent for item in items])
    wait, shapes = communicator.all_gather(_flatten(payloads), axis), [x.shape for x in payloads]

    def finish() -> list[torch.Tensor]:
        parts = wait().split([shape.numel() for shape in shapes], dim=1)
        return [item.joined(rows, shape, index) for item, rows, shape in zip(items, parts, shapes, strict=True)]

    return finish


def _start_cut(
    send: Callable[[Communicator, torch.Tensor, str], Wait],
    receive: Callable[[_Item, torch.Tensor, list[int], int, int], torch.Tensor],
) -> Starter:
    """A collective that sends every rank its own piece."""

    def start(tensors: Sequence[torch.Tensor], items: Sequence[_Item], group: str) -> Callable[[], list[torch.Tensor]]:
        communicator, axis = communicator_of(group)
        n, index = communicator.size(axis), communicator.index(axis)
        shapes = [item.piece(n) for item in items]
        rows = [item.cut(x, shape, n) for x, item, shape in zip(tensors, items, shapes, strict=True)]
        flat = torch.cat(rows, dim=1) if len(rows) > 1 else settled(rows[0]).contiguous()
        wait, sizes = send(communicator, flat, axis), [row.shape[1] for row in rows]

        def finish() -> list[torch.Tensor]:
            parts = zip(items, wait().split(sizes, dim=-1), shapes, strict=True)
            return [receive(item, x, shape, index, n) for item, x, shape in parts]

        return finish

    return start


def _local(function: Callable[[torch.Tensor, _Item, int, int], torch.Tensor]) -> Starter:
    def start(tensors: Sequence[torch.Tensor], items: Sequence[_Item], group: str) -> Callable[[], list[torch.Tensor]]:
        index, n = axis_index(group), axis_size(group)
        results = [function(x, item, index, n) for x, item in zip(tensors, items, strict=True)]
        return lambda: results

    return start


def _slice(x: torch.Tensor, item: _Item, index: int, n: int) -> torch.Tensor:
    dim = item.dst.dim
    size = x.shape[dim]
    if item.extent is None and size % n:
        raise ValueError(f"a dim of {size} rows cannot be cut into {n} equal pieces")
    part = x.narrow(dim, *chunk(size, n, index))
    # As a view, an activation's part would keep all of it in memory for the backward.
    is_activation = x.grad_fn is not None or _torch.autograd.running_backward() >= 0
    return part.clone(memory_format=torch.contiguous_format) if is_activation else part


def _pad(x: torch.Tensor, item: _Item, index: int, n: int) -> torch.Tensor:
    dim, shape = item.src.dim, list(x.shape)
    lengths = (shape[dim],) * n if item.extent is None else item.extent.lengths
    shape[dim] = sum(lengths)
    out = x.new_zeros(shape)
    out.narrow(dim, sum(lengths[:index]), lengths[index]).copy_(x)
    return out


def _keep_on_one(x: torch.Tensor, item: _Item, index: int, n: int) -> torch.Tensor:
    return x.clone() if index == 0 else torch.zeros_like(x)


_STARTERS: dict[str, Starter] = {
    "all_gather": _start_all_gather,
    "reduce_scatter": _start_cut(lambda c, flat, axis: c.reduce_scatter(flat, axis), _Item.part),
    "all_to_all": _start_cut(
        lambda c, flat, axis: c.all_to_all(flat, axis), lambda item, x, shape, i, n: item.joined(x, shape, i)
    ),
    "slice": _local(_slice),
    "pad": _local(_pad),
    "keep_on_one": _local(_keep_on_one),
    "nothing": _local(lambda x, item, index, n: x),
}


def local_shape(shape: Sequence[Any], src: Placement, dst: Placement, n: int) -> list[Any]:
    """The shape of a rank's value after the redistribution, from its shape before."""
    out = list(shape)
    if src.kind == "S":
        out[src.dim] = out[src.dim] * n
    if dst.kind == "S":
        out[dst.dim] = out[dst.dim] // n
    return out


def arriving_shape(shape: Sequence[Any], src: str, dst: str, group: str) -> list[Any]:
    """The local shape after the redistribution between placements as text, along a mesh axis by name."""
    return local_shape(shape, parse_placement(src), parse_placement(dst), axis_size(group))


def dims_of_rows(ndim: int, src: str, dst: str) -> int:
    """How many leading dims of a tensor can be cut into chunks that are redistributed apart: those before the first one
    that is cut over ranks, and not the last."""
    return min([ndim - 1, *(int(placement[1:]) for placement in (src, dst) if placement[0] == "S")])


def ends_of_chunks(rows: Any, chunks: int) -> list[Any]:
    """Where the chunks of so many rows begin and end; there may be some without rows."""
    return [rows * i // chunks for i in range(chunks + 1)]


# The two opaque operators: what torch.compile sees of a redistribution, and of a reduction inside an operator.
@torch.library.custom_op("autoparallel::transfer", mutates_args=())
def _transfer_op(x: torch.Tensor, src: str, dst: str, group: str) -> torch.Tensor:
    out = transfer(x, parse_placement(src), parse_placement(dst), group)
    return out.clone(memory_format=torch.contiguous_format)


@_transfer_op.register_fake
def _(x: torch.Tensor, src: str, dst: str, group: str) -> torch.Tensor:
    return x.new_empty(arriving_shape(x.shape, src, dst, group))


@torch.library.custom_op("autoparallel::all_reduce", mutates_args=())
def _all_reduce_op(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    communicator, axis = communicator_of(group)
    return communicator.all_reduce(settled(x).clone(memory_format=torch.contiguous_format), axis, op)()


@_all_reduce_op.register_fake
def _(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def all_reduce(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    """The sum or the maximum of ``x`` over a group; not differentiable."""
    return torch.ops.autoparallel.all_reduce(x, op, group)


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, src: str, dst: str, group: str) -> torch.Tensor:
        ctx.back = *transposed(src, dst), group
        ctx.module = ranges.place()
        ctx.set_materialize_grads(False)
        return apply(x, src, dst, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        if grads[0] is None:  # of an output that is not differentiated
            return None, None, None, None
        return ranges.in_backward(ctx.module, redistribute, grads[0], *ctx.back), None, None, None


# Dynamo traces what is below, and follows no cache: so it looks texts up instead of parsing them.
DUALS = {str(p): str(dual(p)) for p in (Replicate, Partial)}
_WHOLE = (Invariant, Replicate, Partial)
_NOTHING = frozenset((str(a), str(b)) for a in _WHOLE for b in _WHOLE if action(a, b) == "nothing")


def transposed(src: str, dst: str) -> tuple[str, str]:
    """The placements between which the gradient of what goes from ``src`` to ``dst`` goes."""
    return DUALS.get(dst, dst), DUALS.get(src, src)


def apply(x: torch.Tensor, src: str, dst: str, group: str) -> torch.Tensor:
    """A redistribution as :func:`redistribute` does it, not differentiable."""
    if src == dst or (src, dst) in _NOTHING:
        # AOTAutograd makes results that share memory from each other, past the autograd function between them.
        return x.clone() if torch.compiler.is_compiling() else x.view_as(x)
    if torch.compiler.is_compiling() or is_traced(x):
        return torch.ops.autoparallel.transfer(x, src, dst, group)
    return transfer(x, parse_placement(src), parse_placement(dst), group)


def is_traced(x: torch.Tensor) -> bool:
    """Whether a tensor has no values: operators are only noted, and what communicates must be one."""
    return x.is_meta or type(x) is not torch.Tensor and not isinstance(x, torch.nn.Parameter)


def is_compiled(x: torch.Tensor) -> bool:
    """Whether a compiler looks at what is computed, as a dry run does not."""
    return torch.compiler.is_compiling() or is_traced(x) and not x.is_meta


def redistribute(x: torch.Tensor, src: str, dst: str, group: str) -> torch.Tensor:
    """Turns the placement ``src`` of a tensor into ``dst`` along the mesh axis ``group``, differentiably.

    Args:
        x: this rank's value.
        src, dst: placements as text: ``I``, ``R``, ``P`` or ``S<dim>``.
        group: the mesh axis by name, such as ``mesh0/dp``.
    """
    return _Redistribute.apply(x, src, dst, group)
