"""Notes which factors of each operator run over the batch, where the trace has fixed the batch's size.

Before (x is the first input, traced with 8 rows):
    linear = aten.linear(x, w)      "8 k, n k -> 8 n"
After:
    linear = aten.linear(x, w)      batch_factors = the factor of the rows
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from autoparallel.graph.captured import Captured
from autoparallel.rules import rule_for
from autoparallel.rules.calls import tensor_operands


def mark_batch(captured: Captured) -> None:
    """Sets ``batch_factors`` in the ``meta`` of every operator that has one.

    The first dim of the first input, and of those as long, is the batch; it is followed from factor to factor.
    """
    inputs = [node for node in captured.input_nodes if node.meta["val"].ndim]
    rows = inputs[0].meta["val"].shape[0] if inputs else 0
    batched = {n: {0} for n in inputs if rows and n.meta["val"].shape[0] % rows == 0}
    for node, factors in follow_dims(captured.graph, batched).items():
        node.meta["batch_factors"] = factors


def follow_dims(graph: fx.Graph, dims: Mapping[fx.Node, set[int]]) -> dict[fx.Node, tuple[str, ...]]:
    """The factors that run over some dims of placeholders, of every operator that has one."""
    followed, factors_of = dict(dims), dict[fx.Node, tuple[str, ...]]()
    for node in graph.nodes:
        rule = rule_for(node)
        if rule is None:
            continue
        factors: dict[str, None] = {}
        for operand, parts in zip(tensor_operands(node), rule.operands, strict=True):
            factors |= {parts[d][0]: None for d in followed.get(operand, ()) if parts[d]}
        if factors:
            factors_of[node] = tuple(factors)
            followed[node] = {d for d, part in enumerate(rule.result) if part and part[0] in factors}
    return factors_of
