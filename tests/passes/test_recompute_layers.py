"""`recompute_layers`: a layer keeps what enters it, and runs again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from autoparallel.comm.collectives import redistribute
from autoparallel.passes.insert_collectives import Redistribution
from autoparallel.passes.mark_layers import mark_layers
from autoparallel.passes.name_nodes import name_nodes
from autoparallel.passes.recompute_layers import find_layers, kept_calls, recompute_layers, regions_of
from autoparallel.placements import Invariant, Partial, Replicate, Shard
from autoparallel.placements.redistribution import Step

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
    mark_layers(graph, {})
    for node in graph.nodes:
        node.meta.update(backward=True, val=torch.empty(4, 4), differentiable=True)
    return fx.GraphModule(torch.nn.Module(), graph)


def _lines(graph: fx.GraphModule) -> list[str]:
    return [line.strip() for line in graph.code.splitlines() if " = " in line or "return" in line]


def test_before_and_after() -> None:
    module = _module()
    recompute_layers(module, {"layers.0": False})
    regions = regions_of(module)
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


def test_what_stands_among_the_calls_of_another_layer_stays_there() -> None:
    module = _module()
    early = module.graph.find_nodes(op="call_function", target=aten.tanh.default)[0]
    early.meta["nn_module_stack"] = {"": ("model.layers.1", torch.nn.Module)}
    with module.graph.inserting_before(module.graph.output_node()):
        module.graph.output_node().args = ((*module.graph.output_node().args[0], early),)  # type: ignore[misc]
    recompute_layers(module, {"layers.0": False, "layers.1": False})
    first, second = module.graph.find_nodes(op="call_module")
    assert first not in second.args and second.args[0].args[0] is first, "it is given a tensor, not all that returns"


def test_all_but_the_products_before_and_after() -> None:
    module = _module()
    recompute_layers(module, {"layers.0": True})
    regions = regions_of(module)
    assert [line.partition(";")[0] for line in _lines(regions["recompute_0"].program)] == [
        "mm_default = autoparallel_operators_selective_checkpoint_keeping_mm_default(x, w0)",
        "tanh_default = torch.ops.aten.tanh.default(mm_default)",
        "mul_tensor = torch.ops.aten.mul.Tensor(tanh_default, tanh_default)",
        "return (mul_tensor,)",
    ]


def test_what_nothing_that_runs_again_reads_is_not_kept() -> None:
    """Of a layer "x + down(tanh(up(x)))" the last product is not, whose result is only added."""
    graph = fx.Graph()
    x, up, down = (graph.placeholder(name) for name in ("x", "up", "down"))
    first = graph.call_function(aten.mm.default, (x, up))
    tanh = graph.call_function(aten.tanh.default, (first,))
    last = graph.call_function(aten.mm.default, (tanh, down))
    graph.output((graph.call_function(aten.add.Tensor, (x, last)),))
    for node in graph.nodes:
        node.meta.update(backward=True, val=torch.empty(4, 4), differentiable=True)
    calls = [node for node in graph.nodes if node.op == "call_function"]
    assert kept_calls(calls) == {first: True, last: False}


def test_what_is_gathered_is_not_kept() -> None:
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    whole = graph.call_function(redistribute, (x, "S0", "R", "mesh/tp"))
    product = graph.call_function(aten.mm.default, (whole, w))
    summed = graph.call_function(redistribute, (product, "P", "I", "mesh/tp"))
    graph.output((graph.call_function(aten.tanh.default, (summed,)),))
    for node in graph.nodes:
        node.meta.update(backward=True, val=torch.empty(4, 4), differentiable=True)
    whole.meta["redistribution"] = Redistribution(Step((0,), Shard(0), Replicate), (Shard(0),))
    summed.meta["redistribution"] = Redistribution(Step((0,), Partial, Invariant), (Partial,))
    assert kept_calls([node for node in graph.nodes if node.op == "call_function"]) == {product: False, summed: True}


class _Calls(TorchDispatchMode):
    """Notes the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("much", [False, True], ids=["full", "selective"])
@pytest.mark.parametrize("layers", [["layers.0"], ["layers.1"], ["layers.0", "layers.1"]], ids=",".join)
def test_it_computes_the_same_and_keeps_less(layers: list[str], much: bool) -> None:
    plain, module = _module(), _module()
    recompute_layers(module, dict.fromkeys(layers, much))
    regions = regions_of(module)
    module.recompile()
    for region in regions.values():
        region.program.recompile()
    found = []
    for program in (plain, module):
        torch.manual_seed(0)
        inputs = [torch.rand(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
        saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, saved=saved: saved.append(x) or x, lambda x: x):
            (result,) = program(*inputs)
        counts = []
        for _ in range(2):  # a graph that is kept is gone through again
            with _Calls() as calls:
                grads = torch.autograd.grad(result.sum(), inputs, retain_graph=True)
            counts.append((calls.names.count("aten::mm"), calls.names.count("aten::tanh")))
        assert counts[0] == counts[1]
        found.append((result, *grads, len(saved), *counts[0]))
    *expected, before, products, _ = found[0]
    *ours, after, more_products, tanhs = found[1]
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert after < before
    assert (more_products - products, tanhs) == (0 if much else len(layers), len(layers))


def test_layers_are_items_whose_calls_stand_together_and_that_save_something() -> None:
    module = _module()
    assert find_layers(module.graph) == ["layers.0", "layers.1"]
    nodes = {node.name: node for node in module.graph.nodes}
    nodes["mul_tensor"].meta["layer"] = "layers.1"  # now one between the others
    nodes["tanh_default"].meta["layer"] = "layers.0"
    nodes["mm_default_1"].meta["layer"] = "layers.0"
    assert find_layers(module.graph) == []
    with pytest.raises(ValueError, match=r"no layer 'layers\.7'"):
        recompute_layers(module, {"layers.7": False})
