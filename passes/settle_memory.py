"""Rewrites what speaks of memory as what speaks of values: a rank's tensors lie otherwise than the traced ones.

Conjugations and negations are done where they stand, copies become casts and expansions, and what reads or writes
through other strides becomes a look-up by position, or a scatter.

Before (c is a contiguous [6, 6]):
    as_strided = aten.as_strided(c, [6], [7], 0);  fill = aten.fill(as_strided, 0)
    as_strided_scatter = aten.as_strided_scatter(c, fill, [6], [7], 0)
After:
    reshape = aten.reshape(c, [-1]);  mul = aten.mul(aten.arange(6), 7)
    index_select = aten.index_select(reshape, 0, mul);  fill = aten.fill(index_select, 0)
    scatter = aten.scatter(reshape, 0, mul, fill);  reshape_1 = aten.reshape(scatter, [6, 6])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx

from autoparallel.passes.emitter import Emitter, Rewrite
from autoparallel.passes.mark_gradients import stops_gradient
from autoparallel.rules.calls import ancestors, arguments, is_tensor, may_have_gradient, shape_of
from autoparallel.rules.shapes import expression, hint

aten = torch.ops.aten

STRIDED = (aten.as_strided.default, aten.as_strided_scatter.default)
_SETTLING = (aten.resolve_conj.default, aten.resolve_neg.default)


def _lazy(emit: Emitter, node: fx.Node) -> Any:
    x = node.args[0]
    if node.target in _SETTLING:
        return x
    return emit(aten.neg.default if node.target is aten._neg_view.default else aten.conj_physical.default, x)


def _copy(emit: Emitter, node: fx.Node) -> Any:
    """A copy has no derivative; the tensor that it overwrites gets a gradient of zero, as from ``fill``."""
    x, source = node.args[:2]
    assert isinstance(x, fx.Node) and isinstance(source, fx.Node)
    value = node.meta["val"]
    source = emit.cast(source, value.dtype)
    if tuple(map(_size, shape_of(source))) != tuple(map(_size, shape_of(x))):
        source = emit(aten.expand.default, source, emit.sizes(x))
    if not may_have_gradient(value) or not _may_be_trained(x):
        return source
    return emit(aten.add.Tensor, emit(aten.fill.Scalar, x, 0), source)


def _may_be_trained(x: fx.Node) -> bool:
    """Whether a value depends on a tensor that was given, in a way that gradients flow through."""
    read = ancestors(x.graph, {x}, through=lambda node: is_tensor(node) and not stops_gradient(node))
    return any(node.op == "placeholder" and is_tensor(node) for node in read)


def _make_strided(emit: Emitter, node: fx.Node) -> Any:
    v = arguments(node)
    x: fx.Node = v["self"]
    start = relative_start(node)
    order = _order_in_memory(x.meta["val"])
    assert start is not None and order is not None, "what cannot be rewritten is refused before"
    in_order = order == sorted(order)
    x = x if in_order else emit(aten.permute.default, x, order)
    flat = emit(aten.reshape.default, x, [-1])
    index = _positions(emit, v["size"], v["stride"], start, node.meta["val"].device)
    if node.target is aten.as_strided.default:
        return emit(aten.reshape.default, emit(aten.index_select.default, flat, 0, index), v["size"])
    source = emit(aten.reshape.default, v["src"], [-1])
    written = emit(aten.scatter.src, flat, 0, index, source)
    written = emit(aten.reshape.default, written, emit.sizes(x))
    return written if in_order else emit(aten.permute.default, written, [order.index(d) for d in range(len(order))])


def _positions(
    emit: Emitter, sizes: Sequence[Any], strides: Sequence[Any], start: int, device: torch.device
) -> fx.Node:
    """Where the elements of a strided tensor lie, in its order; one-dimensional."""
    index: fx.Node | None = None
    for d, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
        along = emit(aten.arange.default, size, dtype=torch.int64, device=device)
        along = emit(aten.mul.Tensor, along, stride) if isinstance(stride, int) else emit(torch.mul, along, stride)
        for _ in range(len(sizes) - 1 - d):
            along = emit(aten.unsqueeze.default, along, -1)
        index = along if index is None else emit(aten.add.Tensor, index, along)
    if index is None:
        index = emit(aten.full.default, [], 0, dtype=torch.int64, device=device)
    if start:
        index = emit(aten.add.Tensor, index, start)
    return emit(aten.reshape.default, index, [-1])


def relative_start(node: fx.Node) -> int | None:
    """Where what a strided call reads or writes begins in its operand; None where the operand does not lie in one
    piece in memory, or does not hold all of it, so that positions in it cannot be told."""
    v = arguments(node)
    value = v["self"].meta["val"]
    if _order_in_memory(value) is None:
        return None
    offset = v["storage_offset"]
    start = sympy.Integer(0)
    if offset is not None:
        start = sympy.simplify(_size(offset) - _size(value.storage_offset()))
    if not start.is_Integer:
        return None
    last = int(start) + sum((_hint(s) - 1) * _hint(t) for s, t in zip(v["size"], v["stride"], strict=True))
    inside = int(start) >= 0 and last < _hint(value.numel())
    return int(start) if inside else None


def _order_in_memory(value: torch.Tensor) -> list[int] | None:
    """The dims of a tensor as they lie in memory, the outermost first; None where it does not lie in one piece."""
    strides = value.stride()
    order = sorted(range(value.ndim), key=lambda d: -_hint(strides[d]))
    expected: Any = sympy.Integer(1)
    for d in reversed(order):
        if _size(value.shape[d]) == 1:
            continue
        if _size(strides[d]) != expected:
            return None
        expected = expected * _size(value.shape[d])
    return order


def _size(size: Any) -> sympy.Expr:
    return expression(size.meta["val"] if isinstance(size, fx.Node) else size)


def _hint(size: Any) -> int:
    return hint(size.meta["val"] if isinstance(size, fx.Node) else size)


MEMORY_REWRITES: dict[Any, Rewrite] = {
    **dict.fromkeys((aten._conj.default, aten.conj.default, aten._neg_view.default, *_SETTLING), _lazy),
    **dict.fromkeys(STRIDED, _make_strided),
    aten.copy.default: _copy,
}
