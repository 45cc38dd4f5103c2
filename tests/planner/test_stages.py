"""Where models are cut: balance, memory, and what cannot be cut."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoparallel.decisions.parameters import PlanError
from autoparallel.decisions.pipeline import Pipeline, PipelinePlan
from autoparallel.hardware import CPU
from autoparallel.passes.recompute_layers import find_layers
from autoparallel.pipeline.schedules import SPLIT, in_flight, require_schedule
from autoparallel.plan import Plan
from autoparallel.planner.candidates import evaluation
from autoparallel.planner.candidates.pipelines import microbatch_counts
from autoparallel.planner.draft import call_of
from autoparallel.planner.layouts import cheapest
from autoparallel.planner.planner import Planner
from autoparallel.planner.request.request import Request
from autoparallel.planner.space.problem import Problem
from autoparallel.planner.space.space import SearchSpace
from autoparallel.planner.space.subject import Subject
from autoparallel.planner.stages.stages import StagePlanner
from tests.passes.support import captured

PROFILE = replace(CPU, launch=1e-9, latency=1e-9)


class Uneven(nn.Module):
    """Layers of the given widths, one linear each."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        pairs = itertools.pairwise(widths)
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairs)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def planner(model: nn.Module, width: int, ranks: int, limit: float | None = None, rows: int = 8) -> StagePlanner:
    graph = captured(model, torch.randn(rows, width), torch.randn(rows, width), loss_fn=F.mse_loss)
    request = Request((("dp", 1),), PROFILE, stages=ranks, memory_limit=limit)
    may_recompute = () if limit is None else find_layers(graph.graph)
    return StagePlanner(Subject(graph, request, may_recompute), cheapest(Problem(SearchSpace(Subject(graph, request)))))


WIDTHS = (64, 256, 256, 64, 64, 64, 512, 64)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_no_other_cuts_have_a_faster_slowest_stage(ranks: int) -> None:
    found = planner(Uneven(*WIDTHS), 64, ranks)
    line = found._line(1, 1)
    rows, cuts = line.rows, found._cut(line, range(ranks), in_flight("1f1b", ranks, ranks, 2 * ranks))
    moved, seconds = rows.crossing, rows.forward + rows.backward[0]

    def slowest(places: tuple[int, ...]) -> float:
        bounds = [0, *places, len(rows.nodes)]
        worst = 0.0
        for a, b in itertools.pairwise(bounds):
            if not any(rows.reads[a:b]):
                return float("inf")
            edges = sum(moved[p] for p in (a, b) if 0 < p < len(rows.nodes))
            worst = max(worst, seconds[a:b].sum() + 2 * edges)
        return worst

    best = min(slowest(places) for places in itertools.combinations(range(1, len(rows.nodes)), ranks - 1))
    assert slowest(tuple(cuts)) == pytest.approx(best)


def test_cuts_follow_what_layers_cost_not_how_many_they_are() -> None:
    found = planner(Uneven(64, 64, 64, 64, 64, 64, 64, 512, 64), 64, 2)
    plan = found.choose([4], Pipeline("1f1b"))
    assert int(plan.stages[1].first.removeprefix("layers.")) >= 6
    seconds = [stage.forward + stage.backward for stage in plan.stages]
    assert max(seconds) / sum(seconds) < 0.7


class Attention(nn.Module):
    """Three projections in the middle, which all live until their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
        self.parts = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(torch.stack([torch.tanh(part(x)) for part in self.parts]).sum(0))


def test_a_cut_through_many_values_is_worth_what_their_messages_cost() -> None:
    """In the middle of the model seven values cross; at its ends one."""
    inside = ("parts.", "/aten.tanh")
    found = planner(Attention(), 64, 2)
    assert found.choose([4], Pipeline("1f1b")).cuts[0].startswith(inside)
    found = planner(Attention(), 64, 2)
    found.pricer.subject.profile = replace(PROFILE, latency=1e-2)
    assert not found.choose([4], Pipeline("1f1b")).cuts[0].startswith(inside)


def test_memory_by_stage_moves_the_cuts_and_counts_microbatches_in_flight() -> None:
    model = Uneven(64, 1024, 64, 64, 64, 64, 64, 64, 64)
    free = planner(model, 64, 2).choose([4], Pipeline("1f1b"))
    assert [stage.in_flight for stage in free.stages] == [2, 1]
    limit = rank_memory(free) * 1.01
    assert planner(model, 64, 2, limit).choose([4], Pipeline("1f1b")).cuts == free.cuts
    with pytest.raises(PlanError, match=r"stage \d \(layers\.\d to layers\.\d\).* [kM]B per device.*memory_limit"):
        planner(model, 64, 2, limit / 4).choose([4], Pipeline("1f1b"))


def test_what_cannot_be_cut_says_why() -> None:
    with pytest.raises(PlanError, match="4 stages are more than the 2 operators with parameters"):
        planner(Uneven(8, 8, 8), 8, 4).choose([4], Pipeline("1f1b"))
    with pytest.raises(PlanError, match="8 rows does not divide into 3 microbatches"):
        microbatch_counts(8, 2, Pipeline(microbatches=3))
    with pytest.raises(PlanError, match=r"a batch of 3 rows does not divide into 4 to 32 microbatches"):
        microbatch_counts(3, 4, Pipeline())
    with pytest.raises(PlanError, match=r"each of which divides by the 2 ranks that shard it.* a multiple of 8"):
        microbatch_counts(4, 4, Pipeline(), sharing=2)


def test_the_ranks_that_shard_a_microbatch_get_as_many_rows_each() -> None:
    assert microbatch_counts(8, 2, Pipeline()) == [8, 4, 2]
    assert microbatch_counts(8, 2, Pipeline(), sharing=2) == [4, 2]
    with pytest.raises(ValueError, match="2 stages per rank, not 1"):
        require_schedule("zero_bubble_v", 2, 1, 4)


class WithPenalty(Uneven):
    """A loss that is no mean over rows: a penalty is added, as a router's is."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        out = super().forward(x)
        return {"loss": out.square().mean() + 0.1 * out.mean(0).square().sum()}


def test_what_no_cut_could_run_is_refused_before_the_search() -> None:
    call = call_of((torch.empty(8, 8),), with_target=False)
    for microbatches, refused in ((None, True), (4, True), (1, False)):
        pipeline = Pipeline(microbatches=microbatches)
        request = Request((("dp", 1),), PROFILE, stages=2, pipeline=pipeline)
        search = Planner(WithPenalty(8, 8, 8), request)
        graph = search.capture(call)
        with mock.patch.object(
            evaluation, "cheapest", side_effect=LookupError
        ):  # of the first candidate that is searched
            raises = pytest.raises(PlanError, match=r"a mean over: .*returns \(sum, count\)")
            with raises if refused else pytest.raises(LookupError):
                search.search(graph, call)


def test_the_schedule_that_waits_least_is_chosen() -> None:
    model = Uneven(*[64] * 17)
    found = planner(model, 64, 4, rows=16)
    counts = microbatch_counts(16, 4, Pipeline())
    chosen = found.choose(counts, Pipeline())
    fixed = [found.choose(counts, Pipeline(s)) for s in ("gpipe", "1f1b", "interleaved_1f1b")]
    assert all(chosen.seconds <= other.seconds for other in fixed)
    assert chosen.bubble < min(other.bubble for other in fixed[:2])


def test_a_plan_is_read_as_it_was_written_and_explained() -> None:
    found = planner(Uneven(*WIDTHS), 64, 2)
    plan = replace(found.plan, pipeline=found.choose([4], Pipeline("1f1b")))
    again = Plan.from_json(plan.to_json())
    assert again.to_json() == plan.to_json()
    assert again.pipeline == plan.pipeline and again.pipeline is not None
    text = again.explain()
    assert "Pipeline over pp=2: 1f1b, 4 microbatches" in text
    lines = [line for line in text.splitlines() if line.startswith("rank ")]
    assert len(lines) == 2 and set(lines[0].split()[2]) == set("0123abcd.")
    data = json.loads(plan.to_json())
    data["pipeline"]["cuts"] *= 2
    with pytest.raises(PlanError, match="cannot lie on 2 ranks alike"):
        Plan.from_json(json.dumps(data))


def rank_memory(plan: PipelinePlan) -> float:
    return max(plan.memory_by_rank())


def test_a_limit_changes_the_schedule_not_only_the_cuts() -> None:
    model, counts = Uneven(*[64] * 17), microbatch_counts(512, 2, Pipeline())
    free = planner(model, 64, 2, rows=512).choose(counts, Pipeline())
    lean = planner(model, 64, 2, rows=512).choose(counts, Pipeline("1f1b"))
    assert free.schedule != "1f1b" and rank_memory(free) > rank_memory(lean)
    limit = 1.01 * rank_memory(lean)
    tight = planner(model, 64, 2, limit, rows=512).choose(counts, Pipeline())
    assert tight.schedule == "1f1b" and rank_memory(tight) <= limit


class Wide(nn.Module):
    """A layer that saves much more than enters it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 128), nn.Linear(128, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


@pytest.mark.wide
def test_where_no_cut_fits_as_few_layers_as_needed_run_again() -> None:
    def choose(limit: float | None, schedule: str | None = "1f1b") -> tuple[PipelinePlan, list[str]]:
        found = planner(nn.Sequential(*(Wide() for _ in range(6))), 16, 2, limit, rows=1024)
        return found.choose([4], Pipeline(schedule)), [*found.recompute]

    free, none = choose(None)
    assert none == []
    needs = rank_memory(free)
    assert choose(1.01 * needs) == (free, [])
    # The least is 0.45: one layer that runs again and the gradients of its widest call are 0.33 of what is needed.
    (some, few), (least, many) = choose(0.6 * needs), choose(0.5 * needs)
    assert rank_memory(some) <= 0.6 * needs and rank_memory(least) <= 0.5 * needs
    assert 0 < len(few) < len(many) and few[0] == many[0] == "0"  # the first rank holds most microbatches
    assert free.seconds < some.seconds < least.seconds
    again = sum(stage.forward + stage.backward for stage in some.stages)
    forwards = sum(stage.forward for stage in free.stages)
    once = sum(stage.forward + stage.backward for stage in free.stages)
    assert again == pytest.approx(once + forwards * len(few) / 6, rel=1e-2)  # the loss is no layer
    assert all(stage.inputs == 0.5 for stage in free.stages) and some.stages[0].inputs > 0.5
    with pytest.raises(
        PlanError, match=r"stage 0 .*every layer that can run again in the backward doing so: .* more than the limit"
    ):
        choose(0.1 * needs)
    assert choose(0.5 * needs, None)[0].schedule not in SPLIT  # there what runs again would keep others waiting
    parted, _ = choose(0.6 * needs, "zero_bubble")
    assert parted.schedule == "zero_bubble" and rank_memory(parted) <= 0.6 * needs


def test_full_size_sums_of_gradients_are_counted_where_parameters_are_sharded() -> None:
    graph = captured(Uneven(64, 64, 64), torch.randn(8, 64), torch.randn(8, 64), loss_fn=F.mse_loss)
    needs = []
    for preset in ("data_parallel", "fsdp"):
        request = Request((("dp", 2),), PROFILE, preset, stages=2)
        subject = Subject(graph, request)
        found = StagePlanner(subject, cheapest(Problem(SearchSpace(subject))))
        needs.append(found.pricer.rows(graph.actual).resting.sum())
    whole = 2 * 64 * 64 * 4
    assert needs == [4 * whole, 4 * whole / 2 + whole / 2]  # weight, gradient, two states; and the sum over its shard
