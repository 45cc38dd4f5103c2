"""How many rows values select, as what their mask counts: where a mean is over them, and where a model asks for it.

A rank can count the truths of a mask that it has, and add up what it has of the rows, where a number of rows, or a mean
over them, is that of all ranks' rows.

Before (mask selects rows of h):
    index = aten.index(h, [mask]);  mean = aten.mean(index, [0])
    sym_size = aten.sym_size(index, 0);  scalar_tensor = aten.scalar_tensor(sym_size)
After:
    index = aten.index(h, [mask]);  sum_1 = aten.sum(index, [0]);  sum_2 = aten.sum(mask)
    div = aten.div(sum_1, sum_2)
    sum_3 = aten.sum(mask)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoparallel import operators
from autoparallel._torch.export import free_unbacked_symbols
from autoparallel.passes.canonicalize_operators import CLASS_LOSSES
from autoparallel.passes.emitter import Emitter, replace_node
from autoparallel.passes.weigh_loss import is_same, vanishes
from autoparallel.rules.calls import arguments, is_tensor, shape_of
from autoparallel.rules.shapes import expression
from autoparallel.rules.table import LOSSES

aten = torch.ops.aten


def count_by_masks(graph: fx.Graph) -> None:
    """Rewrites a functional trace in place."""
    calls = [
        node
        for node in graph.nodes
        if node.target in _REWRITES and is_tensor(node) and not unknown_sizes(node)
        if any(map(unknown_sizes, node.all_input_nodes))
    ]
    if calls:
        masks = _masks(graph)
        for node in calls:
            result = _REWRITES[node.target](Emitter(node), node, masks)
            if result is not None:
                replace_node(node, result)


def unknown_sizes(node: fx.Node) -> set[Any]:
    """The symbols of a value that are known only when the program runs."""
    return {s for value in pytree.tree_leaves(node.meta.get("val")) for s in free_unbacked_symbols(value)}


Masks = dict[sympy.Symbol, fx.Node]
"""The mask whose truths a size counts, by that size."""


def _masks(graph: fx.Graph) -> Masks:
    """The masks of sizes, but where a call puts rows beside those of another mask: there eager takes one row for all,
    and the trace has one size for both."""
    masks: Masks = {}
    others: set[sympy.Symbol] = set()
    for node in graph.nodes:
        size, mask = selected_by(node)
        if mask is not None and not is_same(masks.setdefault(size, mask), mask, {}):
            others.add(size)
        read = {symbol for x in node.all_input_nodes if is_tensor(x) for symbol in unknown_sizes(x)}
        selecting = [masks[symbol] for symbol in read if symbol in masks]
        meet = is_tensor(node) and bool(read - unknown_sizes(node))
        if meet and any(not is_same(selecting[0], x, {}) for x in selecting[1:]):
            others |= read
    return {size: mask for size, mask in masks.items() if size not in others}


def selected_by(node: fx.Node) -> tuple[sympy.Expr, fx.Node | None]:
    """How many rows a call selects, and by which mask; none where that is not all it goes by."""
    mask: Any = None
    dim = 0
    if node.target in (aten.nonzero.default, aten.masked_select.default):
        if node.args[-1].meta["val"].dtype is not torch.bool:  # type: ignore[union-attr]
            node.args = (Emitter(node)(aten.ne.Scalar, node.args[-1], 0),)
        mask = node.args[-1]
    elif node.target is aten.index.Tensor:
        at = [(dim, x) for dim, x in enumerate(node.args[1]) if x is not None]  # type: ignore[arg-type]
        dim, mask = at[0] if len(at) == 1 else (0, None)
    is_mask = mask is not None and mask.meta["val"].dtype is torch.bool
    size = expression(shape_of(node)[dim]) if is_mask else sympy.Integer(0)
    return size, mask if size.is_Symbol else None


_OPERATIONS: dict[str, tuple[Any, Any]] = {
    "Add": (aten.add.Tensor, aten.add.Tensor),
    "Mul": (aten.mul.Tensor, aten.mul.Tensor),
    "Max": (aten.clamp_min.default, aten.maximum.default),
    "Min": (aten.clamp_max.default, aten.minimum.default),
    "Unequality": (aten.ne.Scalar, aten.ne.Tensor),
    "Equality": (aten.eq.Scalar, aten.eq.Tensor),
    "StrictGreaterThan": (aten.gt.Scalar, aten.gt.Tensor),
    "GreaterThan": (aten.ge.Scalar, aten.ge.Tensor),
    "StrictLessThan": (aten.lt.Scalar, aten.lt.Tensor),
    "LessThan": (aten.le.Scalar, aten.le.Tensor),
}
"""What makes of two tensors what torch makes of two sizes: of one and a number, and of both."""


def _count(emit: Emitter, size: sympy.Expr, masks: Masks) -> Any:
    """What is computed of sizes as a number, or as a tensor without dims; None where no mask tells them."""
    name, of = size.func.__name__, size.args
    if size.is_Integer:
        return int(size)
    if size in masks:
        return emit(aten.sum.default, masks[size])
    if name == "ToFloat":
        return _count(emit, of[0], masks)
    if name == "Piecewise" and [branch[0] for branch in of] == [1, 0]:  # an answer
        return _count(emit, of[0][1], masks)
    if name not in _OPERATIONS or len(of) != 2:
        return None
    if of[0].is_Integer:
        size = size.reversed if size.is_Relational else size
        of = of[::-1]
    first, second = (_count(emit, x, masks) for x in of)
    if first is None or second is None or isinstance(first, int):
        return None
    return emit(_OPERATIONS[size.func.__name__][isinstance(second, fx.Node)], first, second)


def _number(emit: Emitter, node: fx.Node, masks: Masks) -> fx.Node | None:
    """A number of rows, or what is asked about it, that becomes a tensor."""
    v = arguments(node)
    count = _count(emit, v["s"].meta["val"].node.expr, masks)
    return emit.cast(count, emit.value(node).dtype) if isinstance(count, fx.Node) else None


def _mean(emit: Emitter, x: fx.Node, dims: list[int], keepdim: bool, masks: Masks) -> fx.Node | None:
    sizes = [expression(shape_of(x)[dim]) for dim in dims]
    number, rows = sympy.Mul(*(size for size in sizes if size.is_Integer)), [s for s in sizes if not s.is_Integer]
    count = _count(emit, rows[0], masks) if len(rows) == 1 else None
    if count is None:
        return None
    dtype = emit.value(x).dtype
    summed = torch.promote_types(dtype, torch.float32)  # as torch's mean adds half precision up
    total = emit(aten.sum.dim_IntList, x, dims, keepdim, **({} if dtype == summed else {"dtype": summed}))
    total = total if number == 1 else emit(aten.div.Tensor, total, int(number))
    # Where there are no rows, there is no gradient of them that is divided by zero.
    return emit.cast(emit(aten.div.Tensor if shape_of(total) else operators.weighted_mean, total, count), dtype)


def _mean_of(emit: Emitter, node: fx.Node, masks: Masks) -> fx.Node | None:
    v = arguments(node)
    x: fx.Node = v["self"]
    rank = len(shape_of(x))
    dims = sorted(dim % rank for dim in v.get("dim") or range(rank))
    return _mean(emit, x if v["dtype"] is None else emit.cast(x, v["dtype"]), dims, v.get("keepdim", False), masks)


def _elementwise_loss(emit: Emitter, node: fx.Node, masks: Masks) -> fx.Node | None:
    values = arguments(node)
    if values["reduction"] != 1:
        return None
    values["reduction"] = 0
    schema: Any = node.target
    by_place = [values.pop(x.name) for x in schema._schema.arguments if not x.kwarg_only]
    of_each = emit(node.target, *by_place, **values)
    return _mean(emit, of_each, [*range(len(shape_of(of_each)))], False, masks)


def _class_loss(emit: Emitter, node: fx.Node, masks: Masks) -> Any:
    loss = CLASS_LOSSES[node.target](emit, node)
    for x in (loss, *loss.all_input_nodes) if loss is not None else ():
        if x.target is aten.div.Tensor and vanishes(x.args[0]):
            x.target = operators.weighted_mean
    return loss


def _quotient_or_product(emit: Emitter, node: fx.Node, masks: Masks) -> fx.Node | None:
    """What is divided by a number of rows, or multiplied with it."""
    x, size, *others = node.args
    if others or node.kwargs or not isinstance(size, fx.Node) or is_tensor(size):
        return None
    count = _count(emit, size.meta["val"].node.expr, masks)
    if count is None:
        return None
    dtype = emit.value(node).dtype
    if dtype.is_floating_point:  # half precision does not hold what is counted
        x = emit.cast(x, torch.promote_types(dtype, torch.float32))  # type: ignore[arg-type]
    return emit.cast(emit(node.target, x, count), dtype)


_REWRITES: dict[Any, Callable[[Emitter, fx.Node, Masks], Any]] = {
    **dict.fromkeys((aten.mean.default, aten.mean.dim), _mean_of),
    **dict.fromkeys(LOSSES, _elementwise_loss),
    **dict.fromkeys(CLASS_LOSSES, _class_loss),
    **dict.fromkeys((aten.div.Tensor, aten.mul.Tensor), _quotient_or_product),
    aten.scalar_tensor.default: _number,
}
