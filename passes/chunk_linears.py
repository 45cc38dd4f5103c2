"""Cuts linear layers that read what is redistributed, or make it, into chunks of rows.

What one chunk exchanges runs while the others are computed, forward and backward (see ``operators.chunked``).  Layers
that read the same stay together, so that their gradients are summed before one collective.  What stays as it is: a
tensor of too few rows before the first dim that is redistributed, or that others read than linear layers; layers of
which all but the products runs again, whose results would not be kept; losses that go through their rows in chunks.

Before (mesh axis "tp" of 2 ranks; the sequence, dim 1, is sharded around the pair that Megatron cuts):
    redistribute = collectives.redistribute(x, 'S1', 'R', 'mesh0/tp')                       all-gather
    linear = aten.linear(redistribute, w1)                                                  S2
    linear_1 = aten.linear(linear, w2)                                                      P
    redistribute_1 = collectives.redistribute(linear_1, 'P', 'S1', 'mesh0/tp')              reduce-scatter
After, in 2 chunks:
    redistribute = chunked.redistribute_then_linear(x, 'S1', 'R', 'mesh0/tp', 2, [w1], [None])
    linear = redistribute[0]
    redistribute_1 = chunked.linear_then_redistribute(linear, 'P', 'S1', 'mesh0/tp', 2, w2, None)
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autoparallel.comm.collectives import redistribute
from autoparallel.graph.captured import copy_graph
from autoparallel.graph.layers import layer_of
from autoparallel.graph.sizes import Sizes
from autoparallel.operators.chunked import dims_of_rows, linear_then_redistribute, redistribute_then_linear
from autoparallel.passes.raise_row_views import find_heads
from autoparallel.placements import COLLECTIVES, action, largest_piece

LINEAR = torch.ops.aten.linear.default


def chunk_linears(
    module: fx.GraphModule,
    *,
    chunks: int,
    axis_sizes: Sequence[int],
    sizes: Sizes,
    kept_layers: Collection[str] = (),
    losses: Collection[str] = (),
) -> None:
    """Rewrites ``module`` in place.

    Args:
        chunks: into how many rows are cut.
        axis_sizes: the mesh's.
        sizes: those of the call that is planned for.
        kept_layers: the module paths of layers that keep what their products make.
        losses: the keys of the losses that go through their rows in chunks.
    """
    heads = [head.product for head in find_heads(module.graph) if head.loss.meta["key"] in losses]
    before = list(module.graph.nodes)
    place = {node: i for i, node in enumerate(before)}

    def is_free(node: Any) -> bool:
        """Whether a node is a linear layer that may be cut."""
        linear = isinstance(node, fx.Node) and node.target is LINEAR and node not in heads and not node.kwargs
        return linear and layer_of(node) not in kept_layers and node.meta["val"].is_floating_point()

    for node in before if chunks > 1 else ():
        if node.target is not redistribute or not _sends(node):
            continue
        x, src, dst, _ = node.args
        dims = dims_of_rows(x.meta["val"].ndim, src, dst)
        if math.prod(largest_piece(sizes.shape(x), x.meta["placements"], axis_sizes)[:dims]) < chunks:
            continue
        readers = sorted(node.users, key=lambda user: place.get(user, -1))
        makes = is_free(x) and len(x.users) == 1 and _forward(node) in COLLECTIVES
        reads = all(is_free(user) and user.args.index(node) == 0 == user.args[1:].count(node) for user in readers)
        reads = reads and _stand_together(readers, place)
        if makes and (src == "P" or not reads):
            _merge_into_end(node, chunks)
        elif reads:
            _merge_into_begin(node, readers, before, chunks)


def _forward(node: fx.Node) -> str:
    step = node.meta["redistribution"].step
    return action(step.src, step.dst)


def _sends(node: fx.Node) -> bool:
    """Whether a redistribution is a collective, forward or backward, of chunks that stay apart."""
    returned = node.meta["redistribution"].step.transposed()
    returns = node.meta["differentiable"] and node.meta["backward"]
    actions = {_forward(node), action(returned.src, returned.dst)} if returns else {_forward(node)}
    return bool(actions & {*COLLECTIVES}) and "all_to_all" not in actions


def _stand_together(linears: Sequence[fx.Node], place: Mapping[fx.Node, int]) -> bool:
    """Whether linear layers, in their order, can be one call where the first of them stands."""
    read = [each for linear in linears for each in linear.args[1:] if isinstance(each, fx.Node)]
    ready = all(place[each] < place[linears[0]] or "bucket" in each.meta for each in read)
    return ready and len({layer_of(linear) for linear in linears}) == 1


def _merge_into_end(node: fx.Node, chunks: int) -> None:
    """A redistribution and the linear layer that makes its operand for it alone."""
    linear, *way = node.args
    assert isinstance(linear, fx.Node)
    x, weight, *bias = linear.args
    node.target, node.args = linear_then_redistribute, (x, *way, chunks, weight, *(bias or [None]))
    node.meta["linear"] = linear.meta
    linear.graph.erase_node(linear)


def _merge_into_begin(node: fx.Node, linears: Sequence[fx.Node], before: Sequence[fx.Node], chunks: int) -> None:
    """A redistribution and the linear layers that read it, in their order.

    Args:
        before: the nodes of the graph as they stood.
    """
    first, graph = linears[0], node.graph
    for each in before[before.index(first) : before.index(linears[-1])]:
        if "bucket" in each.meta:  # all of them, as buckets are gathered in their order
            first.prepend(each)
    first.prepend(node)
    parameters = [(weight, *(bias or [None])) for _, weight, *bias in (linear.args for linear in linears)]
    weights, biases = zip(*parameters, strict=True)
    node.target, node.args = redistribute_then_linear, (*node.args, chunks, list(weights), list(biases))
    node.meta = {**node.meta, "module": first.meta["module"]}
    del node.meta["val"]  # it is several tensors
    point = node
    for i, linear in enumerate(linears):
        with graph.inserting_after(point):
            point = graph.call_function(operator.getitem, (node, i))
        point.meta = linear.meta
        linear.replace_all_uses_with(point)
        graph.erase_node(linear)


def restored(module: fx.GraphModule) -> fx.GraphModule:
    """The program as it would be without chunks: what ``verify_placements`` can check, and what a program with chunks
    must compute; the program itself where it has none."""
    if not any(node.target in (linear_then_redistribute, redistribute_then_linear) for node in module.graph.nodes):
        return module
    graph = copy_graph(module.graph)
    for node in list(graph.nodes):
        if node.target is linear_then_redistribute:
            x, *way, _, weight, bias = node.args
            with graph.inserting_before(node):
                linear = graph.call_function(LINEAR, _linear_arguments(x, weight, bias))
            linear.meta = node.meta["linear"]
            node.target, node.args = redistribute, (linear, *way)
        elif node.target is redistribute_then_linear:
            *spec, _, weights, biases = node.args
            node.target, node.args = redistribute, tuple(spec)
            for item in list(node.users):
                if item.target is operator.getitem:
                    number = item.args[1]
                    item.target, item.args = LINEAR, _linear_arguments(node, weights[number], biases[number])
    return fx.GraphModule(module, graph)


def _linear_arguments(x: Any, weight: Any, bias: Any) -> tuple[Any, ...]:
    return (x, weight) if bias is None else (x, weight, bias)
