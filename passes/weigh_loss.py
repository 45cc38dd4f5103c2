"""Finds what the loss is a mean over, so that microbatches can be weighted by it.

A loss that is a sum divided by what depends on the data (the number of valid tokens) gets its divisor as one more
output of the graph, and a division whose gradient stays finite where there is nothing to count.  Means over as many are
such a mean, too, when they are added up, also with terms that read no input, as weight decay.  Of means over other
numbers each has its own weight: whether those go together, microbatches will show.

Before:
    div = aten.div(cross_entropy_sum, cross_entropy_weight)
    return (div,)
After:
    weighted_mean = autoparallel.operators.weighted_mean(cross_entropy_sum, cross_entropy_weight)
    return (weighted_mean, cross_entropy_weight)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autoparallel import operators
from autoparallel.graph.lines import line_of
from autoparallel.graph.losses import LossWeight
from autoparallel.operators.control_flow import is_selection
from autoparallel.operators.opaque import has_own_backward
from autoparallel.passes.emitter import replace_node
from autoparallel.rules import operator_name
from autoparallel.rules.calls import ancestors, arguments, casts_of, followers, is_tensor, shape_of
from autoparallel.rules.shapes import expression
from autoparallel.rules.table import LOSSES

aten = torch.ops.aten

_SAME = (
    aten._to_copy.default, aten.to.dtype, aten.reshape.default, aten.view.default, aten.clone.default,
    aten.alias.default, aten.squeeze.default, aten.neg.default, aten.squeeze.dims,
)  # fmt: skip
SCALED = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)
ADDITIONS = (aten.add.Tensor, aten.sub.Tensor)
_CLAMPS = (aten.clamp.default, aten.clamp_min.default)
NUMBERS = (aten.full.default, aten.scalar_tensor.default)
"""What makes tensors of numbers."""
MEANS = (operators.weighted_mean, operators.mean_or_sum)
"""What takes the place of a division by a weight that may be 0."""
_QUOTIENTS = (aten.div.Tensor, *MEANS)
_MEANS = (aten.mean.default, aten.mean.dim)
_SUMS = (aten.sum.default, aten.sum.dim_IntList, operators.cross_entropy_sum)


def weigh_loss(module: fx.GraphModule, loss: int, counted: bool, inputs: Collection[str]) -> LossWeight:
    """Rewrites the graph of ``module`` in place; the loss is its output number ``loss``.

    Whether what a mean is over are rows of the batch, ``follow_batch`` tells.

    Args:
        counted: the loss function returned its sum and its count, so that the divisor is the weight whatever it is.
        inputs: the placeholders that are inputs.
    """
    results: Any = module.graph.output_node().args[0]
    between, terms = terms_of(results[loss], inputs, counted)
    term_weights = {term: _of_term(term, counted) for term in terms}
    groups: list[list[fx.Node]] = []
    for term in terms:
        group = next((group for group in groups if _weighs_alike(group[0], term, term_weights)), None)
        groups.append([term]) if group is None else group.append(term)
    weights = [term_weights[term] for term, *_ in groups]
    where = line_of(max(terms))
    if len(weights) > 1 and any(weight.kind == "unknown" for weight in weights):
        return LossWeight("unknown", reason=f"it adds up what are not all sums, or all means, at {where}")
    alone = all(term in {*terms, *between} or term == 0 for node in between for term in _summands(node))
    weights = [
        _of_quotients(module.graph, group, alone and len(groups) == 1) if weight.size is None else weight
        for group, weight in zip(groups, weights, strict=True)
    ]
    of_term = {term: weight for group, weight in zip(groups, weights, strict=True) for term in group}
    first, *others = (replace(of_term[term], returned=counted) for term in terms)
    if len(groups) == 1:
        return first
    if any(weight.added for weight in weights):
        reason = f"it adds up means over different numbers, to some of which a number is added, at {where}"
        return replace(first, kind="unknown", reason=reason)
    return replace(first, others=tuple(others), reason=f"it adds up means over different numbers, at {where}")


def _weighs_alike(a: fx.Node, b: fx.Node, weights: Mapping[fx.Node, LossWeight]) -> bool:
    """Whether two terms of a loss weigh the same in all microbatches, of what each weighs by itself."""
    one, other = weights[a], weights[b]
    if one.kind != other.kind or one.kind != "mean":
        return one.kind == other.kind == "sum"
    if one.size is None or other.size is None:
        return one.size is other.size and is_same(a.args[1], b.args[1], {})
    return bool(expression(one.size) == expression(other.size))


def _of_term(node: fx.Node, counted: bool) -> LossWeight:
    """What a term weighs; its size is None where that depends on the data, which ``_of_quotients`` makes an output."""
    if node.op != "call_function":
        return LossWeight("unknown", reason="it is not computed by the model")
    if node.target in _QUOTIENTS:
        return _of_quotient(node, counted)
    if node.target in _SUMS or node.target in _MEANS:
        return _of_reduction(node)
    if is_selection(node.target):  # by its rule, of rows that it adds up
        return LossWeight("sum")
    # What canonicalize_operators leaves of cross-entropies has probabilities as targets: a mean over rows.
    if node.target in (*LOSSES, aten.cross_entropy_loss.default) and arguments(node)["reduction"] in (1, 2):
        shapes = [shape_of(x) for x in node.args[:2] if isinstance(x, fx.Node)]
        size = math.prod(torch.broadcast_shapes(*shapes))
        return LossWeight("mean", size=size) if arguments(node)["reduction"] == 1 else LossWeight("sum")
    what = f"it is neither a mean nor a sum, but the result of {operator_name(node.target)} at {line_of(node)}"
    return LossWeight("unknown", reason=what)


def chain_of(loss: fx.Node, reads: Collection[fx.Node] | None = None) -> list[fx.Node]:
    """From the loss to the mean, sum or quotient that it is, but for sign, dtype and shape, and a number's factor; of a
    mean also one that is made of the caller's scalars, by which sums are quotients.

    Args:
        reads: what reads inputs that have dims: a factor that is none of it, of parameters, is the same for all rows.
    """
    chain = [loss]
    while (node := chain[-1]).op == "call_function":
        first, *others = node.args
        if node.target in _SAME or node.target in SCALED and _is_number(others[0]):
            chain.append(first)  # type: ignore[arg-type]
        elif node.target is aten.mul.Tensor and _is_number(first):
            chain.append(others[0])  # type: ignore[arg-type]
        elif reads is not None and (scaled := _drop_factor(node, lambda x: x not in reads)) is not None:
            chain.append(scaled)
        elif (scaled := _drop_factor(node, _is_from_call)) and _is_mean((rest := chain_of(scaled, reads))[-1]):
            return [*chain, *rest]
        else:
            break
    return chain


def _drop_factor(node: fx.Node, is_factor: Callable[[fx.Node], bool]) -> fx.Node | None:
    """What a call multiplies with, or divides by, a factor of no dims; None where it does not."""
    if node.target not in (aten.mul.Tensor, aten.div.Tensor):
        return None
    first, second = node.args
    pairs = [(first, second)] if node.target is aten.div.Tensor else [(first, second), (second, first)]
    tensors = [(x, y) for x, y in pairs if isinstance(x, fx.Node) and isinstance(y, fx.Node) and is_tensor(y)]
    return next((x for x, factor in tensors if not shape_of(factor) and is_factor(factor)), None)


def _is_mean(node: fx.Node) -> bool:
    if node.target in _QUOTIENTS:
        return not _is_from_call(node.args[1])
    reduced = node.target in (*LOSSES, aten.cross_entropy_loss.default) and arguments(node)["reduction"] == 1
    return reduced or node.target in _MEANS


def terms_of(loss: fx.Node, inputs: Collection[str], counted: bool) -> tuple[set[fx.Node], list[fx.Node]]:
    """The means, sums and quotients that a loss adds up and for which inputs are read, and the calls between.

    Args:
        counted: the loss is a sum divided by its count, whatever that is made of.
    """
    nodes = [node for node in loss.graph.nodes if node.name in inputs]
    reads = followers(loss.graph, {node for node in nodes if not node.users or not all(map(_is_number, node.users))})
    between: set[fx.Node] = set()
    ends: set[fx.Node] = set()
    left = [loss]
    while left:
        *path, end = chain_of(left.pop(), None if counted else reads)
        terms = []
        if end.target in ADDITIONS and not end.kwargs and not shape_of(end) and end not in between:
            terms = [x for x in end.args if isinstance(x, fx.Node) and x in reads]
        if not terms and end not in between:
            ends.add(end)
        between.update(path, [end] if terms else [])
        left += terms
    return between, sorted(ends)


def clamps_of(quotient: fx.Node, count: fx.Node) -> list[fx.Node]:
    """What stands between the divisor of a loss and what it counts."""
    chain: list[Any] = [quotient.args[1]]
    while chain[-1] is not count:
        chain.append(chain[-1].args[0])
    return chain[:-1]


def _summands(node: fx.Node) -> tuple[Any, ...]:
    """What an addition adds up."""
    return node.args if node.target in ADDITIONS else ()


def _of_reduction(node: fx.Node) -> LossWeight:
    """What a sum or a mean weighs, also of what is a mean along some dims."""
    kind, size, value = "sum", 1, node
    while value.target in (*_MEANS, *_SUMS[:2]):
        reduced: Any = value.args[0]
        if value.target in _MEANS:
            shape, dims = shape_of(reduced), arguments(value).get("dim") or ()
            along = {dim % len(shape) for dim in dims} or range(len(shape))
            kind, size = "mean", size * math.prod(shape[dim] for dim in along)
        value = reduced
        while value.target in _SAME:
            value = value.args[0]
    return LossWeight(kind, size=size)


def _of_quotient(node: fx.Node, counted: bool) -> LossWeight:
    total, divisor = node.args[:2]
    if not (isinstance(total, fx.Node) and isinstance(divisor, fx.Node)) or divisor.meta.get("differentiable"):
        return LossWeight("unknown", reason="it is divided by what is trained")
    value = divisor.meta["val"]
    if not isinstance(value, torch.Tensor):
        return LossWeight("mean", size=value)
    if value.ndim or total.meta["val"].ndim:
        return LossWeight("unknown", reason="it is divided by a tensor that is not a scalar")
    if _is_from_call(divisor) and not counted:
        return LossWeight("sum")  # an input divides the sum: the caller's own count, the same for all microbatches
    return LossWeight("mean", size=None)


def _of_quotients(graph: fx.Graph, nodes: list[fx.Node], alone: bool) -> LossWeight:
    """What quotients weigh that are divided by the same, which depends on the data.

    Args:
        alone: whether nothing else is added to them, of which a microbatch that weighs nothing must have none.
    """
    divisor: Any = next(x for x in graph.nodes if any(x is node.args[1] for node in nodes))
    count, least, added = _strip_clamp(divisor)  # zero is all of it that a clamp keeps from a division
    by_zero = (
        count is None and alone and not all(x.target is operators.weighted_mean or vanishes(x.args[0]) for x in nodes)
    )
    for node in nodes:
        node.update_arg(1, divisor)
        if count is None:
            with graph.inserting_before(node):
                mean = graph.call_function(operators.mean_or_sum if by_zero else operators.weighted_mean, node.args)
            mean.meta = dict(node.meta)
            replace_node(node, mean)
    if len(nodes) > 1:
        graph.eliminate_dead_code()  # the divisors of the others
    output = graph.output_node()
    results: Any = output.args[0]
    output.args = ((*results, divisor if count is None else count),)
    return LossWeight("mean", output=len(results), least=1.0 if by_zero else least, by_zero=by_zero, added=added)


def vanishes(total: Any) -> bool:
    """Whether a sum, and its gradient, is 0 where it weighs 0: a cross-entropy is, but for one that smooths labels over
    classes with weights."""
    end = chain_of(total)[-1]
    if end.target is not operators.cross_entropy_sum:
        return False
    return arguments(end)["weight"] is None or not arguments(end)["label_smoothing"]


def is_same(a: Any, b: Any, answers: dict[tuple[Any, Any], bool]) -> bool:
    """Whether two arguments are computed alike of the same."""
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
        return type(a) is type(b) and (
            len(a) == len(b) and all(is_same(x, y, answers) for x, y in zip(a, b, strict=True))
            if isinstance(a, list | tuple)
            else bool(a == b)
        )
    if a is not b and (a, b) not in answers:
        calls = a.op == b.op == "call_function" and a.target == b.target and not has_own_backward(a.target)
        answers[a, b] = calls and a.kwargs == b.kwargs and is_same(a.args, b.args, answers)
    return a is b or answers[a, b]


def _is_from_call(divisor: Any) -> bool:
    """Whether a divisor is computed from scalars of the caller's, and numbers, alone."""
    for node in ancestors(divisor.graph, {divisor}):
        if node.op == "placeholder" and is_tensor(node) and shape_of(node):
            return False
        if node.op != "placeholder" and not node.all_input_nodes and node.target not in NUMBERS:
            return False
    return True


def _strip_clamp(divisor: fx.Node) -> tuple[fx.Node | None, float, float]:
    """The count that a divisor is, but for a clamp to one or less, which only keeps zero from it, or for a number that
    is added; and the least of the one, and the other."""
    node = casts_of(divisor)[-1]
    count: Any = node.args[0] if node.args else None
    if node.target is aten.add.Tensor and not node.kwargs:
        number = node.args[1]
        counts = isinstance(count, fx.Node) and isinstance(number, int | float) and number > 0
        return (count, 0.0, number) if counts else (None, 0.0, 0.0)  # type: ignore[return-value]
    if node.target not in _CLAMPS:
        return None, 0.0, 0.0
    least, most = arguments(node)["min"], arguments(node).get("max")
    if most is not None or not isinstance(least, int | float) or not 0 < least <= 1:
        return None, 0.0, 0.0
    *_, added = casts_of(count)
    counts = added.target in (aten.sum.default, aten.sum.dim_IntList)
    whole = [*casts_of(count), *(casts_of(added.args[0]) if counts else [])]  # type: ignore[arg-type]
    exact = any(not x.meta["val"].dtype.is_floating_point for x in whole)
    return (count, float(least), 0.0) if exact else (None, 0.0, 0.0)


def _is_number(value: Any) -> bool:
    """Whether a value is a number, or made of numbers that the call is given: whatever its rows are, it is the same."""
    if not isinstance(value, fx.Node):
        return isinstance(value, int | float)
    return not is_tensor(value) and all(map(_holds_number, ancestors(value.graph, {value})))


def _holds_number(node: fx.Node) -> bool:
    """Whether a value is a number, or what a call is given one as: a tensor of no dims, or the size of an empty one."""
    if not is_tensor(node):
        return True
    return node.op == "placeholder" and (not shape_of(node) or 0 in shape_of(node))
