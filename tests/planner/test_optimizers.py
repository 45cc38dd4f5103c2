"""What an optimizer keeps and how it updates is seen of it, and in the plan's memory and time."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoparallel
from autoparallel.decisions.parameters import PlanError
from autoparallel.hardware import ADAMW, CPU, H100, OptimizerCost, Profile
from autoparallel.placements import parse_layout
from autoparallel.planner.draft import Draft, call_of
from autoparallel.planner.request.request import Request
from autoparallel.predict.optimizer import ParameterCost, cost_at_rest, optimizer_cost
from autoparallel.report.diff import diff_plans
from autoparallel.text import units
from tests.captures import draft
from tests.models.small import MLP

MUON = OptimizerCost("Muon", 1.0, 5)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (torch.optim.AdamW, ADAMW),
        (torch.optim.SGD, OptimizerCost("SGD", 0.0)),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), OptimizerCost("SGD", 1.0)),
        (lambda parameters: torch.optim.AdamW(parameters, amsgrad=True), OptimizerCost("AdamW", 3.0)),
        (torch.optim.Adafactor, OptimizerCost("Adafactor", 0.0)),  # a row and a column
        (torch.optim.Muon, MUON),
    ],
)
def test_one_step_on_a_small_matrix_shows_what_is_kept(make: Any, expected: OptimizerCost) -> None:
    assert optimizer_cost(make) == expected


@pytest.mark.parametrize("make", [torch.optim.LBFGS, torch.optim.lr_scheduler.StepLR, None])
def test_what_cannot_step_on_a_matrix_is_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="optimizer= makes no optimizer of a list of parameters"):
        optimizer_cost(make)


def _kept(
    optimizer: OptimizerCost, layout: str, shape: tuple[int, ...] = (512, 256), trainable: bool = True
) -> ParameterCost:
    profile = replace(H100, optimizer=optimizer)
    return cost_at_rest(profile, (4,), shape, parse_layout(layout), 4, trainable)


def test_elements_are_read_and_written_where_they_lie() -> None:
    whole, sharded = _kept(ADAMW, "I"), _kept(ADAMW, "S0")
    assert (whole.parameter, whole.gradient, whole.states) == (512 * 256 * 4, 512 * 256 * 4, 512 * 256 * 8)
    assert whole.seconds == 2 * whole.bytes / H100.memory_bandwidth
    assert whole.bytes == 4 * sharded.bytes and whole.seconds == 4 * sharded.seconds
    assert _kept(OptimizerCost("SGD", 0.0), "I").seconds == whole.seconds / 2


def test_what_is_frozen_is_kept_and_not_updated() -> None:
    assert _kept(ADAMW, "I", trainable=False) == ParameterCost(512 * 256 * 4)


def test_ranks_share_the_arithmetic_of_matrices_and_send_them() -> None:
    free = replace(H100, optimizer=MUON, bandwidth=float("inf"), network_bandwidth=float("inf"), links=())
    points = 5 * (4 * 256**2 * 512 + 2 * 256**3)

    def seconds(profile: Profile, ranks: int, layout: str) -> float:
        return cost_at_rest(profile, (ranks,), (512, 256), parse_layout(layout), 4, True).seconds

    alone = seconds(free, 1, "I")
    assert alone == pytest.approx(
        2 * 3 * 512 * 256 * 4 / free.memory_bandwidth + free.compute_seconds(points, 0.0, torch.bfloat16)
    )
    assert seconds(free, 4, "I") - free.launch == pytest.approx((alone - free.launch) / 4)
    assert seconds(free, 4, "S0") == pytest.approx(seconds(free, 4, "I"))
    # Replicas send what they have updated to each other; shards also send what an update needs, but each its part only.
    assert seconds(free, 4, "S0") < seconds(replace(H100, optimizer=MUON), 4, "S0")
    assert seconds(replace(H100, optimizer=MUON), 4, "S0") < seconds(replace(H100, optimizer=MUON), 4, "I")


def test_beside_muon_vectors_are_updated_by_adamw() -> None:
    assert _kept(MUON, "I", (512,)) == _kept(ADAMW, "I", (512,))


def _plan(optimizer: OptimizerCost) -> autoparallel.Plan:
    """Within a limit that holds what a model keeps on each device, but for what Adam keeps of it."""
    with torch.device("meta"):
        model, x, target = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.empty(4, 64), torch.empty(4, 64)
    size = sum(p.numel() * 4 for p in model.parameters())
    profile = replace(H100, optimizer=optimizer)
    request = Request((("dp", 2),), profile, loss_fn=F.mse_loss, memory_limit=3.5 * size)
    return draft(model, call_of((x, target), with_target=True), request).plan


def test_states_in_host_memory_are_paid_for_with_their_way() -> None:
    def kept(profile: Profile, offloaded: bool) -> ParameterCost:
        return cost_at_rest(profile, (4,), (512, 256), parse_layout("I"), 4, True, offloaded)

    here, there, size = kept(H100, False), kept(H100, True), 512 * 256 * 8
    assert (here.states, here.host, there.states, there.host) == (size, 0, 0, size)
    assert H100.host_bandwidth is not None
    assert there.host_seconds == there.seconds - here.seconds == pytest.approx(2 * size / H100.host_bandwidth)
    one_memory = kept(CPU, True)
    assert (one_memory.states, one_memory.host) == (size, 0) and one_memory.seconds > kept(CPU, False).seconds
    bus = replace(H100, host_bandwidth=1e9)
    assert Profile.from_json(bus.to_json()) == bus
    with pytest.raises(ValueError, match="host_bandwidth must be positive, got 0"):
        Profile.from_json(replace(H100, host_bandwidth=0.0).to_json())


WIDTH = 4096


class _Deep(nn.Module):
    """Layers that save much of what they compute."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


@functools.cache
def _within(part: float | None, rows: int, bus: float, **options: Any) -> Draft:
    """The plan of a deep model within a part of what the fastest one takes."""
    with torch.device("meta"):
        model, x = _Deep(), torch.empty(rows, WIDTH)
    limit = None if part is None else part * _within(None, rows, 1e9).prediction.total_memory
    profile = replace(H100, host_bandwidth=bus)
    request = Request((("dp", 2),), profile, "fsdp", loss_fn=F.mse_loss, memory_limit=limit, **options)
    return draft(model, call_of((x, x), with_target=True), request)


@pytest.mark.wide
def test_states_go_to_host_memory_where_nothing_else_fits_or_all_else_is_slower() -> None:
    rows = 256  # states are most of what is kept
    only = _within(0.7, rows, 1e9, microbatches=1)
    assert only.plan.offload_optimizer and not only.plan.recompute
    with pytest.raises(PlanError, match="no plan fits"):
        _within(0.7, rows, 1e9, microbatches=1, offload_optimizer=False)
    with pytest.raises(PlanError, match=r"no plan fits .* again in the backward, optimizer states in host memory\)"):
        _within(0.2, rows, 1e9, microbatches=1)
    text = " ".join(only.plan.explain().split())
    assert f"Optimizer states lie in host memory: {units(only.prediction.host_memory)} for each device" in text
    assert (
        "optimizer states in host memory" in text.partition("Optimizer states lie")[0]
    )  # in the table of what was tried
    assert only.prediction.host_memory == 2 * only.prediction.memory["parameters"]

    rows = 2**14  # activations are, which microbatches halve
    fast, slow = (_within(0.9, rows, bus) for bus in (1e15, 1e9))
    assert fast.plan.offload_optimizer and not fast.plan.recompute
    assert slow.plan.microbatches == 2 and not slow.plan.offload_optimizer
    asked = _within(None, rows, 1e9, offload_optimizer=True)
    assert asked.plan.offload_optimizer
    assert asked.prediction.seconds() == pytest.approx(
        _within(None, rows, 1e9).prediction.seconds() + asked.prediction.host_seconds
    )
    assert "Optimizer states: in host memory; now in the device's memory." in diff_plans(asked.plan, slow.plan)


@pytest.mark.wide
def test_stages_leave_states_in_host_memory_where_nothing_else_fits() -> None:
    with torch.device("meta"):
        model, x = _Deep(), torch.empty(256, WIDTH)
    call = call_of((x, x), with_target=True)

    def planned(limit: float | None, **options: Any) -> autoparallel.Plan:
        profile = replace(H100, host_bandwidth=1e9)
        request = Request((("dp", 1),), profile, loss_fn=F.mse_loss, memory_limit=limit, stages=2, **options)
        return draft(model, call, request).plan

    free = planned(None)
    assert free.pipeline is not None and not free.offload_optimizer
    limit = 0.6 * max(free.pipeline.memory_by_rank())
    plan = planned(limit)
    assert plan.offload_optimizer and plan.pipeline is not None and max(plan.pipeline.memory_by_rank()) <= limit
    with pytest.raises(PlanError):
        planned(limit, offload_optimizer=False)


def test_a_plan_within_a_limit_is_that_of_its_optimizer() -> None:
    adam, sgd = _plan(ADAMW), _plan(OptimizerCost("SGD", 0.0))
    assert any("S" in p.at_rest for p in adam.parameters.values())
    assert not any("S" in p.at_rest for p in sgd.parameters.values())
    assert "with the states of AdamW" in adam.explain() and "optimizer states" in adam.explain()
    assert "with the states of SGD" in sgd.explain() and "optimizer states" not in sgd.explain()


def test_compile_is_told_the_optimizer() -> None:
    batch = torch.randn(4, 12), torch.randn(4, 8)
    model = autoparallel.compile(MLP(), loss_fn=F.mse_loss, optimizer=torch.optim.SGD, example_inputs=batch)
    assert model.plan.prediction is not None and model.plan.prediction.optimizer == "SGD"
    with pytest.raises(ValueError, match="optimizer= makes no optimizer"):
        autoparallel.compile(MLP(), optimizer=torch.optim.LBFGS)
