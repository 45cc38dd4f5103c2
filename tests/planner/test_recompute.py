"""Which layers are recomputed: as few as the limit on memory asks for, and none without one."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from autoparallel.decisions.parameters import PlanError
from autoparallel.hardware import CPU, H100
from autoparallel.plan import Plan
from autoparallel.planner.draft import Draft, call_of
from autoparallel.planner.request.request import Request
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


class _Gated(nn.Module):
    """A layer of which most of what it saves follows from its products alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.up, self.down = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return self.down(torch.tanh(nn.functional.silu(self.gate(x)) * torch.sigmoid(self.up(x))))


@pytest.mark.wide
def test_products_are_kept_where_the_rest_saves_enough() -> None:
    def drafted(part: float | None) -> Draft:
        limit = None if part is None else part * most
        loss = nn.functional.mse_loss
        request = Request((("dp", 2),), H100, "fsdp", loss_fn=loss, memory_limit=limit, microbatches=1)
        x = torch.empty(65536, 1024, device="meta")
        return draft(nn.Sequential(*(_Gated(1024) for _ in range(4))), call_of((x, x), with_target=True), request)

    free = drafted(None)
    most = free.prediction.total_memory
    some, least = drafted(0.85), drafted(0.5)
    assert {*some.plan.recompute.values()} == {"selective"}
    assert "full" in least.plan.recompute.values()
    assert free.prediction.seconds() < some.prediction.seconds() < least.prediction.seconds()
    for found, part in ((some, 0.85), (least, 0.5)):
        assert found.prediction.total_memory <= part * most
    assert Plan.from_json(some.plan.to_json()).recompute == some.plan.recompute
    assert "but for products, attention and collectives other than gathers" in " ".join(some.plan.explain().split())


def test_a_plan_from_before_recomputes_whole_layers_and_an_unknown_way_is_refused() -> None:
    data = json.loads(_draft(None).plan.to_json())
    assert Plan.from_json(json.dumps({**data, "recompute": ["blocks.1"]})).recompute == {"blocks.1": "full"}
    with pytest.raises(PlanError, match=r"'blocks\.1' is recomputed 'half'; expected one of selective, full"):
        Plan.from_json(json.dumps({**data, "recompute": {"blocks.1": "half"}}))


@pytest.mark.slow
def test_a_limit_that_nothing_fits_says_the_least_that_is_needed_what_for_and_what_helps() -> None:
    with pytest.raises(PlanError, match=r"no plan fits in 100\.0 kB .* 4 layers run again .* needs [\d.]+ kB") as e:
        _draft(1e5)
    assert "optimizer states" in str(e.value) and "fewer rows at once" in str(e.value)
    least = 1e3 * float(str(e.value).partition("a plan needs ")[2].split()[0]) + 50
    assert _draft(least).prediction.total_memory <= least
