"""Finds what the loss is a mean over, so that microbatches can be weighted by it.

A loss that is a sum divided by what depends on the data (the number of valid tokens) gets its divisor as one more
output of the graph, and a division whose gradient stays finite where there is nothing to count.

Before:
    div = aten.div(cross_entropy_sum, cross_entropy_weight)
    return (div,)
After:
    weighted_mean = autoparallel.operators.weighted_mean(cross_entropy_sum, cross_entropy_weight)
    return (weighted_mean, cross_entropy_weight)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from autoparallel import operators
from autoparallel.graph.captured import LossWeight
from autoparallel.rules.calls import arguments, shape_of

aten = torch.ops.aten

_SAME = (
    aten._to_copy.default, aten.to.dtype, aten.reshape.default, aten.view.default, aten.clone.default,
    aten.alias.default, aten.squeeze.default, aten.neg.default, aten.squeeze.dims,
)  # fmt: skip
_SCALED = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)
_SUMS = (aten.sum.default, operators.cross_entropy_sum)
_LOSSES = (
    aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default, aten.soft_margin_loss.default,
    aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default, aten.kl_div.default,
)  # fmt: skip


def weigh_loss(module: fx.GraphModule, loss: int, counted: bool) -> LossWeight:
    """Rewrites the graph of ``module`` in place; the loss is its output number ``loss``.

    Args:
        counted: the loss function returned its sum and its count, so that the divisor is the weight whatever it is.
    """
    output = module.graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    node = results[loss]
    while True:
        if node.op != "call_function":
            return LossWeight("unknown", reason="it is not computed by the model")
        if node.target in _SAME or node.target in _SCALED and _is_number(node.args[1]):
            node = node.args[0]
        elif node.target is aten.mul.Tensor and _is_number(node.args[0]):
            node = node.args[1]
        else:
            break
    if node.target is aten.div.Tensor:
        return _of_quotient(module.graph, node, results, counted)
    if node.target in (aten.mean.default, aten.mean.dim):
        return LossWeight("mean", size=math.prod(shape_of(node.args[0])))
    if node.target in _LOSSES and arguments(node)["reduction"] in (1, 2):
        shapes = [shape_of(x) for x in node.args[:2] if isinstance(x, fx.Node)]
        size = math.prod(torch.broadcast_shapes(*shapes))
        return LossWeight("mean", size=size) if arguments(node)["reduction"] == 1 else LossWeight("sum")
    if node.target in _SUMS:
        return LossWeight("sum")
    where = node.meta.get("key") or node.name
    return LossWeight("unknown", reason=f"it is neither a mean nor a sum, but the result of {where}")


def _of_quotient(graph: fx.Graph, node: fx.Node, results: list[fx.Node], counted: bool) -> LossWeight:
    total, divisor = node.args
    if not isinstance(total, fx.Node) or not isinstance(divisor, fx.Node) or divisor.meta.get("differentiable"):
        return LossWeight("unknown", reason="it is divided by what is trained")
    value = divisor.meta["val"]
    if not isinstance(value, torch.Tensor):
        return LossWeight("mean", size=value)
    if value.ndim or total.meta["val"].ndim:
        return LossWeight("unknown", reason="it is divided by a tensor that is not a scalar")
    if divisor.op == "placeholder" and not counted:
        return LossWeight("sum")  # an input divides the sum: the caller's own count, the same for all microbatches
    with graph.inserting_before(node):
        mean = graph.call_function(operators.weighted_mean, (total, divisor))
    mean.meta = dict(node.meta)
    node.replace_all_uses_with(mean)
    graph.erase_node(node)
    output = graph.output_node()
    output.args = ((*(mean if r is node else r for r in results), divisor),)
    return LossWeight("mean", output=len(results))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)
