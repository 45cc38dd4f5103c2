"""Attributes that calls read and change: how many traces serve them, whatever they are."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autoparallel
from autoparallel.graph.captured import NumberSpec
from autoparallel.hardware import profile_for
from autoparallel.planner.draft import call_of, capture_given
from autoparallel.planner.planner import Planner
from autoparallel.planner.request.request import Request
from tests.capture.programs.changing_attributes import LENGTHS, Annealed, Growing, Positions, Rotary
from tests.capture.programs.drawn_numbers import SkipsLayersByNumpy
from tests.capture.runner import numbers
from tests.devices import DEVICE
from tests.distributed import run_distributed


class Counting(nn.Module):
    """Counts, warms up, and does something else at every third call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 8, dtype=torch.float64), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        scale = 3.0 if self.calls % 3 == 0 else 1.0
        return self.linear(x) * scale * self.calls


def _kinds(make: Any, lengths: tuple[int, ...], **options: Any) -> tuple[int, float]:
    """How many kinds of calls these lengths make, and the largest difference to eager."""
    torch.manual_seed(0)
    plain, eager = make().double(), make().double()
    eager.load_state_dict(plain.state_dict(), strict=False)
    mesh = init_device_mesh(DEVICE, (torch.distributed.get_world_size(),), mesh_dim_names=("dp",))
    model = autoparallel.compile(plain.to(DEVICE), mesh, plan="fsdp", **options)
    eager.to(DEVICE)
    largest = 0.0
    for step, length in enumerate(lengths):
        x = numbers(4, length, 8, seed=step)
        outputs = model(x), eager(x)
        for out in outputs:
            out.square().sum().backward()
        largest = max(largest, (outputs[0] - outputs[1]).abs().max().item())
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        largest = max(largest, (ours.grad.full_tensor() - theirs.grad).abs().max().item())  # type: ignore[union-attr]
    return len(model._kinds), largest


@pytest.mark.wide_where(lambda make: make is not Growing)
@pytest.mark.parametrize(
    ("make", "most"), [(Rotary, 5), (Growing, 3), (Positions, 4)], ids=["of the call before", "longest", "its own size"]
)
def test_tables_by_length_need_a_few_traces(make: Any, most: int) -> None:
    """Twice as many lengths need no more."""
    lengths = (*LENGTHS, 8, 9, 11, 5, 13, 7, 14, 3)
    few, wrong = run_distributed(_kinds, make, lengths, world_size=1)[0]
    assert few <= most and wrong < 1e-9


def test_a_counter_needs_a_trace_for_each_answer() -> None:
    kinds, wrong = run_distributed(_kinds, Counting, (6,) * 20, world_size=1)[0]
    assert kinds == 2 and wrong < 1e-9


class CountingByName(nn.Module):
    """The same with entries of dicts, and a log for each of two numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.stats = nn.Linear(8, 8, dtype=torch.float64), {"train": {"calls": 0}}
        self.log: dict[str, list[Any]] = defaultdict(list)

    def forward(self, x: Tensor) -> Tensor:
        stats = self.stats["train"]
        stats["calls"] += 1
        h = self.linear(x)
        self.log["mean"].append(h.detach().mean())
        self.log["calls"].append(stats["calls"])
        return h * (3.0 if stats["calls"] % 3 == 0 else 1.0) * stats["calls"]


def test_entries_need_a_trace_for_each_answer() -> None:
    """And one for the first call, which finds no lists."""
    kinds, wrong = run_distributed(_kinds, CountingByName, (6,) * 20, world_size=1)[0]
    assert kinds == 3 and wrong < 1e-9


class AveragingByLayer(nn.Module):
    """A tensor under the name of a layer, as no buffer has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)
        self.means = {"blocks.0": torch.zeros(8, dtype=torch.float64)}

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        self.means["blocks.0"] = 0.9 * self.means["blocks.0"] + h.detach().mean((0, 1))
        return h - self.means["blocks.0"]


def test_tensors_under_any_name_need_one_trace() -> None:
    kinds, wrong = run_distributed(_kinds, AveragingByLayer, (6,) * 4, world_size=1)[0]
    assert kinds == 1 and wrong < 1e-9


def _with_a_loss_that_counts() -> tuple[int, list[float]]:
    loss_fn, plain = Annealed(), nn.Linear(8, 8, dtype=torch.float64)
    model = autoparallel.compile(plain.to(DEVICE), loss_fn=loss_fn)
    x = numbers(4, 8, seed=0)
    losses = [float(model(x, x)), float(model(x, x))]
    model(x)  # without a target there is no loss
    losses += [float(model(x, x)) for _ in range(3)]
    return loss_fn.steps, losses


def test_a_loss_function_counts_where_it_runs() -> None:
    steps, losses = run_distributed(_with_a_loss_that_counts, world_size=1)[0]
    differences = [b - a for a, b in itertools.pairwise(losses)]
    assert steps == 5 and differences == pytest.approx([differences[0]] * 3 + [0.0]) and differences[0] > 0


@pytest.mark.wide
@pytest.mark.parametrize("make", [Counting, CountingByName, Growing])
def test_compiled_by_inductor(make: Any) -> None:
    lengths = (6, 6, 10, 4) if make is Growing else (6,) * 4
    kinds, wrong = run_distributed(_kinds, make, lengths, backend="inductor", world_size=1)[0]
    assert kinds <= 3 and wrong < 1e-9


def test_a_plan_without_ranks_is_given_them() -> None:
    planner = Planner(Growing().double(), Request((("dp", 2),), profile_for("cpu")))
    captured, call = capture_given(planner, call_of((numbers(4, 12, 8, seed=0).cpu(),)))
    assert {*captured.attributes} == {"longest", "table"} and len(call.specs) == 3


def test_a_plan_without_ranks_is_given_entries() -> None:
    planner = Planner(CountingByName().double(), Request((("dp", 2),), profile_for("cpu")))
    captured, call = capture_given(planner, call_of((numbers(4, 12, 8, seed=0).cpu(),)))
    assert {*captured.attributes} == {"stats['train']['calls']", "log['mean']", "log['calls']"} and len(call.specs) == 2


@pytest.mark.wide
def test_a_plan_without_ranks_is_given_what_the_model_draws() -> None:
    planner = Planner(SkipsLayersByNumpy().double(), Request((("dp", 2),), profile_for("cpu")))
    captured, call = capture_given(planner, call_of((numbers(8, 8, seed=0).cpu(),)))
    drawn = [spec for spec in call.specs if isinstance(spec, NumberSpec) and spec.is_drawn]
    assert {*captured.drawn} == {"Python's random", "numpy.random"} and captured.assumed
    assert len(call.specs) == 1 + len(drawn) and len(drawn) >= sum(map(len, captured.drawn.values()))
