"""`leave_out_layers`: a shorter model, of layers that are copies of each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx

from autoparallel.graph.layers import Run, find_runs
from autoparallel.passes.leave_out_layers import leave_out_layers
from autoparallel.passes.mark_layers import mark_layers
from autoparallel.passes.name_nodes import name_nodes

aten = torch.ops.aten


def _graph(finish: Callable[[fx.Graph, list[fx.Node]], fx.Node], layers: int = 4) -> fx.Graph:
    """Layers of a product and tanh; ``finish`` makes the result from what they make."""
    graph = fx.Graph()
    x, *weights = (graph.placeholder(name) for name in ("x", *(f"w{i}" for i in range(layers))))
    made = []
    for i, w in enumerate(weights):
        for target, args in ((aten.mm.default, (x, w)), (aten.tanh.default, None)):
            x = graph.call_function(target, args or (x,))
            x.meta["nn_module_stack"] = {"": (f"model.layers.{i}", torch.nn.Module)}
        made.append(x)
    graph.output((finish(graph, made),))
    name_nodes(graph)
    mark_layers(graph, {})
    for node in graph.nodes:
        node.meta["val"] = torch.empty(4, 4, device="meta")
    return graph


def _last(graph: fx.Graph, made: list[fx.Node]) -> fx.Node:
    return graph.call_function(aten.sum.default, (made[-1],))


def _lines(graph: fx.Graph) -> list[str]:
    code = fx.GraphModule(torch.nn.Module(), graph).code
    return [line.strip().partition(";")[0] for line in code.splitlines() if " = " in line or "return" in line]


def _members(runs: Sequence[Run]) -> list[list[str]]:
    return [list(run.members) for run in runs]


def test_before_and_after() -> None:
    graph = _graph(_last)
    runs = find_runs(graph)
    assert _members(runs) == [["layers.1", "layers.2", "layers.3"]]  # the first reads something else
    assert runs[0].placeholders == (("w1",), ("w2",), ("w3",))
    assert runs[0].calls[1] == ("mm_default_2", "tanh_default_2")
    before = _lines(graph)
    short = leave_out_layers(graph, runs, [1])
    assert _lines(short) == [
        "mm_default = torch.ops.aten.mm.default(x, w0)",
        "tanh_default = torch.ops.aten.tanh.default(mm_default)",
        "mm_default_1 = torch.ops.aten.mm.default(tanh_default, w1)",
        "tanh_default_1 = torch.ops.aten.tanh.default(mm_default_1)",
        "sum_default = torch.ops.aten.sum.default(tanh_default_1)",
        "return (sum_default,)",
    ]
    assert [node.name for node in short.nodes if node.op == "placeholder"] == ["x", "w0", "w1"]
    assert _lines(graph) == before
    assert _lines(leave_out_layers(graph, runs, [3])) == before


def test_layers_about_which_something_else_is_decided_are_not_alike() -> None:
    graph = _graph(_last, layers=6)
    other = {"layers.3/aten.mm#0", "layers.4/aten.mm#0"}
    keys = {node.name: node.meta["key"] for node in graph.nodes}
    (run,) = find_runs(graph)
    assert _members(run.parts(lambda name: keys[name] in other)) == [["layers.1", "layers.2"], ["layers.3", "layers.4"]]
    assert _members(run.parts(lambda name: name == "w4")) == [["layers.1", "layers.2", "layers.3"]]


def test_layers_that_others_read_are_not_left_out() -> None:
    def skip(graph: fx.Graph, made: list[fx.Node]) -> fx.Node:
        return graph.call_function(aten.add.Tensor, (made[1], made[-1]))

    assert _members(find_runs(_graph(skip, layers=5))) == [["layers.2", "layers.3", "layers.4"]]
