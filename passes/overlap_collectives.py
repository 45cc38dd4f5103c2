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

import math
import operator
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import fx

from autoparallel import _torch
from autoparallel.comm.collectives import redistribute
from autoparallel.comm.in_flight import finish_redistribution, start_redistribution
from autoparallel.graph.layers import layer_of
from autoparallel.operators.late import late_linear, late_parameters
from autoparallel.passes.insert_collectives import Redistribution
from autoparallel.passes.recompute_layers import Region
from autoparallel.placements import COLLECTIVES, action
from autoparallel.rules.calls import is_tensor

aten = torch.ops.aten

_NOTED = ("differentiable", "backward", "module")


def overlap_collectives(module: fx.GraphModule, *, regions: Mapping[str, Region], axis_sizes: Sequence[int]) -> None:
    """Rewrites ``module`` in place.

    Args:
        regions: the layers that run again, each of which starts and finishes what it redistributes itself.
        axis_sizes: the mesh's.
    """
    _overlap_all(module.graph, axis_sizes)
    for region in regions.values():
        if _overlap_all(region.program.graph, axis_sizes):
            region.program.recompile()
            region.function = region.program.forward


def _overlap_all(graph: fx.Graph, axis_sizes: Sequence[int]) -> bool:
    """Whether any redistribution of a graph has become two halves."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    halved = False
    for node in list(place):
        if node.target is redistribute:
            halved = _overlap(graph, node, place, axis_sizes) or halved
    return halved


def _overlap(graph: fx.Graph, node: fx.Node, place: dict[fx.Node, int], axis_sizes: Sequence[int]) -> bool:
    """Makes two halves of a redistribution, where that lets anything run beside a collective."""
    done: Redistribution = node.meta["redistribution"]
    step, returned = done.step, done.step.transposed()
    returns = node.meta["differentiable"] and node.meta["backward"]
    returns = returns and action(returned.src, returned.dst) in COLLECTIVES
    if not node.users or not returns and action(step.src, step.dst) not in COLLECTIVES:
        return False
    first = min(node.users, key=place.__getitem__)
    point = _earliest(node, first)
    whole = step.dst.kind != "S"  # what is cut has another length, which late_parameters does not tell
    layers = [user for user in node.users if returns and whole and _is_late(user, node, place, place[first])]
    if not layers and not any(map(_computes, _between(point, first))):
        return False
    with graph.inserting_before(point):
        start = graph.call_function(start_redistribution, node.args)
    start.meta = {**node.meta, "placements": done.before, "key": f"{node.meta['key']}/start"}
    del start.meta["val"]  # it is no tensor
    node.target, node.args = finish_redistribution, (start, *node.args[1:])
    first.prepend(node)
    gathered = step.src.kind == "S"
    growth = (step.src.dim, math.prod(axis_sizes[axis] for axis in step.axes)) if gathered else (0, 1)
    for layer in layers:
        _, weight, *bias = layer.args
        with graph.inserting_before(node):
            late = graph.call_function(late_parameters, (start, weight, *(bias or [None]), *growth))
        place[late] = place[first]
        late.meta = {name: layer.meta[name] for name in _NOTED}
        layer.target, layer.args = late_linear, (node, weight, *(bias or [None]), late)
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
    return node.target is not operator.getitem and not _torch.gives_view(node.target)
