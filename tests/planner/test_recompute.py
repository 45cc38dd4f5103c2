"""Which layers are recomputed: as few as the limit on memory asks for, and none without one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from autoparallel.decisions.parameters import PlanError
from autoparallel.hardware import CPU
from autoparallel.plan import Plan
from autoparallel.planner.draft import Draft, call_of
from autoparallel.planner.request import Request
from autoparallel.report.diff import diff_plans
from tests.captures import draft, shared_captures
from tests.planner.blocks import Blocks

LAYERS, WIDTH, ROWS = 4, 16, 512


@pytest.fixture(scope="module", autouse=True)
def one_trace_for_all_plans() -> Iterator[None]:
    with shared_captures():
        yield


def _draft(limit: float | None, plan: str | Plan = "auto") -> Draft:
    request = Request((("dp", 2),), CPU, plan, loss_fn=nn.functional.mse_loss, memory_limit=limit)
    x = torch.empty(ROWS, WIDTH, device="meta")
    return draft(Blocks(LAYERS, WIDTH, 8 * WIDTH), call_of((x, x), with_target=True), request)


@pytest.mark.wide
def test_as_few_layers_as_the_limit_asks_for_are_recomputed() -> None:
    free = _draft(None)
    assert not free.plan.recompute
    most = free.prediction.total_memory
    counts, seconds = [], []
    for part in (0.9, 0.8, 0.7):
        found = _draft(part * most)
        count = len(found.plan.recompute)
        assert [*found.plan.recompute] == [f"blocks.{i}" for i in range(count)], "the first ones"
        assert found.prediction.total_memory <= part * most
        assert found.plan.lower_bound <= found.prediction.seconds()  # type: ignore[operator]
        counts.append(count)
        seconds.append(found.prediction.seconds())
    assert 0 < counts[0] < counts[1] < counts[2] <= LAYERS
    assert free.prediction.seconds() < seconds[0] < seconds[1] < seconds[2]


def test_a_plan_says_what_is_recomputed() -> None:
    free = _draft(None)
    plan = _draft(0.7 * free.prediction.total_memory).plan
    assert Plan.from_json(plan.to_json()).recompute == plan.recompute
    words = f"blocks.0-{len(plan.recompute) - 1}"
    assert f"Recomputed in the backward, to save memory: {words}." in " ".join(plan.explain().split())
    assert f"Recomputed in the backward: nothing; now {words}." in diff_plans(free.plan, plan)
    again = _draft(None, Plan.from_json(plan.to_json()))
    assert again.prediction.total_memory == plan.prediction.total_memory  # type: ignore[union-attr]


def test_a_limit_that_nothing_fits_says_the_least_that_is_needed_what_for_and_what_helps() -> None:
    with pytest.raises(PlanError, match=r"no plan fits in 0\.1 MB .* 4 layers run again .* a plan needs 0\.\d MB") as e:
        _draft(1e5)
    assert "optimizer states 0.1 MB" in str(e.value) and "fewer rows at once" in str(e.value)
    least = float(str(e.value).partition("a plan needs ")[2].split()[0]) + 0.05
    assert _draft(least * 1e6).prediction.total_memory <= least * 1e6
