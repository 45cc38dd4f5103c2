"""The redistributions, each with its transpose.

``redistribute(x, "S0", "R", "mesh0/dp")`` turns one placement of a tensor into another along one mesh axis.  Its
backward is ``redistribute(grad, dual("R"), dual("S0"), ...)``: never derived by autograd from local arithmetic (see
[Note: duality] in ``placements``).  It runs in eager autograd, under AOTAutograd and Inductor, where the part that
communicates is one opaque operator, and in ``simulate``, where the ranks are threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from autoparallel.groups import Wait, axis_index, axis_size, communicator_of
from autoparallel.placements import Invariant, Partial, Placement, Replicate, action, dual, parse_placement


def transfer(x: torch.Tensor, src: Placement, dst: Placement, group: str) -> torch.Tensor:
    """This rank's value after the redistribution, not differentiable.  A result never shares memory with ``x``
    unless the action is "nothing" or "slice"."""
    return start_transfers([x], [src], [dst], group)()[0]


def start_transfers(
    tensors: Sequence[torch.Tensor], srcs: Sequence[Placement], dsts: Sequence[Placement], group: str
) -> Callable[[], list[torch.Tensor]]:
    """Starts the redistribution of many tensors in one collective, and returns a function that waits for them.

    All pairs must have the same action; they may have different dims.  One dtype and device per call.
    """
    kinds = {action(s, d) for s, d in zip(srcs, dsts, strict=True)}
    if len(kinds) != 1:
        raise ValueError(f"one collective cannot serve different redistributions: {sorted(kinds)}")
    return _STARTERS[kinds.pop()](tensors, srcs, dsts, group)


Starter = Callable[
    [Sequence[torch.Tensor], Sequence[Placement], Sequence[Placement], str], Callable[[], list[torch.Tensor]]
]


def _flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(tensors) == 1:
        return tensors[0].contiguous().view(-1)
    return torch.cat([t.reshape(-1) for t in tensors])


def _split(flat: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Cuts the last dim of ``flat`` into tensors of the given shapes (with any leading dims of ``flat``)."""
    sizes = [torch.Size(s).numel() for s in shapes]
    lead = flat.shape[:-1]
    return [part.view((*lead, *s)) for part, s in zip(flat.split(sizes, dim=-1), shapes, strict=True)]


def _gathered(pieces: torch.Tensor, dim: int) -> torch.Tensor:
    """``[n, ..., s, ...]`` to ``[..., n * s, ...]``."""
    return pieces.movedim(0, dim).flatten(dim, dim + 1)


def _scattered(x: torch.Tensor, dim: int, n: int) -> torch.Tensor:
    """``[..., n * s, ...]`` to ``[n, ..., s, ...]``."""
    return x.unflatten(dim, (n, x.shape[dim] // n)).movedim(dim, 0)


def _start_all_reduce(
    tensors: Sequence[torch.Tensor], srcs: Sequence[Placement], dsts: Sequence[Placement], group: str
) -> Callable[[], list[torch.Tensor]]:
    communicator, axis = communicator_of(group)
    flat = tensors[0].reshape(-1).clone() if len(tensors) == 1 else _flatten(tensors)
    wait = communicator.all_reduce(flat, axis)
    shapes = [t.shape for t in tensors]
    return lambda: _split(wait(), shapes)


def _start_all_gather(
    tensors: Sequence[torch.Tensor], srcs: Sequence[Placement], dsts: Sequence[Placement], group: str
) -> Callable[[], list[torch.Tensor]]:
    communicator, axis = communicator_of(group)
    wait = communicator.all_gather(_flatten(tensors), axis)
    shapes = [t.shape for t in tensors]
    dims = [s.dim for s in srcs]
    return lambda: [_gathered(p, d) for p, d in zip(_split(wait(), shapes), dims, strict=True)]


def _start_reduce_scatter(
    tensors: Sequence[torch.Tensor], srcs: Sequence[Placement], dsts: Sequence[Placement], group: str
) -> Callable[[], list[torch.Tensor]]:
    communicator, axis = communicator_of(group)
    n = communicator.size(axis)
    pieces = [_scattered(t, d.dim, n) for t, d in zip(tensors, dsts, strict=True)]
    flat = torch.cat([p.reshape(n, -1) for p in pieces], dim=1) if len(pieces) > 1 else pieces[0].reshape(n, -1)
    wait = communicator.reduce_scatter(flat.contiguous(), axis)
    shapes = [p.shape[1:] for p in pieces]
    return lambda: _split(wait(), shapes)


def _start_all_to_all(
    tensors: Sequence[torch.Tensor], srcs: Sequence[Placement], dsts: Sequence[Placement], group: str
) -> Callable[[], list[torch.Tensor]]:
    communicator, axis = communicator_of(group)
    n = communicator.size(axis)
    pieces = [_scattered(t, d.dim, n) for t, d in zip(tensors, dsts, strict=True)]
    flat = torch.cat([p.reshape(n, -1) for p in pieces], dim=1) if len(pieces) > 1 else pieces[0].reshape(n, -1)
    wait = communicator.all_to_all(flat.contiguous(), axis)
    shapes = [p.shape[1:] for p in pieces]
    dims = [s.dim for s in srcs]
    return lambda: [_gathered(p, d) for p, d in zip(_split(wait(), shapes), dims, strict=True)]


def _local(function: Callable[[torch.Tensor, Placement, Placement, int, int], torch.Tensor]) -> Starter:
    def start(
        tensors: Sequence[torch.Tensor], srcs: Sequence[Placement], dsts: Sequence[Placement], group: str
    ) -> Callable[[], list[torch.Tensor]]:
        index, n = axis_index(group), axis_size(group)
        results = [function(t, s, d, index, n) for t, s, d in zip(tensors, srcs, dsts, strict=True)]
        return lambda: results

    return start


def _slice(x: torch.Tensor, src: Placement, dst: Placement, index: int, n: int) -> torch.Tensor:
    step = x.shape[dst.dim] // n
    return x.narrow(dst.dim, index * step, step)


def _pad(x: torch.Tensor, src: Placement, dst: Placement, index: int, n: int) -> torch.Tensor:
    step = x.shape[src.dim]
    shape = list(x.shape)
    shape[src.dim] = step * n
    out = x.new_zeros(shape)
    out.narrow(src.dim, index * step, step).copy_(x)
    return out


def _keep_on_one(x: torch.Tensor, src: Placement, dst: Placement, index: int, n: int) -> torch.Tensor:
    return x.clone() if index == 0 else torch.zeros_like(x)


_STARTERS: dict[str, Starter] = {
    "all_reduce": _start_all_reduce,
    "all_gather": _start_all_gather,
    "reduce_scatter": _start_reduce_scatter,
    "all_to_all": _start_all_to_all,
    "slice": _local(_slice),
    "pad": _local(_pad),
    "keep_on_one": _local(_keep_on_one),
    "nothing": _local(lambda x, *_: x),
}


def local_shape(shape: Sequence[Any], src: Placement, dst: Placement, n: int) -> list[Any]:
    """The shape of a rank's value after the redistribution, from its shape before."""
    out = list(shape)
    if src.kind == "S":
        out[src.dim] = out[src.dim] * n
    if dst.kind == "S":
        out[dst.dim] = out[dst.dim] // n
    return out


# The two opaque operators: what torch.compile sees of a redistribution, and of a reduction inside an operator.
@torch.library.custom_op("autoparallel::transfer", mutates_args=())
def _transfer_op(x: torch.Tensor, src: str, dst: str, group: str) -> torch.Tensor:
    out = transfer(x, parse_placement(src), parse_placement(dst), group)
    return out.clone(memory_format=torch.contiguous_format)


@_transfer_op.register_fake
def _(x: torch.Tensor, src: str, dst: str, group: str) -> torch.Tensor:
    return x.new_empty(local_shape(x.shape, parse_placement(src), parse_placement(dst), axis_size(group)))


@torch.library.custom_op("autoparallel::all_reduce", mutates_args=())
def _all_reduce_op(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    communicator, axis = communicator_of(group)
    return communicator.all_reduce(x.clone(memory_format=torch.contiguous_format), axis, op)()


@_all_reduce_op.register_fake
def _(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def all_reduce(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    """The sum or the maximum of ``x`` over a group; not differentiable."""
    return torch.ops.autoparallel.all_reduce(x, op, group)


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, src: str, dst: str, group: str) -> torch.Tensor:
        ctx.spec = (src, dst, group)
        ctx.set_materialize_grads(False)
        return _apply(x, src, dst, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        if grads[0] is None:  # of an output that is not differentiated
            return None, None, None, None
        src, dst, group = ctx.spec
        return redistribute(grads[0], _DUALS.get(dst, dst), _DUALS.get(src, src), group), None, None, None


# Dynamo traces what is below, and follows no cache: so it looks texts up instead of parsing them.
_DUALS = {str(p): str(dual(p)) for p in (Replicate, Partial)}
_WHOLE = (Invariant, Replicate, Partial)
_NOTHING = frozenset((str(a), str(b)) for a in _WHOLE for b in _WHOLE if action(a, b) == "nothing")


def _apply(x: torch.Tensor, src: str, dst: str, group: str) -> torch.Tensor:
    if src == dst or (src, dst) in _NOTHING:
        return x.view_as(x)
    if torch.compiler.is_compiling() or _is_traced(x):
        return torch.ops.autoparallel.transfer(x, src, dst, group)
    return transfer(x, parse_placement(src), parse_placement(dst), group)


def _is_traced(x: torch.Tensor) -> bool:
    return type(x) is not torch.Tensor and not isinstance(x, torch.nn.Parameter)


def redistribute(x: torch.Tensor, src: str, dst: str, group: str) -> torch.Tensor:
    """Turns the placement ``src`` of a tensor into ``dst`` along the mesh axis ``group``, differentiably.

    Args:
        x: this rank's value.
        src, dst: placements as text: ``I``, ``R``, ``P`` or ``S<dim>``.
        group: the mesh axis by name, such as ``mesh0/dp``.
    """
    return _Redistribute.apply(x, src, dst, group)


__all__ = ["Wait", "all_reduce", "local_shape", "redistribute", "start_transfers", "transfer"]
