"""Undoes what only says when, where and how often calls run, so that a program can be verified.

Layers that run again in the backward, and losses that go through their rows in chunks, are graphs of their own; calls
keep their results, or leave gradients for later; a redistribution is two halves, or one call with linear layers.  None
of that changes what is computed, and of what: the same calls must stand behind it, with the same notes.

Before:
    start = in_flight.start_redistribution(linear, 'S1', 'I', 'mesh0/tp');  tanh = aten.tanh(x)
    finish = in_flight.finish_redistribution(start, 'S1', 'I', 'mesh0/tp')
    recompute_0 = self.recompute_0(finish, w);  getitem = recompute_0[0]
After:
    tanh = aten.tanh(x)
    finish = collectives.redistribute(linear, 'S1', 'I', 'mesh0/tp')
    linear_1 = aten.linear(finish, w)
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import fx

from autoparallel.comm.collectives import redistribute
from autoparallel.comm.in_flight import finish_redistribution, start_redistribution
from autoparallel.graph.captured import copy_graph
from autoparallel.operators.chunked import linear_then_redistribute, redistribute_then_linear
from autoparallel.operators.selective_checkpoint import Keeping
from autoparallel.passes.chunk_linears import LINEAR
from autoparallel.passes.emitter import replace_results
from autoparallel.passes.recompute_layers import regions_of
from autoparallel.passes.specification import PlacementError, name_of
from autoparallel.passes.split_weight_gradients import Deferring


def restore_program(module: fx.GraphModule) -> fx.Graph:
    """The graph of a program with nothing but calls that its specification speaks of; ``module`` is left as it is.

    Raises:
        PlacementError: where halves do not belong together, or a region's graph is noted to be given, or to return,
            what it is not.
    """
    regions = regions_of(module)
    if not regions and not any(_is_rewritten(node) for node in module.graph.nodes):
        return module.graph
    graph = copy_graph(module.graph)
    for node in graph.find_nodes(op="call_module"):
        if node.target in regions:
            _inline(node, regions[str(node.target)].program.graph)
    for node in list(graph.nodes):
        if isinstance(node.target, Keeping | Deferring):
            node.target = node.target.target
        if node.target in _PARTS:
            _PARTS[node.target](node)
    return graph


def _is_rewritten(node: fx.Node) -> bool:
    return node.target in _PARTS or isinstance(node.target, Keeping | Deferring)


def _inline(call: fx.Node, region: fx.Graph) -> None:
    """Puts the calls of a region where it is called."""
    placeholders = list(region.find_nodes(op="placeholder"))
    arguments = dict(zip(placeholders, call.args, strict=True))
    for inside, outside in arguments.items():
        _require_same_notes(inside, outside)
    with call.graph.inserting_before(call):
        results: Any = call.graph.graph_copy(region, arguments)
    for item in call.users:
        _require_same_notes(item, results[item.args[1]])
    replace_results(call, results.__getitem__)


def _require_same_notes(node: fx.Node, other: Any) -> None:
    """What stands for one tensor on both sides of a region's boundary must be noted to lie alike."""
    for note in ("placements", "differentiable"):
        if node.meta.get(note) != other.meta.get(note):
            raise PlacementError(
                f"{name_of(node)} is noted with the {note} {node.meta.get(note)}, and is {name_of(other)} with "
                f"{other.meta.get(note)}"
            )


def _join_halves(start: fx.Node) -> None:
    finish, *others = start.users or [None]
    if others or finish is None or finish.target is not finish_redistribution or finish.args[1:] != start.args[1:]:
        raise PlacementError(
            f"{name_of(start)} must be finished once, as it is begun, and read by nothing else; it is read by "
            f"{', '.join(map(name_of, start.users)) or 'nothing'}"
        )
    finish.target, finish.args = redistribute, start.args
    start.graph.erase_node(start)


def _part_from_redistribution(node: fx.Node) -> None:
    """A linear layer and the redistribution of its result."""
    x, *way, _, weight, bias = node.args
    with node.graph.inserting_before(node):
        linear = node.graph.call_function(LINEAR, _linear_arguments(x, weight, bias))
    linear.meta = node.meta["linear"]
    node.target, node.args = redistribute, (linear, *way)


def _part_from_linears(node: fx.Node) -> None:
    """A redistribution and the linear layers that read its result."""
    *way, _, weights, biases = node.args
    node.target, node.args = redistribute, tuple(way)
    for item in list(node.users):
        if item.target is operator.getitem:
            number: Any = item.args[1]
            item.target, item.args = LINEAR, _linear_arguments(node, weights[number], biases[number])  # type: ignore[index]


def _linear_arguments(x: Any, weight: Any, bias: Any) -> tuple[Any, ...]:
    return (x, weight) if bias is None else (x, weight, bias)


_PARTS: dict[Any, Callable[[fx.Node], None]] = {
    start_redistribution: _join_halves,
    linear_then_redistribute: _part_from_redistribution,
    redistribute_then_linear: _part_from_linears,
}
"""What undoes a call, by its target."""
