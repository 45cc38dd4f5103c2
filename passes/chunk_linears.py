"""Makes one call of linear layers and the redistribution of what they read, or make, maybe in chunks of rows.

What one chunk exchanges runs while the others are computed, forward and backward, and what the backward of a layer
exchanges while the gradients of its parameters are (see ``operators.chunked``): so layers are put together with what
they read also where it stays in one chunk.  Layers that read the same stay together, so that their gradients are summed
before one collective.  What stays as it is: a tensor that others read than linear layers; layers of which all but the
products runs again, whose results would not be kept; losses that go through their rows in chunks.  In one chunk stays a
tensor of too few rows before the first dim that is redistributed.

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

from autoparallel.comm.collectives import dims_of_rows, redistribute
from autoparallel.graph.layers import layer_of
from autoparallel.graph.sizes import Sizes
from autoparallel.operators.chunked import linear_then_redistribute, redistribute_then_linear
from autoparallel.passes.emitter import replace_node
from autoparallel.passes.insert_collectives import actions_of
from autoparallel.passes.raise_row_views import find_heads
from autoparallel.placements import COLLECTIVES, largest_piece

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
        chunks: into how many rows are cut; one leaves them together.
        axis_sizes: the mesh's.
        sizes: those of the call that is planned for.
        kept_layers: the module paths of layers that keep what their products make.
        losses: the keys of the losses that go through their rows in chunks.
    """
    heads = [head.product for head in find_heads(module.graph) if head.loss.meta["key"] in losses]
    before = list(module.graph.nodes)
    place = {node: i for i, node in enumerate(before)}

    def is_free(node: Any) -> bool:
        """Whether a node is a linear layer that may be part of another call."""
        linear = isinstance(node, fx.Node) and node.target is LINEAR and node not in heads and not node.kwargs
        return linear and layer_of(node) not in kept_layers and node.meta["val"].is_floating_point()

    for node in before:
        if node.target is not redistribute:
            continue
        x, src, dst, _ = node.args
        forward, backward = actions_of(node)
        dims = dims_of_rows(x.meta["val"].ndim, src, dst)
        rows = math.prod(largest_piece(sizes.shape(x), x.meta["placements"], axis_sizes)[:dims])
        # Chunks stay apart; what all ranks exchange with all has its rows elsewhere afterwards.
        cut = chunks > 1 and rows >= chunks and "all_to_all" not in (forward, backward)
        cut = cut and not {forward, backward}.isdisjoint(COLLECTIVES)
        readers = sorted(node.users, key=lambda user: place.get(user, -1))
        makes = is_free(x) and len(x.users) == 1 and forward in COLLECTIVES
        reads = all(is_free(user) and user.args.index(node) == 0 == user.args[1:].count(node) for user in readers)
        reads = reads and _stand_together(readers, place)
        if cut and makes and (src == "P" or not reads):
            _merge_into_end(node, chunks)
        elif reads and (cut or backward in COLLECTIVES and any(map(_is_trained, readers))):
            _merge_into_begin(node, readers, before[place[readers[0]] : place[readers[-1]]], chunks if cut else 1)


def _is_trained(linear: fx.Node) -> bool:
    """Whether a linear layer has a parameter that gets a gradient."""
    return any(x.meta["differentiable"] for x in linear.args[1:] if isinstance(x, fx.Node))


def _stand_together(linears: Sequence[fx.Node], place: Mapping[fx.Node, int]) -> bool:
    """Whether linear layers, in their order, can be one call where the first of them stands."""
    read = [each for linear in linears for each in linear.args[1:] if isinstance(each, fx.Node)]
    ready = all(place.get(each, len(place)) < place[linears[0]] or "bucket" in each.meta for each in read)
    return ready and len({layer_of(linear) for linear in linears}) == 1


def _merge_into_end(node: fx.Node, chunks: int) -> None:
    """A redistribution and the linear layer that makes its operand for it alone."""
    linear, *way = node.args
    assert isinstance(linear, fx.Node)
    x, weight, *bias = linear.args
    node.target, node.args = linear_then_redistribute, (x, *way, chunks, weight, *(bias or [None]))
    node.meta["linear"] = linear.meta
    linear.graph.erase_node(linear)


def _merge_into_begin(node: fx.Node, linears: Sequence[fx.Node], between: Sequence[fx.Node], chunks: int) -> None:
    """A redistribution and the linear layers that read it, in their order.

    Args:
        between: the nodes from the first of the layers up to the last.
    """
    first, graph = linears[0], node.graph
    for each in between:
        if "bucket" in each.meta:  # all of them, as buckets are gathered in their order
            first.prepend(each)
    first.prepend(node)
    parameters = [(weight, *(bias or [None])) for _, weight, *bias in (linear.args for linear in linears)]
    weights, biases = zip(*parameters, strict=True)
    node.target, node.args = redistribute_then_linear, (*node.args, chunks, list(weights), list(biases))
    node.meta = {**node.meta, "module": first.meta["module"], "layer": layer_of(first)}
    del node.meta["val"]  # it is several tensors
    point = node
    for i, linear in enumerate(linears):
        with graph.inserting_after(point):
            point = graph.call_function(operator.getitem, (node, i))
        point.meta = linear.meta
        replace_node(linear, point)
