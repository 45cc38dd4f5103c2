"""Plans that are known to be right, found by the search; what they send is counted on the program that they make."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoparallel.hardware import CPU, H100, Profile
from autoparallel.placements import Replicate
from autoparallel.planner.draft import Draft, call_of
from autoparallel.planner.request.request import Request
from tests.captures import draft
from tests.models.fused import FusedBlock, FusedConfig

AXES = (("x", 8),)
# Nothing hides behind anything, so that the search's sum of prices is what is asked for.
HARDWARE = dataclasses.replace(H100, name="h100 without overlap", overlap=0.0)

Make = Callable[[], tuple[nn.Module, Tensor, Tensor]]


class Head(nn.Module):
    """Hidden states to a vocabulary."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


class Block(nn.Module):
    """A pre-norm MLP."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def _drafted(
    make: Make, loss_fn: Any, *, plan: str = "auto", limit: float | None = None, hardware: Profile = HARDWARE
) -> Draft:
    with torch.device("meta"):
        model, x, y = make()
    request = Request(AXES, hardware, plan, loss_fn=loss_fn, memory_limit=limit)
    return draft(model, call_of((x, y), with_target=True), request)


@pytest.mark.wide
def test_a_limit_too_small_for_replication_gathers_every_weight_for_each_use() -> None:
    width, layers, rows = 4096, 4, 524288

    def make() -> tuple[nn.Module, Tensor, Tensor]:
        model = nn.Sequential(*[m for _ in range(layers) for m in (nn.Linear(width, width), nn.GELU())])
        return model, torch.empty(rows, width), torch.empty(rows, width)

    assert {p.gather for p in _drafted(make, F.mse_loss).plan.parameters.values()} == {"per_step"}
    tight = _drafted(make, F.mse_loss, limit=1.0001 * _drafted(make, F.mse_loss, plan="fsdp").prediction.total_memory)
    rows_of = {r.path: {p.name: p for p in r.parameters} for r in tight.prediction.modules}
    kept = apart = 0
    for i in range(layers):
        layer = f"{2 * i}"
        assert tight.plan.operators[f"{layer}/aten.linear#0"] == ("shard:...0",)
        weight = tight.plan.parameters[f"{layer}.weight"]
        assert weight.at_rest == "S0"
        kept += weight.gather != "per_use"
        apart += tight.plan.parameters[f"{layer}.bias"].gather == "per_use"  # as it is reduced at another time
        assert rows_of[layer]["weight"].uses == ((Replicate,),)
    assert apart <= 1  # the first, which the backward does not gather again
    assert kept <= 1  # the next one is gathered ahead, so that one may stay without more memory at the worst moment
    sent = tight.prediction
    assert sent.forward.collectives["all_gather", "x"] == layers - kept + apart
    assert sent.backward.collectives["all_gather", "x"] >= layers - 1 - kept  # the last is still there
    assert sent.step().collectives["reduce_scatter", "x"] in (layers, layers + 1 + apart)  # biases by themselves
    assert sent.total_memory <= _drafted(make, F.mse_loss, plan="fsdp").prediction.total_memory * 1.0001


def test_a_large_vocabulary_is_cut_through_the_softmax() -> None:
    def make() -> tuple[nn.Module, Tensor, Tensor]:
        return Head(4096, 131072), torch.empty(64, 4096), torch.empty(64, dtype=torch.long)

    found = _drafted(make, F.cross_entropy)
    assert found.plan.operators["head/aten.linear#0"] == ("shard:n",)
    assert ("shard:c",) in [modes for key, modes in found.plan.operators.items() if "cross_entropy_sum" in key]
    # Some numbers for each row, never the logits.
    assert found.prediction.step().total_bytes < 64 * 131072 * 4 / 100
    assert {kind for kind, _ in found.prediction.step().collectives} == {"all_reduce"}


def test_large_layers_and_few_rows_are_cut_by_columns_and_then_rows_with_one_sum_each_way() -> None:
    def make() -> tuple[nn.Module, Tensor, Tensor]:
        layers = [(nn.Linear(8192, 32768), nn.GELU(), nn.Linear(32768, 8192)) for _ in range(2)]
        return nn.Sequential(*(m for pair in layers for m in pair)), torch.empty(16, 8192), torch.empty(16, 8192)

    found = _drafted(make, F.mse_loss)
    for up, gelu, down in ((0, 1, 2), (3, 4, 5)):
        assert found.plan.operators[f"{up}/aten.linear#0"] == ("shard:n",)
        assert found.plan.operators[f"{gelu}/aten.gelu#0"] == ("shard:...1",)
        assert found.plan.operators[f"{down}/aten.linear#0"] == ("shard:k",)
    activations = 16 * 8192 * 4
    assert found.prediction.forward.volumes == {("all_reduce", "x", 8): (2, 2 * activations)}
    # Nothing asks for the gradient of the model's input.
    assert found.prediction.backward.volumes == {("all_reduce", "x", 8): (1, activations)}
    assert not found.prediction.gradients.collectives and not found.prediction.unshard.collectives
    assert found.plan.gap == 0.0


def test_a_long_sequence_and_narrow_layers_are_cut_along_the_sequence() -> None:
    def make() -> tuple[nn.Module, Tensor, Tensor]:
        shape = (1, 131072, 256)  # one row: the batch cannot be cut
        return nn.Sequential(Block(256, 1024), Block(256, 1024)), torch.empty(shape), torch.empty(shape)

    found = _drafted(make, F.mse_loss)
    for operator in ("norm/aten.layer_norm", "up/aten.linear", "down/aten.linear"):
        assert found.plan.operators[f"0.{operator}#0"] == found.plan.operators[f"1.{operator}#0"] == ("shard:...1",)
    # The loss, and the gradients of the parameters: no activation travels.
    assert found.prediction.forward.total_bytes < 64
    assert not found.prediction.backward.collectives
    assert {kind for kind, _ in found.prediction.gradients.collectives} <= {"all_reduce", "reduce_scatter"}


def test_the_loss_of_a_long_sequence_is_cut_along_the_sequence_too() -> None:
    def make() -> tuple[nn.Module, Tensor, Tensor]:
        shape = (1, 131072)
        model = nn.Sequential(Block(256, 1024), Head(256, 32768))
        return model, torch.empty(*shape, 256), torch.empty(shape, dtype=torch.long)

    found = _drafted(make, lambda logits, y: F.cross_entropy(logits.flatten(0, 1).float(), y.flatten()))
    assert ("shard:n1",) in [modes for key, modes in found.plan.operators.items() if "cross_entropy_sum" in key]
    # The loss and what it is divided by, and the gradients of the parameters: no logits travel, nor what they are of.
    assert found.prediction.forward.total_bytes < 64 and not found.prediction.backward.collectives


@pytest.mark.wide_where(lambda way: way != "groups")
@pytest.mark.parametrize(("way", "plan"), [("conv1d", "tensor_parallel"), ("groups", "auto"), ("unbind", "auto")])
def test_fused_projections_are_cut_by_head_and_nothing_but_their_weights_is_dealt_out(way: str, plan: str) -> None:
    config = FusedConfig(width=2048, heads=32, keys=8, hidden=5632)

    def make() -> tuple[nn.Module, Tensor, Tensor]:
        blocks = FusedBlock(config, way, "chunk"), FusedBlock(config, way, "chunk")
        shape = (3, 1023, 2048)  # neither of the first can be cut
        return nn.Sequential(*blocks, nn.LayerNorm(2048)), torch.empty(shape), torch.empty(shape)

    # CPUs send an all-reduce as fast as the gather and the scatter that could stand for it; nothing is sent in chunks.
    found = _drafted(make, F.mse_loss, plan=plan, hardware=dataclasses.replace(CPU, overlap=0.0))
    modes = found.plan.operators
    assert {modes[key] for key in modes if "piece#" in key} == {("shard:o",)}
    assert {modes[key] for key in modes if "attention/aten.scaled" in key} <= {("shard:b1",), ("shard:h",)}
    projections = [key for key in modes if key.endswith(("qkv/aten.linear#0", "aten.addmm#0", "up/aten.linear#0"))]
    assert len(projections) == 4 and {modes[key] for key in projections} == {("shard:n",)}
    assert {modes[key] for key in modes if key.endswith(("out/aten.linear#0", "down/aten.linear#0"))} == {("shard:k",)}
    forward, backward = found.prediction.forward, found.prediction.backward
    sums = forward.collectives["all_reduce", "x"], backward.collectives["all_reduce", "x"]
    assert sums == (4, 3)  # two halves of two blocks; the model's input has no gradient
    # One all-to-all of each fused weight each way, and no gather of what they make.
    rows = 2048 + 2 * (8 if way == "groups" else 32) * 64
    weights = 2 * (rows + 2 * 5632) * 2048 * 4
    assert forward.volumes["all_to_all", "x", 8] == backward.volumes["all_to_all", "x", 8] == (4, weights)
    assert {kind for kind, _ in (*forward.collectives, *backward.collectives)} == {"all_reduce", "all_to_all"}
