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
from autoparallel.graph.lines import line_of
from autoparallel.rules.calls import ancestors, arguments, casts_of, is_tensor, shape_of
from autoparallel.rules.table import LOSSES

aten = torch.ops.aten

_SAME = (
    aten._to_copy.default, aten.to.dtype, aten.reshape.default, aten.view.default, aten.clone.default,
    aten.alias.default, aten.squeeze.default, aten.neg.default, aten.squeeze.dims,
)  # fmt: skip
SCALED = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)
_CLAMPS = (aten.clamp.default, aten.clamp_min.default)
NUMBERS = (aten.full.default, aten.scalar_tensor.default)
"""What makes tensors of numbers."""
_QUOTIENTS = (aten.div.Tensor, operators.weighted_mean)
_SUMS = (aten.sum.default, aten.sum.dim_IntList, operators.cross_entropy_sum)


def weigh_loss(module: fx.GraphModule, loss: int, counted: bool) -> LossWeight:
    """Rewrites the graph of ``module`` in place; the loss is its output number ``loss``.

    Whether what a mean is over are rows of the batch, ``follow_batch`` tells.

    Args:
        counted: the loss function returned its sum and its count, so that the divisor is the weight whatever it is.
    """
    output = module.graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    node = chain_of(results[loss])[-1]
    if node.op != "call_function":
        return LossWeight("unknown", reason="it is not computed by the model")
    if node.target in _QUOTIENTS:
        return _of_quotient(module.graph, node, results, counted)
    if node.target in (aten.mean.default, aten.mean.dim):
        return LossWeight("mean", size=math.prod(shape_of(node.all_input_nodes[0])))
    # What canonicalize_operators leaves of cross-entropies has probabilities as targets: a mean over rows.
    if node.target in (*LOSSES, aten.cross_entropy_loss.default) and arguments(node)["reduction"] in (1, 2):
        shapes = [shape_of(x) for x in node.args[:2] if isinstance(x, fx.Node)]
        size = math.prod(torch.broadcast_shapes(*shapes))
        return LossWeight("mean", size=size) if arguments(node)["reduction"] == 1 else LossWeight("sum")
    if node.target in _SUMS:
        return LossWeight("sum")
    what = f"it is neither a mean nor a sum, but the result of {node.target} at {line_of(node)}"
    return LossWeight("unknown", reason=what)


def chain_of(loss: fx.Node) -> list[fx.Node]:
    """From the loss to the mean, sum or quotient that it is, but for sign, dtype and shape, and a number's factor."""
    chain = [loss]
    while (node := chain[-1]).op == "call_function":
        first, *others = node.args
        if node.target in _SAME or node.target in SCALED and _is_number(others[0]):
            chain.append(first)  # type: ignore[arg-type]
        elif node.target is aten.mul.Tensor and _is_number(first):
            chain.append(others[0])  # type: ignore[arg-type]
        else:
            break
    return chain


def clamps_of(quotient: fx.Node, count: fx.Node) -> list[fx.Node]:
    """What stands between the divisor of a loss and what it counts."""
    chain: list[Any] = [quotient.args[1]]
    while chain[-1] is not count:
        chain.append(chain[-1].args[0])
    return chain[:-1]


def _of_quotient(graph: fx.Graph, node: fx.Node, results: list[fx.Node], counted: bool) -> LossWeight:
    total, divisor = node.args
    if not isinstance(total, fx.Node) or not isinstance(divisor, fx.Node) or divisor.meta.get("differentiable"):
        return LossWeight("unknown", reason="it is divided by what is trained")
    value = divisor.meta["val"]
    if not isinstance(value, torch.Tensor):
        return LossWeight("mean", size=value)
    if value.ndim or total.meta["val"].ndim:
        return LossWeight("unknown", reason="it is divided by a tensor that is not a scalar")
    if _is_from_call(divisor) and not counted:
        return LossWeight("sum")  # an input divides the sum: the caller's own count, the same for all microbatches
    output = graph.output_node()
    if (count := _strip_clamp(divisor)) is not None:  # zero is all of it that a clamp keeps from a division
        output.args = ((*results, count),)
        return LossWeight("mean", output=len(results))
    with graph.inserting_before(node):
        mean = graph.call_function(operators.weighted_mean, (total, divisor))
    mean.meta = dict(node.meta)
    node.replace_all_uses_with(mean)
    graph.erase_node(node)
    output.args = ((*(mean if r is node else r for r in results), divisor),)
    return LossWeight("mean", output=len(results))


def _is_from_call(divisor: fx.Node) -> bool:
    """Whether a divisor is computed from scalars of the caller's, and numbers, alone."""
    for node in ancestors(divisor.graph, {divisor}):
        if node.op == "placeholder" and is_tensor(node) and shape_of(node):
            return False
        if node.op != "placeholder" and not node.all_input_nodes and node.target not in NUMBERS:
            return False
    return True


def _strip_clamp(divisor: fx.Node) -> fx.Node | None:
    """The count that a divisor is, but for a clamp to one or less, which only keeps zero from it."""
    node = casts_of(divisor)[-1]
    if node.target not in _CLAMPS:
        return None
    least, most = arguments(node)["min"], arguments(node).get("max")
    if most is not None or not isinstance(least, int | float) or not 0 < least <= 1:
        return None
    count: Any = node.args[0]
    *_, added = casts_of(count)
    counts = added.target in (aten.sum.default, aten.sum.dim_IntList)
    whole = [*casts_of(count), *(casts_of(added.args[0]) if counts else [])]  # type: ignore[arg-type]
    return count if any(not x.meta["val"].dtype.is_floating_point for x in whole) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)
