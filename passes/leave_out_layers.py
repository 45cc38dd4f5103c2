"""Leaves out layers that are copies of the one before them, for a shorter model that tells about the whole one.

Before (nodes of the layers "layers.0" to "layers.3"; "layers.1" to "layers.3" are alike, each reads the one before):
    linear = aten.linear(x, w0);  linear_1 = aten.linear(linear, w1)
    linear_2 = aten.linear(linear_1, w2);  linear_3 = aten.linear(linear_2, w3);  sum_1 = aten.sum(linear_3)
After leaving out "layers.2" and "layers.3":
    linear = aten.linear(x, w0);  linear_1 = aten.linear(linear, w1)
    sum_1 = aten.sum(linear_1)
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from autoparallel._torch.export import copy_node
from autoparallel.graph.layers import Run


def leave_out_layers(graph: fx.Graph, runs: Sequence[Run], counts: Sequence[int]) -> fx.Graph:
    """A copy of a graph with so many layers of each run, the first ones, and without what only the others read."""
    nodes = {node.name: node for node in graph.nodes}
    left_out: set[fx.Node] = set()
    instead: dict[fx.Node, fx.Node] = {}  # of a run's last layer, which the rest of the graph reads
    for run, count in zip(runs, counts, strict=True):
        left_out.update(nodes[name] for layer in range(count, len(run.members)) for name in run.nodes(layer))
        instead.update({nodes[name]: nodes[its] for name, its in zip(run.calls[-1], run.calls[count - 1], strict=True)})
    short = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node not in left_out:
            copies[node] = copy_node(short, node, lambda x: copies[instead.get(x, x) if x in left_out else x])
    return short
