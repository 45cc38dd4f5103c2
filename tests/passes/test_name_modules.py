"""Names of modules in a profile: the example of the pass, and what nests how."""

from __future__ import annotations

import torch
from torch import fx, nn

from autoparallel.passes.name_modules import name_modules


def test_ranges_nest_as_modules_do() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    for path in ("layers.0.up", "layers.0.down", "layers.0", "layers.1.up", ""):
        x = graph.call_function(torch.tanh, (x,))
        x.meta["module"] = path
    graph.output((x,))
    named = name_modules(fx.GraphModule(nn.Module(), graph))
    text = [
        "end" if node.name.startswith("end") else str(node.args[0] if "begin" in node.name else node.name)
        for node in named.graph.nodes
        if node.op == "call_function"
    ]
    assert text == [
        "layers.0", "layers.0.up", "tanh", "end", "layers.0.down", "tanh_1", "end", "tanh_2", "end",
        "layers.1", "layers.1.up", "tanh_3", "end", "end", "tanh_4",
    ]  # fmt: skip
    assert "begin" not in str(graph)
    y = torch.ones(2)
    torch.testing.assert_close(named(y)[0], y.tanh().tanh().tanh().tanh().tanh())
