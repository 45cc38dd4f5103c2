"""What an optimizer keeps and how it updates is seen of it, and in the plan's memory and time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoparallel
from autoparallel.hardware import ADAMW, H100, OptimizerCost, Profile
from autoparallel.placements import parse_layout
from autoparallel.planner.draft import call_of
from autoparallel.planner.request.request import Request
from autoparallel.predict.optimizer import Kept, cost_at_rest, optimizer_cost
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


def _kept(optimizer: OptimizerCost, layout: str, shape: tuple[int, ...] = (512, 256), trainable: bool = True) -> Kept:
    profile = replace(H100, optimizer=optimizer)
    return cost_at_rest(profile, (4,), shape, parse_layout(layout), 4, trainable)


def test_elements_are_read_and_written_where_they_lie() -> None:
    whole, sharded = _kept(ADAMW, "I"), _kept(ADAMW, "S0")
    assert (whole.parameter, whole.gradient, whole.states) == (512 * 256 * 4, 512 * 256 * 4, 512 * 256 * 8)
    assert whole.seconds == 2 * whole.bytes / H100.memory_bandwidth
    assert whole.bytes == 4 * sharded.bytes and whole.seconds == 4 * sharded.seconds
    assert _kept(OptimizerCost("SGD", 0.0), "I").seconds == whole.seconds / 2


def test_what_is_frozen_is_kept_and_not_updated() -> None:
    assert _kept(ADAMW, "I", trainable=False) == Kept(512 * 256 * 4)


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
