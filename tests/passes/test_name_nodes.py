"""`name_nodes`: keys by module, operator and occurrence; a key once given stays."""

from __future__ import annotations

import torch
from torch import fx

from autoparallel.passes.name_nodes import name_nodes

aten = torch.ops.aten


def _call(graph: fx.Graph, x: fx.Node, module: str) -> fx.Node:
    node = graph.call_function(aten.relu.default, (x,))
    node.meta["nn_module_stack"] = {"": (f"model.{module}", torch.nn.ReLU)}
    return node


def test_before_and_after() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    calls = [_call(graph, x, module) for module in ("up", "up", "layers.0.down")]
    name_nodes(graph)
    assert x.meta["key"] == "/x#0"
    assert [c.meta["key"] for c in calls] == ["up/aten.relu#0", "up/aten.relu#1", "layers.0.down/aten.relu#0"]
    assert [c.meta["module"] for c in calls] == ["up", "up", "layers.0.down"]


def test_a_new_node_takes_no_name_that_is_given() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    old = [_call(graph, x, "up"), _call(graph, x, "up")]
    name_nodes(graph)
    graph.erase_node(old[0])
    with graph.inserting_before(old[1]):
        new = [_call(graph, x, "up"), _call(graph, x, "up")]
    name_nodes(graph)
    assert [n.meta["key"] for n in (*new, old[1])] == ["up/aten.relu#0", "up/aten.relu#2", "up/aten.relu#1"]
