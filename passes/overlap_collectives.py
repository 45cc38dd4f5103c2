"""Starts collectives as early as the graph allows, and waits for them where their results are read.

A redistribution becomes two halves (see ``comm.in_flight``), so that what stands between them computes meanwhile; in
the backward, its transpose is started where the second stands and waited for where the first does.  There the gradients
of the parameters of the layers that read it are computed between the halves (see ``operators.late``).  A collective is
started no earlier than in the layer that reads it: it would take memory for longer than it takes time.

Before (mesh axis "tp" of 2 ranks; only w1 is sharded):
    linear = aten.linear(x, w0);  tanh = aten.tanh(x)                          S1, I
    redistribute = collectives.redistribute(linear, 'S1', 'I', 'mesh0/tp')
    add = aten.add(tanh, redistribute)
    redistribute_1 = collectives.redistribute(add, 'I', 'R', 'mesh0/tp')      backward: all-reduce
    linear_1 = aten.linear(redistribute_1, w1)
After:
    linear = aten.linear(x, w0)
    start = in_flight.start_redistribution(linear, 'S1', 'I', 'mesh0/tp')
    tanh = aten.tanh(x)
    finish = in_flight.finish_redistribution(start, 'S1', 'I', 'mesh0/tp')
    add = aten.add(tanh, finish)
    start_1 = in_flight.start_redistribution(add, 'I', 'R', 'mesh0/tp')
    late = late.late_parameters(start_1, w1, None, 0, 1)
    finish_1 = in_flight.finish_redistribution(start_1, 'I', 'R', 'mesh0/tp')  backward: the all-reduce starts
    linear_1 = late.late_linear(finish_1, w1, None, late)
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import fx

from autoparallel.comm.collectives import redistribute
from autoparallel.comm.in_flight import finish_redistribution, start_redistribution
from autoparallel.graph.layers import layer_of
from autoparallel.operators.late import late_linear, late_parameters
from autoparallel.passes.insert_collectives import Redistribution
from autoparallel.passes.raise_row_views import find_heads
from autoparallel.passes.specification import Specification
from autoparallel.placements import COLLECTIVES, action
from autoparallel.rules.calls import is_tensor

aten = torch.ops.aten

_NOTED = ("differentiable", "backward", "module")


def overlap_collectives(module: fx.GraphModule, *, specification: Specification, losses: Collection[str] = ()) -> None:
    """Rewrites ``module`` in place.

    Args:
        specification: of the program.
        losses: the keys of those that go through their rows in chunks, with the product before them.
    """
    graph = module.graph
    heads = [head for head in find_heads(graph) if head.loss.meta["key"] in losses] if losses else []
    kept = {node for head in heads for node in (head.product, *head.between)}
    place = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(place):
        if node.target is redistribute and node not in kept:
            _overlap(graph, node, place, kept, specification.axis_sizes)


def _overlap(
    graph: fx.Graph,
    node: fx.Node,
    place: dict[fx.Node, int],
    kept: Collection[fx.Node],
    axis_sizes: Sequence[int],
) -> None:
    """Makes two halves of a redistribution, where that lets anything run beside a collective."""
    done: Redistribution = node.meta["redistribution"]
    returned = done.step.transposed()
    returns = node.meta["differentiable"] and node.meta["backward"]
    returns = returns and action(returned.src, returned.dst) in COLLECTIVES
    if not returns and action(done.step.src, done.step.dst) not in COLLECTIVES:
        return
    first = min(node.users, key=place.__getitem__)
    point = _earliest(node, first)
    layers = [user for user in node.users if returns and user not in kept and _is_late(user, node, place, place[first])]
    if not layers and not any(map(_computes, _between(point, first))):
        return
    with graph.inserting_before(point):
        start = graph.call_function(start_redistribution, node.args)
    start.meta = {**node.meta, "placements": done.before, "key": f"{node.meta['key']}/start"}
    del start.meta["val"]  # it is no tensor
    node.target, node.args = finish_redistribution, (start, *node.args[1:])
    first.prepend(node)
    for layer in layers:
        _, weight, *bias = layer.args
        with graph.inserting_before(node):
            late = graph.call_function(late_parameters, (start, weight, *(bias or [None]), *done.growth(axis_sizes)))
        place[late] = place[first]
        late.meta = {name: layer.meta[name] for name in _NOTED}
        layer.target, layer.args = late_linear, (node, weight, *(bias or [None]), late)


def _earliest(node: fx.Node, first: fx.Node) -> fx.Node:
    """The node before which a redistribution can start: behind its operand, and in the layer that reads it."""
    layer, point = layer_of(first), first
    while (passed := point.prev) is not node.args[0] and passed.op not in ("placeholder", "root"):
        if is_tensor(passed) and passed is not node and "bucket" not in passed.meta and layer_of(passed) != layer:
            break
        point = passed
    return point


def _between(point: fx.Node, end: fx.Node) -> Iterator[fx.Node]:
    while point is not end:
        yield point
        point = point.next


def _is_late(user: fx.Node, node: fx.Node, place: Mapping[fx.Node, int], end: int) -> bool:
    """Whether a reader is a linear layer whose parameters are there before ``end``, and trained."""
    if user.target is not aten.linear.default or user.args[0] is not node or user.kwargs:
        return False
    parameters = [x for x in user.args[1:] if isinstance(x, fx.Node)]
    trained = any(x.meta["differentiable"] for x in parameters)
    return trained and node not in parameters and all(place[x] < end for x in parameters)


def _computes(node: fx.Node) -> bool:
    """Whether a call makes memory of its own."""
    if node.op != "call_function" or not is_tensor(node) or node.target in (redistribute, finish_redistribution):
        return False
    if node.target is operator.getitem:
        return False
    return not isinstance(node.target, torch._ops.OpOverload) or not (
        node.target.is_view or node.target is aten.reshape.default
    )
