"""Starts collectives as early as the graph allows, and waits for them where their results are read.

A redistribution becomes two halves (see ``comm.in_flight``), so that what stands between them computes meanwhile; in
the backward, its transpose is started where the second stands and waited for where the first does.  A collective is
started no earlier than in the layer that reads it: it would take memory for longer than it takes time.

Before (mesh axis "tp" of 2 ranks):
    linear = aten.linear(x, w0);  tanh = aten.tanh(x)                          S1, I
    redistribute = collectives.redistribute(linear, 'S1', 'I', 'mesh0/tp')
    add = aten.add(tanh, redistribute)
After:
    linear = aten.linear(x, w0)
    start = in_flight.start_redistribution(linear, 'S1', 'I', 'mesh0/tp')
    tanh = aten.tanh(x)
    finish = in_flight.finish_redistribution(start, 'S1', 'I', 'mesh0/tp')
    add = aten.add(tanh, finish)
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

from torch import fx

from autoparallel import _torch
from autoparallel.comm.collectives import redistribute
from autoparallel.comm.in_flight import finish_redistribution, start_redistribution
from autoparallel.graph.layers import layer_of
from autoparallel.operators.chunked import redistribute_then_linear
from autoparallel.passes.chunk_loss import ChunkedLoss
from autoparallel.passes.insert_collectives import Redistribution, actions_of
from autoparallel.passes.recompute_layers import regions_of
from autoparallel.placements import COLLECTIVES
from autoparallel.rules.calls import is_tensor


def overlap_collectives(module: fx.GraphModule) -> None:
    """Rewrites ``module`` in place; layers that run again start and finish what they redistribute themselves."""
    _overlap_all(module.graph)
    for region in regions_of(module).values():
        if not isinstance(region, ChunkedLoss) and _overlap_all(region.program.graph):
            region.program.recompile()


def _overlap_all(graph: fx.Graph) -> bool:
    """Whether any redistribution of a graph has become two halves."""
    halved = [_overlap(graph, node) for node in list(graph.nodes) if node.target is redistribute]
    return any(halved)


def _overlap(graph: fx.Graph, node: fx.Node) -> bool:
    """Makes two halves of a redistribution, where that lets anything run beside a collective."""
    redistribution: Redistribution = node.meta["redistribution"]
    if not node.users or {*actions_of(node)}.isdisjoint(COLLECTIVES):
        return False
    first = min(node.users)
    point = _earliest(node, first)
    if not any(map(_computes, _nodes_between(point, first))):
        return False
    with graph.inserting_before(point):
        start = graph.call_function(start_redistribution, node.args)
    start.meta = {**node.meta, "placements": redistribution.before, "key": f"{node.meta['key']}/start"}
    del start.meta["val"]  # it is no tensor
    node.target, node.args = finish_redistribution, (start, *node.args[1:])
    first.prepend(node)
    return True


def _earliest(node: fx.Node, first: fx.Node) -> fx.Node:
    """The node before which a redistribution can start: behind its operand, and in the layer that reads it."""
    layer, point = layer_of(first), first
    while (passed := point.prev) is not node.args[0] and passed.op not in ("placeholder", "root"):
        elsewhere = is_tensor(passed) and "bucket" not in passed.meta and layer_of(passed) != layer
        if "region" in passed.meta or elsewhere and passed is not node:
            break
        point = passed
    return point


def _nodes_between(point: fx.Node, end: fx.Node) -> Iterator[fx.Node]:
    while point is not end:
        yield point
        point = point.next


def _computes(node: fx.Node) -> bool:
    """Whether a call makes memory of its own."""
    if node.target is redistribute_then_linear:
        return True
    if node.op != "call_function" or not is_tensor(node) or node.target in (redistribute, finish_redistribution):
        return False
    return node.target is not operator.getitem and not _torch.export.gives_view(node.target)
