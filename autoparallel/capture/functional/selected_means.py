"""Means over as many rows as values select, as quotients: a sum over rows, and how many these are.

A rank can add up what it has of the rows, where a mean over them is that of all ranks' rows.  How many there are, their
mask says.

Before (mask selects rows of h):
    index = aten.index(h, [mask]);  mean = aten.mean(index, [0])
After:
    index = aten.index(h, [mask]);  sum_1 = aten.sum(index, [0]);  sum_2 = aten.sum(mask)
    div = aten.div(sum_1, sum_2)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx

from autoparallel import operators
from autoparallel.passes.canonicalize_operators import CLASS_LOSSES
from autoparallel.passes.emitter import Emitter, replace_node
from autoparallel.passes.weigh_loss import vanishes
from autoparallel.rules.calls import arguments, is_tensor, shape_of
from autoparallel.rules.shapes import expression
from autoparallel.rules.table import LOSSES

aten = torch.ops.aten

UnknownSizes = Callable[[fx.Node], set[Any]]
"""The symbols of a value that are known only when the program runs."""


def divide_means(graph: fx.Graph, unknown_sizes: UnknownSizes) -> None:
    """Rewrites a functional trace in place."""
    means = [
        node
        for node in graph.nodes
        if node.target in _REWRITES and is_tensor(node) and not unknown_sizes(node)
        if any(map(unknown_sizes, node.all_input_nodes))
    ]
    if means:
        masks = _masks(graph)
        for node in means:
            quotient = _REWRITES[node.target](Emitter(node), node, masks)
            if quotient is not None:
                replace_node(node, quotient)


Masks = dict[sympy.Symbol, fx.Node]
"""The mask whose truths a size counts, by that size."""


def _masks(graph: fx.Graph) -> Masks:
    masks: Masks = {}
    for node in graph.nodes:
        if node.target in (aten.nonzero.default, aten.masked_select.default):
            mask = node.args[-1]
            dim = 0
        elif node.target is aten.index.Tensor and sum(x is not None for x in node.args[1]) == 1:
            dim, mask = next((dim, x) for dim, x in enumerate(node.args[1]) if x is not None)
        else:
            continue
        size = expression(shape_of(node)[dim])
        if mask.meta["val"].dtype is torch.bool and size.is_Symbol:
            masks.setdefault(size, mask)
    return masks


def _count(emit: Emitter, size: sympy.Expr, masks: Masks) -> Any:
    """A size as a number, or as a tensor without dims; None where no mask says it."""
    if size.is_Integer:
        return int(size)
    if size in masks:
        return emit(aten.sum.default, masks[size])
    if size.func.__name__ == "ToFloat":
        return _count(emit, size.args[0], masks)
    if size.func.__name__ not in ("Mul", "Max") or len(size.args) != 2:
        return None
    number, count = (_count(emit, x, masks) for x in size.args)
    if not isinstance(number, int) or not isinstance(count, fx.Node):
        return None
    return emit(aten.mul.Tensor if size.is_Mul else aten.clamp_min.default, count, number)


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
    mean = _mean(emit, of_each, [*range(len(shape_of(of_each)))], False, masks)
    if mean is None:
        node.graph.erase_node(of_each)
    return mean


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
    return None if count is None else emit(node.target, x, count)


_REWRITES: dict[Any, Callable[[Emitter, fx.Node, Masks], Any]] = {
    **dict.fromkeys((aten.mean.default, aten.mean.dim), _mean_of),
    **dict.fromkeys(LOSSES, _elementwise_loss),
    **dict.fromkeys(CLASS_LOSSES, _class_loss),
    **dict.fromkeys((aten.div.Tensor, aten.mul.Tensor), _quotient_or_product),
}
