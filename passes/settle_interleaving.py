"""Leaves as many blocks of interleaved pieces as a plan needs (see ``interleave_projections``).

Before (the plan shards no piece along the product's output dim, whatever it does with the product):
    interleave = operators.interleave(w, 0, [0, 8, 12], 4)
    linear = aten.linear(x, interleave)
    piece = operators.piece(linear, 1, 0, 8, 4)
After:
    linear = aten.linear(x, w)
    piece = operators.piece(linear, 1, 0, 8, 1)
After, where the plan shards its pieces over two ranks:
    interleave = operators.interleave(w, 0, [0, 8, 12], 2)
    linear = aten.linear(x, interleave)
    piece = operators.piece(linear, 1, 0, 8, 2)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import fx

from autoparallel import operators
from autoparallel.placements import Layout, count_pieces
from autoparallel.placements.modes import Mode
from autoparallel.rules.ways import typed_call


def settle_interleaving(module: fx.GraphModule, modes: Mapping[str, Sequence[Mode]], axis_sizes: Sequence[int]) -> None:
    """Rewrites the graph of ``module`` in place.

    Args:
        modes: node key to how the operator runs on each mesh axis.
        axis_sizes: of the mesh.
    """
    leave_blocks(module.graph, count_blocks(module.graph, modes, axis_sizes))


def count_blocks(graph: fx.Graph, modes: Mapping[str, Sequence[Mode]], axis_sizes: Sequence[int]) -> dict[str, int]:
    """How many blocks a plan needs, by the keys of the products and of their pieces; the arguments are the pass's."""
    blocks: dict[str, int] = {}
    for node in graph.nodes:
        if _interleaves(node):
            pieces = _pieces(node)
            count = math.lcm(*(_shards(x, modes, axis_sizes) for x in pieces))
            blocks |= {x.meta["key"]: count for x in (node, *pieces)}
    return blocks


def leave_blocks(graph: fx.Graph, blocks: Mapping[str, int]) -> None:
    """Leaves as many blocks, in place; ``graph`` may be a stage's, which has a product without all of its pieces."""
    for node in list(graph.nodes):
        if _interleaves(node):
            count = blocks[node.meta["key"]]
            for x in node.all_input_nodes:
                if x.target is operators.interleave and count == 1:
                    node.replace_input_with(x, x.all_input_nodes[0])
                    graph.erase_node(x)
                elif x.target is operators.interleave:
                    x.args = (*x.args[:-1], count)
            del node.meta["interleaved"]
        elif node.target is operators.piece and node.meta["key"] in blocks:
            node.args = (*node.args[:-1], blocks[node.meta["key"]])


def _interleaves(node: fx.Node) -> bool:
    """Whether a call is a product whose blocks are still to be counted."""
    return "interleaved" in node.meta and any(x.target is operators.interleave for x in node.all_input_nodes)


def _pieces(product: fx.Node) -> list[fx.Node]:
    """What takes the pieces of a product's result."""
    pieces: list[fx.Node] = []
    carriers = [product]
    for node in carriers:
        for user in node.users:
            (pieces if user.target is operators.piece else carriers).append(user)
    return pieces


def _shards(piece: fx.Node, modes: Mapping[str, Sequence[Mode]], axis_sizes: Sequence[int]) -> int:
    """Into how many shards a piece is cut along its dim."""
    layout: Layout = typed_call(piece, modes[piece.meta["key"]])[1]
    return count_pieces(layout, piece.args[1], axis_sizes)  # type: ignore[arg-type]
