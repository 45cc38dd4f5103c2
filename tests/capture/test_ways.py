"""Python that asks for a tensor's value: both ways are one program, of which the rest is sharded as ever."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from transformers import TableTransformerConfig
from transformers.models.table_transformer.modeling_table_transformer import TableTransformerEncoderLayer

import autoparallel
from autoparallel.capture import exports
from autoparallel.graph.errors import CaptureError
from autoparallel.operators.control_flow import goes_by_values, inner_graphs
from autoparallel.planner import planner
from tests.captures import captured
from tests.distributed import run_distributed
from tests.runtime.support import gradients_off, mesh_of


class Blocks(nn.Module):
    """Two pairs of linears; what is between them is clamped where it is large, which another linear then scales."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.gain = nn.Linear(8, 8)
        self.up_again, self.down_again = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(self.up(x).relu())
        if h.abs().max() > 1:
            h = self.gain(h.clamp(-1, 1))
        return self.down_again(self.up_again(h).relu())


SMALL, LARGE = 0.01, 100.0


def choices(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if goes_by_values(node.target)]


def operators(graph: fx.Graph) -> list[str]:
    return [str(node.target).removeprefix("aten.") for node in graph.nodes if node.op == "call_function"]


def test_only_what_differs_is_on_the_ways() -> None:
    graph = captured(Blocks(), torch.randn(8, 8)).graph
    (choice,) = choices(graph)
    assert operators(graph)[-3:] == operators(graph)[:3] == ["linear.default", "relu.default", "linear.default"]
    true, false = inner_graphs(choice.target)
    assert operators(true.graph) == ["clamp.default", "linear.default"] and operators(false.graph) == []


def test_what_both_ways_choose_from_is_on_none() -> None:
    class Chooses(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            first, second = self.gain(x), self.gain(x.sin())
            return (first if x.isnan().any() else second).exp()

    graph = captured(Chooses(), torch.randn(8, 8)).graph
    (choice,) = choices(graph)
    assert [operators(module.graph) for module in inner_graphs(choice.target)] == [[], []]
    assert operators(graph).count("linear.default") == 2


def test_a_question_without_consequences_leaves_nothing() -> None:
    class Asks(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 0:
                x.cos()
            return self.gain(x)

    assert not choices(captured(Asks(), torch.randn(8, 8)).graph)


class Encoder(nn.Module):
    """Two layers of DETR's encoder, as transformers writes them, of which each asks whether all of it is finite."""

    def __init__(self) -> None:
        super().__init__()
        config = TableTransformerConfig(
            d_model=8, encoder_attention_heads=2, encoder_ffn_dim=16, attention_dropout=0.0, dropout=0.0
        )
        self.layers = nn.ModuleList(TableTransformerEncoderLayer(config) for _ in range(2))

    def forward(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(h, None, torch.zeros_like(h))[0]
        return h.square().mean()


@pytest.mark.wide
def test_layers_of_transformers_ask() -> None:
    graph = captured(Encoder(), torch.randn(8, 4, 8)).graph
    ways = [[operators(module.graph) for module in inner_graphs(node.target)] for node in choices(graph)]
    assert ways == [[[], ["clamp.default"]]] * 2


# ------------------------------------------------------------------------------------------------------- it trains


def _train(plan: str, make: Callable[[], nn.Module], scales: list[float], shape: tuple[int, ...]) -> dict[str, Any]:
    """How far losses and gradients are from those of one process, which gradients there are, and how often the model
    was captured."""
    torch.manual_seed(0)
    plain = make().double()
    with mock.patch.object(planner, "capture", wraps=planner.capture) as capture:
        model: Any = autoparallel.compile(copy.deepcopy(plain), mesh_of(2), plan=plan)
        apart, reached = 0.0, []
        for step, scale in enumerate(scales):
            x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(step)) * scale
            losses = [m(x).square().mean() for m in (model, plain)]
            for m, loss in zip((model, plain), losses, strict=True):
                m.zero_grad()
                loss.backward()
            apart = max(apart, (losses[0] - losses[1]).abs().item(), gradients_off(model, plain))
            assert [p.grad is None for p in model.parameters()] == [p.grad is None for p in plain.parameters()]
            reached.append([name for name, p in model.named_parameters() if p.grad is not None])
    cut = [name for name, p in model.plan.parameters.items() if any(x.startswith("S") for x in p.at_rest)]
    return {"apart": apart, "reached": reached, "traces": capture.call_count, "cut": cut}


@pytest.mark.wide
@pytest.mark.parametrize("plan", ["fsdp", "tensor_parallel"])
def test_each_call_goes_its_way_without_a_new_trace(plan: str) -> None:
    scales = [LARGE, SMALL, LARGE, SMALL]
    for rank in run_distributed(_train, plan, Blocks, scales, (8, 8), world_size=2):
        assert rank["apart"] < 1e-9 and rank["traces"] == 1
        assert [("gain.weight" in names) for names in rank["reached"]] == [True, False, True, False]
        assert {"up.weight", "down.weight", "up_again.weight", "down_again.weight"} <= {*rank["cut"]}


@pytest.mark.wide
@pytest.mark.slow_where(lambda plan: plan == "fsdp")
@pytest.mark.parametrize("plan", ["fsdp", "tensor_parallel"])
def test_layers_of_transformers_train(plan: str) -> None:
    for rank in run_distributed(_train, plan, Encoder, [1.0, 1.0], (4, 3, 8), world_size=2):
        assert rank["apart"] < 1e-9 and rank["traces"] == 1


# --------------------------------------------------------------------------------------------------- what is refused


def _in_microbatches() -> str:
    model: Any = autoparallel.compile(Blocks(), mesh_of(2), plan="fsdp", loss_fn=F.mse_loss, microbatches=2)
    with pytest.raises(ValueError, match="of the whole batch, not of its rows one by one") as error:
        model(torch.randn(8, 8), torch.randn(8, 8))
    return str(error.value)


@pytest.mark.wide
def test_microbatches_could_go_other_ways_than_the_batch() -> None:
    words = run_distributed(_in_microbatches, world_size=2)
    assert words[1] == f"rank 0 failed: {words[0]}"


class _FixesASize(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        h = self.gain(x)
        if x.sum() > 0:
            h = h.reshape(8, 8) * 2
        return h


def test_a_size_that_one_way_fixes_is_fixed() -> None:
    graph = captured(_FixesASize(), torch.randn(8, 8))
    assert len(choices(graph.graph)) == 1 and not graph.batches


class _AsksFiveTimes(Blocks):
    """And counts how often the answer was True, on which depends what follows."""

    def forward(self, x: Tensor) -> Tensor:
        count = 0
        for _ in range(5):
            if x.sum() > 0:
                count += 1
            x = x.sin()
        return x * count


class _ReadsANumber(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x + x[: x.argmax().item()].sum()
        return x


class _HooksOnOneWay(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        h = self.gain(x)
        if x.sum() > 0:
            h.register_hook(lambda grad: grad * 2)
        return h


class _BindsABuffer(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.gain(x)
        if x.sum() > 0:
            self.mean = h.detach().mean(0)
        else:
            self.mean.mul_(0.5)
        return h - self.mean


REASONS = {
    _AsksFiveTimes: "asks for a tensor's value for the 5th time",
    _ReadsANumber: "one reads a tensor's value into Python",
    _HooksOnOneWay: "one runs an autograd.Function or a hook",
    _BindsABuffer: r"binds the buffer mean anew: write into it, mean.copy_\(...\)",
}


@pytest.mark.parametrize("kind", REASONS, ids=lambda kind: kind.__name__)
def test_it_is_said_why_two_ways_are_no_program(kind: type[Blocks]) -> None:
    with pytest.raises(CaptureError, match=REASONS[kind]) as error:
        captured(kind(), torch.randn(8, 8))
    assert "if x.sum() > 0:" in str(error.value) and "torch.cond(" in str(error.value)


class _AsksFourTimes(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            if x.sum() > 0:
                x = x.sin()
        return x


@pytest.mark.wide
def test_the_ways_are_traced_once_each() -> None:
    """Of four questions, one after another, each is told otherwise in one trace."""
    with mock.patch.object(exports, "export", wraps=exports.export) as export:
        graph = captured(_AsksFourTimes(), torch.randn(8, 8)).graph
    assert export.call_count == 5 and len(choices(graph)) == 4


class _Layer(nn.Module):
    """Clamps what is large, in one line of Python, and scales one answer or the other by a number of its own."""

    def __init__(self, large: float = 1.0, small: float = 1.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.large, self.small = large, small

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h = h.clamp(-1, 1) * self.large if h.abs().max() > 1 else h * self.small
        return x + self.down(h)


class _Layers(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def test_layers_that_ask_once_each_are_traced_once() -> None:
    with mock.patch.object(exports, "export", wraps=exports.export) as export:
        graph = captured(_Layers(*(_Layer() for _ in range(8))), torch.randn(8, 8))
    assert export.call_count == 3 and len(choices(graph.graph)) == 8
    assert [run.members for run in graph.runs] == [tuple(f"layers.{i}" for i in range(1, 8))]


@pytest.mark.wide_where(lambda way: way == "small")
@pytest.mark.parametrize("way", ["large", "small"])
def test_layers_that_differ_on_one_way_are_not_alike(way: str) -> None:
    """Each of them is traced."""
    with mock.patch.object(exports, "export", wraps=exports.export) as export:
        graph = captured(_Layers(*(_Layer(**{way: float(i)}) for i in range(4))), torch.randn(8, 8)).graph
    assert export.call_count == 5 and len(choices(graph)) == 4


def _make_layers() -> nn.Module:
    return _Layers(*(_Layer() for _ in range(6)))


@pytest.mark.wide
@pytest.mark.parametrize("plan", ["fsdp", "tensor_parallel"])
def test_layers_that_ask_train(plan: str) -> None:
    for rank in run_distributed(_train, plan, _make_layers, [LARGE, SMALL, 1.0, 0.3], (8, 8), world_size=2):
        assert rank["apart"] < 1e-9 and rank["traces"] == 1 and len(rank["cut"]) >= 12


@pytest.mark.wide
def test_what_runs_whole_on_one_way_is_said(caplog: pytest.LogCaptureFixture) -> None:
    captured(_make_layers(), torch.randn(8, 8))  # whose ways read none
    captured(Blocks(), torch.randn(8, 8))
    (text,) = (record.getMessage() for record in caplog.records if record.name.startswith("autoparallel"))
    assert "2 parameters are read on one of the ways alone" in text and "if h.abs().max() > 1:" in text
