"""`recompute_layers`: a layer keeps what enters it, and runs again."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from autoparallel.passes.name_nodes import name_nodes
from autoparallel.passes.recompute_layers import find_layers, recompute_layers

aten = torch.ops.aten


def _module() -> fx.GraphModule:
    """Two layers; the second reads the first one's scale, too."""
    graph = fx.Graph()
    x, w0, w1 = (graph.placeholder(name) for name in ("x", "w0", "w1"))

    def call(layer: int, target: object, *args: object) -> fx.Node:
        node = graph.call_function(target, args)  # type: ignore[arg-type]
        node.meta["nn_module_stack"] = {"": (f"model.layers.{layer}", torch.nn.Module)}
        return node

    y = call(0, aten.tanh.default, call(0, aten.mm.default, x, w0))
    y = call(0, aten.mul.Tensor, y, y)
    z = call(1, aten.tanh.default, call(1, aten.mm.default, y, w1))
    graph.output((call(1, aten.mul.Tensor, z, y),))
    name_nodes(graph)
    for node in graph.nodes:
        node.meta["backward"] = True
    return fx.GraphModule(torch.nn.Module(), graph)


def _lines(graph: fx.GraphModule) -> list[str]:
    return [line.strip() for line in graph.code.splitlines() if " = " in line or "return" in line]


def test_before_and_after() -> None:
    module = _module()
    regions = recompute_layers(module, ["layers.0"]).regions
    module.recompile()  # as the runner of passes does
    assert [line.partition(";")[0] for line in _lines(module)] == [
        "recompute_0 = self.recompute_0(x, w0)",
        "getitem = recompute_0[0]",
        "mm_default_1 = torch.ops.aten.mm.default(getitem, w1)",
        "tanh_default_1 = torch.ops.aten.tanh.default(mm_default_1)",
        "mul_tensor_1 = torch.ops.aten.mul.Tensor(tanh_default_1, getitem)",
        "return (mul_tensor_1,)",
    ]
    assert [line.partition(";")[0] for line in _lines(regions["recompute_0"].program)] == [
        "mm_default = torch.ops.aten.mm.default(x, w0)",
        "tanh_default = torch.ops.aten.tanh.default(mm_default)",
        "mul_tensor = torch.ops.aten.mul.Tensor(tanh_default, tanh_default)",
        "return (mul_tensor,)",
    ]


@pytest.mark.parametrize("layers", [["layers.0"], ["layers.1"], ["layers.0", "layers.1"]], ids=",".join)
def test_it_computes_the_same_and_keeps_less(layers: list[str]) -> None:
    plain, module = _module(), _module()
    recompute_layers(module, layers)
    module.recompile()
    found = []
    for program in (plain, module):
        torch.manual_seed(0)
        inputs = [torch.rand(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
        saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, saved=saved: saved.append(x) or x, lambda x: x):
            (result,) = program(*inputs)
        found.append((result, *torch.autograd.grad(result.sum(), inputs), len(saved)))
    *expected, before = found[0]
    *ours, after = found[1]
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert after < before


def test_layers_are_items_whose_calls_stand_together_and_that_save_something() -> None:
    module = _module()
    assert find_layers(module.graph) == ["layers.0", "layers.1"]
    nodes = {node.name: node for node in module.graph.nodes}
    nodes["mul_tensor"].meta["module"] = "layers.1"  # now one between the others
    nodes["tanh_default"].meta["module"] = "layers.0"
    nodes["mm_default_1"].meta["module"] = "layers.0"
    assert find_layers(module.graph) == []
    with pytest.raises(ValueError, match=r"no layer 'layers\.7'"):
        recompute_layers(module, ["layers.7"])
