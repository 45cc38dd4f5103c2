"""Notes which factors of each operator run over the batch, where the trace has fixed its size, or time comes first.

Before (x is the first input, traced with 8 rows):
    linear = aten.linear(x, w)      "8 k, n k -> 8 n"
After:
    linear = aten.linear(x, w)      batch_factors = the factor of the rows
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from autoparallel.graph.captured import Captured
from autoparallel.graph.lines import line_of
from autoparallel.operators.recurrent import recurrent
from autoparallel.rules import rule_for
from autoparallel.rules.calls import arguments, tensor_operands


def mark_batch(captured: Captured) -> None:
    """Sets ``batch_factors`` in the ``meta`` of every operator that has one.

    The first dim of the first input, and of those as long, is the batch; it is followed from factor to factor.
    """
    inputs = [node for node in captured.input_nodes if node.meta["val"].ndim]
    rows = inputs[0].meta["val"].shape[0] if inputs else 0
    _mark(captured, {n: {0} for n in inputs if rows and n.meta["val"].shape[0] % rows == 0})


def mark_batch_behind_time(captured: Captured) -> bool:
    """The same where a recurrent layer takes the first dim of the first input for time, and the second for its rows.

    Then the second is the batch, and time, where it is open, a length of the trace (see ``Captured.time_first``).

    Returns:
        Whether it is so.
    """
    leaves = {node: captured.inputs.index(node.name) for node in captured.input_nodes if node.meta["val"].ndim}
    first = next(iter(leaves), None)
    layers = captured.graph.find_nodes(op="call_function", target=recurrent)
    if not layers or first is None or first.meta["val"].ndim < 2:
        return False
    times, rows = (_follow(captured.graph, {first: {dim}})[0] for dim in (0, 1))
    layer = next((x for x in layers if _reads(x, times, rows)), None)
    if layer is None:
        return False
    shapes = {node: [str(size) for size in node.meta["val"].shape] for node in leaves}
    steps, batch = shapes[first][:2]
    for node, shape in shapes.items():
        if shape[0] == batch and shape[:2] != [steps, batch]:
            captured.batch_dims[leaves[node]] = 0  # a target [batch, ...]
        elif shape[1:2] == [batch]:
            captured.batch_dims[leaves[node]] = 1  # a state [layers, batch, width], a target [time, batch]
    captured.time_first, captured.lengths = line_of(layer), frozenset(captured.actual)
    _mark(captured, {node: {captured.batch_dims[i]} for node, i in leaves.items() if i in captured.batch_dims})
    return True


def _reads(layer: fx.Node, times: Mapping[fx.Node, set[int]], rows: Mapping[fx.Node, set[int]]) -> bool:
    """Whether a recurrent layer takes these for time, and those for its rows."""
    x, first = tensor_operands(layer)[0], arguments(layer)["batch_first"]
    return (1 if first else 0) in times.get(x, ()) and (0 if first else 1) in rows.get(x, ())


def _mark(captured: Captured, dims: Mapping[fx.Node, set[int]]) -> None:
    for node, factors in follow_dims(captured.graph, dims).items():
        node.meta["batch_factors"] = factors


def follow_dims(graph: fx.Graph, dims: Mapping[fx.Node, set[int]]) -> dict[fx.Node, tuple[str, ...]]:
    """The factors that run over some dims of placeholders, of every operator that has one."""
    return _follow(graph, dims)[1]


def _follow(
    graph: fx.Graph, dims: Mapping[fx.Node, set[int]]
) -> tuple[dict[fx.Node, set[int]], dict[fx.Node, tuple[str, ...]]]:
    """The dims of every node that some dims of placeholders become, and the factors of operators that run over them."""
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
    return followed, factors_of
