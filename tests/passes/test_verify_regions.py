"""`verify_placements` in graphs that a program calls: layers that run again, and losses in chunks of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from autoparallel.comm.collectives import redistribute
from autoparallel.operators.selective_checkpoint import Keeping
from autoparallel.passes.chunk_loss import chunk_loss, chunkable
from autoparallel.passes.recompute_layers import recompute_layers, regions_of
from autoparallel.passes.specification import PlacementError, Specification
from autoparallel.passes.verify_placements import verify_placements
from tests.passes.support import captured, placed


class Layer(nn.Module):
    """A pair of products, with a size of what enters."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x))).reshape(x.shape[0], 4)


class Model(nn.Module):
    """Two layers, and a loss of a product."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(4, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x), y)


def program(recompute: Mapping[str, bool]) -> tuple[fx.GraphModule, Specification, dict[str, fx.GraphModule]]:
    """The program over two axes: the batch is cut over one, and the layers' hidden features over the other."""
    graph = captured(Model(), torch.rand(8, 4), torch.randint(0, 16, (8,)))
    losses = chunkable(graph.graph)
    modes, parameters = {}, {}
    for i in range(2):
        for name, mode, layout in (("up", "shard:n", "S0,I"), ("down", "shard:k", "S1,I")):
            modes[f"layers.{i}.{name}/aten.linear#0"] = [mode, "I"]
            parameters[f"layers.{i}.{name}.weight"] = layout
        modes[f"layers.{i}/aten.gelu#0"] = ["shard:...1", "I"]
    module, specification = placed(graph, modes, parameters, axes=(("tp", 2), ("dp", 2)))
    verify_placements(module, specification)
    recompute_layers(module, recompute)
    chunk_loss(module, losses, 2)
    return module, specification, {name: region.program for name, region in regions_of(module).items()}


BOTH = {"layers.0": False, "layers.1": True}


def test_right_programs_pass() -> None:
    module, specification, regions = program(BOTH)
    assert [*regions] == ["recompute_0", "recompute_1", "chunked_loss_0"]
    assert any(isinstance(n.target, Keeping) for n in regions["recompute_1"].graph.nodes)
    verify_placements(module, specification)


def _drop_a_collective(graph: fx.Graph) -> None:
    for node in graph.nodes:
        target = node.target.target if isinstance(node.target, Keeping) else node.target
        if target is redistribute and node.args[1] == "P":
            node.replace_all_uses_with(node.args[0])
            return
    raise AssertionError("there is none")


def _return_another(graph: fx.Graph) -> None:
    output = graph.output_node()
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    output.args = (tuple(inputs[0] for _ in output.args[0]),)  # type: ignore[union-attr]


def _call_another_operator(graph: fx.Graph) -> None:
    product = next(
        node for node in graph.nodes if "aten.linear" in node.meta.get("key", "") and node.op != "placeholder"
    )
    target = product.target
    product.target = Keeping(torch.mul, True) if isinstance(target, Keeping) else torch.mul


REGIONS = ("recompute_0", "recompute_1", "chunked_loss_0")  # the loss communicates nothing


@pytest.mark.wide_where(lambda change, name: name == "recompute_1")
@pytest.mark.parametrize(
    ("change", "name"),
    [
        *((_drop_a_collective, name) for name in REGIONS[:2]),
        *((change, name) for change in (_return_another, _call_another_operator) for name in REGIONS),
    ],
)
def test_what_is_wrong_in_a_region_is_refused(change: Callable[[fx.Graph], None], name: str) -> None:
    module, specification, regions = program(BOTH)
    change(regions[name].graph)
    with pytest.raises(PlacementError):
        verify_placements(module, specification)


def test_a_region_that_is_given_another_tensor_is_refused() -> None:
    module, specification, _ = program(BOTH)
    call = next(node for node in module.graph.nodes if node.target == "recompute_1")
    call.args = (*call.args[:-1], call.args[0])
    with pytest.raises(PlacementError):
        verify_placements(module, specification)
