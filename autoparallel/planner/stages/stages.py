"""Where a model is cut into pipeline stages, by which schedule they run, in how many microbatches, and what runs again.

The layouts inside of the stages are searched for first, for one microbatch on the other mesh axes.  Then the operators
are gone through in the model's order with what each costs under these layouts, and dynamic programming finds the cuts
that make the slowest stage as fast as possible, within the memory of a device: a stage keeps its parameters with
gradients and optimizer states, and the activations of as many microbatches as the schedule has in flight there.  Each
schedule is then played through with the times of its stages, and the fastest is taken.
"""

from __future__ import annotations

import bisect
import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
from torch import fx

from autoparallel.comm.world import PIPELINE_AXIS
from autoparallel.decisions.decisions import RECOMPUTED
from autoparallel.decisions.parameters import PlanError
from autoparallel.decisions.pipeline import Pipeline, PipelinePlan, StageCost
from autoparallel.passes.cut_stages import CutError, stages_of
from autoparallel.pipeline.schedules import SPLIT, in_flight, rank_of_stage, require_schedule
from autoparallel.plan import Plan
from autoparallel.planner.space.subject import Subject
from autoparallel.planner.stages.cuts import most_even
from autoparallel.planner.stages.rows import Array, RowPricer, Rows
from autoparallel.planner.stages.steps import Point, Step, points_of, seconds_within, steps_of, sums_before
from autoparallel.planner.thresholds import THRESHOLDS
from autoparallel.text import units

CHOICES = (("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 4), ("zero_bubble_v", 2))
"""The schedules tried, with their stages per rank, where none is asked for."""


class StagePlanner:
    """Cuts one captured graph, under a plan of the layouts inside of its stages.

    Args:
        subject: the whole graph, and which of its layers may run again in the backward where memory is short.
        plan: the layouts on the mesh axes other than the pipeline's.

    Attributes:
        recompute: the layers that run again in the backward of the pipeline that was chosen last, and how much of them.
    """

    def __init__(self, subject: Subject, plan: Plan) -> None:
        self.captured, self.plan = subject.captured, plan
        self.ranks, self.memory_limit = subject.stages, subject.request.memory_limit
        self.pricer = RowPricer(subject, plan)
        self.forbidden = self._forbidden_cuts()
        self.recompute: Mapping[str, str] = {}

    # -- choosing ---------------------------------------------------------------------------------------------------

    def choose(self, counts: Sequence[int], request: Pipeline) -> PipelinePlan:
        """The fastest pipeline among those that are asked for.

        Args:
            counts: the numbers of microbatches to try; the graph's ``actual`` sizes are those of the first.

        Raises:
            PlanError: when none can be run, or none fits.
        """
        best: PipelinePlan | None = None
        reasons: list[str] = []
        for count in counts:
            line = self._line(counts[0], count)
            for schedule, per_rank in self._choices(request):
                try:
                    require_schedule(schedule, self.ranks, per_rank, count)
                    pipeline, again = self._plan(line, schedule, per_rank, count, request.cuts)
                    if best is None or _least_seconds(pipeline) < best.seconds:
                        timeline = pipeline.played()
                        pipeline = replace(pipeline, seconds=timeline.seconds, bubble=timeline.bubble)
                except (ValueError, CutError) as error:
                    reasons.append(str(error))
                    continue
                if best is None or 0 < pipeline.seconds < best.seconds * (1 - 1e-6):
                    best, self.recompute = pipeline, again
        if best is None:
            why = "; ".join(dict.fromkeys([reasons[0], reasons[-1]]))
            raise PlanError(f"no pipeline over {PIPELINE_AXIS}={self.ranks} can be planned: {why}")
        return best

    def settled(self, pipeline: Pipeline) -> PipelinePlan:
        """The pipeline that an earlier plan has settled, for a call that may have any number of microbatches where it
        is not differentiated; the plan says how many those have that are. Where a call skips layers, stages may be
        empty.

        Raises:
            PlanError: where it does not fit.
        """
        assert pipeline.schedule is not None and pipeline.microbatches is not None
        line, per_rank = self._line(1, 1), pipeline.stages_per_rank or 1
        return self._plan(line, pipeline.schedule, per_rank, pipeline.microbatches, pipeline.cuts, fills_all=False)[0]

    def _line(self, planned: int, count: int) -> _Line:
        """The operators in so many microbatches, where the graph has the sizes of another number."""
        if not self.pricer.nodes:
            raise PlanError(
                "a pipeline cuts a call at its operators that use activations and parameters, and this one has none\n"
                "What to change: compute it outside of the compiled model, or use a mesh without an axis 'pp'."
            )
        actual = self.captured.actual
        rows = self.pricer.rows({**actual, **{s: actual[s] * planned // count for s in self.captured.batches}})
        return _Line(rows, steps_of(rows), np.array([0, *self._places(rows), len(rows.nodes)]))

    def _choices(self, request: Pipeline) -> Iterator[tuple[str, int]]:
        if request.schedule is None:
            for schedule, per_rank in CHOICES:
                fits = request.cuts is None or len(request.cuts) + 1 == per_rank * self.ranks
                if fits and request.stages_per_rank in (None, per_rank):
                    yield schedule, per_rank
            return
        usual = 1 if request.schedule in ("gpipe", "1f1b") else 2
        if request.cuts is not None and request.stages_per_rank is None:
            usual = max(1, (len(request.cuts) + 1) // self.ranks)
        yield request.schedule, request.stages_per_rank or usual

    def _plan(
        self,
        line: _Line,
        schedule: str,
        per_rank: int,
        microbatches: int,
        cuts: tuple[str, ...] | None,
        fills_all: bool = True,
    ) -> tuple[PipelinePlan, dict[str, str]]:
        """A pipeline of this kind, not played through yet, and which layers run again in its backward.

        Args:
            fills_all: whether no stage may be without operators.
        """
        rows, count = line.rows, per_rank * self.ranks
        ranks = [rank_of_stage(schedule, self.ranks, stage) for stage in range(count)]
        holds = in_flight(schedule, self.ranks, count, microbatches)
        if cuts is None and not fills_all and sum(map(bool, rows.reads)) < count:
            starts = [0] * (count - 1)
        elif cuts is None:
            starts = self._cut(line, ranks, holds)
        else:
            if len(cuts) + 1 != count:
                raise PlanError(f"{len(cuts)} cuts make {len(cuts) + 1} stages, the schedule needs {count}")
            where = stages_of(self.captured, cuts)
            starts = [sum(where[node] < s for node in rows.nodes) for s in range(1, count)]
            if fills_all and len({0, *starts}) < count:
                raise PlanError(f"the cuts {', '.join(cuts)} leave a stage empty")
        stages = _Stages(rows, [*itertools.pairwise([0, *starts, len(rows.nodes)])], ranks, holds)
        again = self._fewest_steps(line.steps, stages)
        keys = tuple(rows.nodes[i].meta["key"] for i in starts)
        plan = PipelinePlan(PIPELINE_AXIS, self.ranks, schedule, microbatches, keys, stages.costs(again))
        self._require_fits(plan, stages.resting, bool(line.steps))
        return plan, {step.layer: RECOMPUTED[step.answer - 1] for step in again}

    def _fewest_steps(self, steps: Sequence[Step], stages: _Stages) -> list[Step]:
        """The last step of each layer that must run again for its rank's memory to suffice, in the model's order.

        Of layers that are alike the first ones do, because what they save lives longest.
        """
        again: dict[str, Step] = {}
        if self.memory_limit is None:
            return []
        rows, spans, held = stages.rows, stages.spans, stages.in_flight
        begins = [begin for begin, _ in spans]
        inside: list[list[Step]] = [[] for _ in spans]
        for step in steps:
            stage = bisect.bisect_right(begins, step.begin) - 1
            if step.end <= spans[stage][1]:
                inside[stage].append(step)
        for rank in range(self.ranks):
            ours = [s for s, runs in enumerate(stages.ranks) if runs == rank]
            memory = sum(stages.resting[s] + held[s] * rows.activations[0, slice(*spans[s])].sum() for s in ours)
            widest = {s: rows.moment[slice(*spans[s])].max(initial=0.0) for s in ours}
            moment = dict(widest)
            order = [(step.slope / held[s], s, step) for s in ours for step in inside[s]]
            for _, s, step in sorted(order, key=operator.itemgetter(0)):
                if memory + max(moment.values()) <= self.memory_limit:
                    break
                if 0 < begins[s] == step.begin and step.layer not in again:
                    memory += held[s] * rows.entering[step.begin]
                memory -= held[s] * step.saved
                moment[s] = max(moment[s], widest[s] + step.spared)
                again[step.layer] = step
        return [step for step in steps if again.get(step.layer) is step]

    def _require_fits(self, plan: PipelinePlan, resting: Sequence[float], may_recompute: bool) -> None:
        if self.memory_limit is None:
            return
        needs = plan.memory_by_rank()
        worst = max(range(self.ranks), key=needs.__getitem__)
        if needs[worst] > self.memory_limit:
            costs, ours = plan.stages, plan.stages_of(worst)
            names = ", ".join(f"stage {s} ({costs[s].first} to {costs[s].last})" for s in ours)
            again = " and every layer that can run again in the backward doing so" if may_recompute else ""
            rest, count = sum(resting[s] for s in ours), costs[ours[0]].in_flight
            held = sum(costs[s].memory for s in ours) - rest
            raise PlanError(
                f"{names} {'needs' if len(ours) == 1 else 'need'} {units(needs[worst])} per device under "
                f"{plan.schedule!r}{again}: parameters, gradients and optimizer states {units(rest)}, {count} "
                f"microbatch{'es' * (count > 1)} in flight {units(held)}, one backward "
                f"{units(needs[worst] - rest - held)}. That is more than the limit of {units(self.memory_limit)}: "
                "raise memory_limit, use more stages, more ranks beside them, or smaller microbatches"
            )

    # -- cutting ----------------------------------------------------------------------------------------------------

    def _cut(self, line: _Line, ranks: Sequence[int], holds: Sequence[int]) -> list[int]:
        """The numbers of the rows with which the stages but the first begin.

        Args:
            ranks: of each stage, the one that runs it.
            holds: of each stage, the most microbatches whose activations it holds.
        """
        rows, places, points, stages = line.rows, line.places, line.points, len(ranks)
        layers = sum(map(bool, rows.reads))
        if layers < stages:
            raise PlanError(
                f"{stages} stages are more than the {layers} operators with parameters that the call runs: use fewer "
                "ranks on the pipeline's axis, or fewer stages per rank"
            )
        used = sums_before(np.array([bool(reads) for reads in rows.reads], dtype=float), places)
        spans = np.where(used[None, :] > used[:, None], 0.0, np.inf)  # by begin and end, as all tables below
        passing = np.where((places > 0) & (places < len(rows.nodes)), 2 * rows.crossing[places], 0.0)

        def costs(limit: float) -> list[Array]:
            """What each stage costs from each place to each, in a part of its rank's memory; stages that cost the same
            have one table."""
            by_flight: dict[float, Array] = {}  # by how many microbatches are in flight
            tables: dict[tuple[float, bool, bool], Array] = {}
            each = []
            for stage in range(stages):
                # Stages of a rank share its memory: each has as much of it as if they were equal.
                held = float(np.mean([holds[s] for s in range(stages) if ranks[s] == ranks[stage]]))
                held = held if limit < math.inf else 0.0  # nothing runs again, whatever is in flight
                enters = stage > 0 and ranks[stage - 1] != ranks[stage]
                leaves = stage < stages - 1 and ranks[stage + 1] != ranks[stage]
                if (held, enters, leaves) not in tables:
                    if held not in by_flight:
                        by_flight[held] = spans + seconds_within(points, limit, held, stages // self.ranks)
                    cost = by_flight[held]
                    cost = cost + passing[:, None] if enters else cost
                    tables[held, enters, leaves] = cost + passing[None, :] if leaves else cost
                each.append(tables[held, enters, leaves])
            return each

        cuts = most_even(costs(math.inf))
        if cuts is None:
            raise PlanError(f"the model cannot be cut into {stages} stages that all have parameters")

        def needs(cuts: Sequence[int]) -> float:
            """The bytes of the rank that needs most where nothing runs again."""
            memory, moment = np.zeros(self.ranks), np.zeros(self.ranks)
            for stage, span in enumerate(itertools.pairwise([0, *cuts, len(places) - 1])):
                rank, once = ranks[stage], points[0]
                memory[rank] += once.resting[span] + holds[stage] * once.activations[span]
                moment[rank] = max(moment[rank], once.moment[span])
            return float((memory + moment).max())

        if self.memory_limit is not None and needs(cuts) > self.memory_limit:
            cuts = most_even(costs(self.memory_limit)) or cuts
        return [int(places[i]) for i in cuts]

    def _places(self, rows: Rows) -> list[int]:
        """Where a stage may begin."""
        allowed = [i for i in range(1, len(rows.nodes)) if i not in self.forbidden]
        if len(allowed) <= THRESHOLDS.cut_places:
            return allowed
        groups = np.array_split(np.array(allowed), THRESHOLDS.cut_places)
        return [int(min(group, key=lambda i: rows.crossing[int(i)])) for group in groups]

    def _forbidden_cuts(self) -> set[int]:
        """Where a cut would part those that use a buffer that changes."""
        number = {node: i for i, node in enumerate(self.pricer.nodes)}
        numbers: set[int] = set()
        for node in self.captured.graph.nodes:
            if node.op == "placeholder" and self.captured.buffers.get(node.name) in self.captured.mutated:
                places = [number[user] for user in node.users if user in number]
                if places:
                    numbers |= set(range(min(places) + 1, max(places) + 1))
        return numbers


def _least_seconds(plan: PipelinePlan) -> float:
    """What no order of a pipeline's actions takes less than: a rank waits for the first microbatch to come to it, and
    where the backward is not parted others wait for its last gradients."""
    least = 0.0
    for rank in range(plan.ranks):
        stages = plan.stages_of(rank)
        busy = plan.microbatches * sum(plan.stages[s].forward + plan.stages[s].backward for s in stages)
        ahead = plan.stages[: min(stages)]
        back = 0.0 if plan.schedule in SPLIT else sum(stage.backward for stage in ahead)
        least = max(least, busy + sum(stage.forward for stage in ahead) + back)
    return least


@dataclass(frozen=True)
class _Line:
    """The operators of one count of microbatches, for pipelines of every kind.

    Attributes:
        steps: how layers save more and more.
        places: where a stage may begin or end, as numbers of rows.
    """

    rows: Rows
    steps: list[Step]
    places: npt.NDArray[np.intp]

    @cached_property
    def points(self) -> list[Point]:
        """What stages take between the places."""
        return points_of(self.rows, self.steps, self.places)


@dataclass(frozen=True)
class _Stages:
    """The operators, cut into the stages of a schedule.

    Attributes:
        spans: of each stage, the numbers of the rows with which it begins and ends.
        ranks: of each stage, the one that runs it.
        in_flight: of each stage, the most microbatches whose activations it holds.
    """

    rows: Rows
    spans: Sequence[tuple[int, int]]
    ranks: Sequence[int]
    in_flight: Sequence[int]

    @cached_property
    def resting(self) -> list[float]:
        """What each stage keeps of parameters, gradients and optimizer states."""
        homes: dict[fx.Node, int] = {}  # parameter to the rank that holds it
        resting = []
        for rank, span in zip(self.ranks, self.spans, strict=True):
            reads = {x: sizes for read in self.rows.reads[slice(*span)] for x, sizes in read.items()}
            total = 0.0
            for x, (held, borrowed) in reads.items():
                total += held if x not in homes else borrowed if homes[x] != rank else 0.0
                homes.setdefault(x, rank)
            resting.append(total)
        return resting

    def costs(self, again: Sequence[Step]) -> tuple[StageCost, ...]:
        """What every stage costs, of whose rows each runs again as the step says that its layer has come to."""
        rows, n = self.rows, len(self.rows.nodes)
        answers = np.zeros(n, dtype=int)
        for step in again:
            answers[step.begin : step.end] = step.answer
        at = answers, np.arange(n)
        backwards, all_inputs, activations = rows.backward[at], rows.inputs[at], rows.activations[at]
        costs = []
        for (begin, end), held, resting in zip(self.spans, self.in_flight, self.resting, strict=True):
            part = slice(begin, end)
            modules = [node.meta.get("module", "") for node in rows.nodes[part]]
            named = [m for m in modules if m] or [rows.nodes[begin].name]
            forward, backward = float(rows.forward[part].sum()), float(backwards[part].sum())
            inputs = float(all_inputs[part].sum()) / backward if backward else 0.5
            entering = float(rows.entering[begin]) if begin and answers[begin] else 0.0
            memory = resting + held * (float(activations[part].sum()) + entering)
            largest = max([0.0, *(step.spared for step in again if begin <= step.begin < end)])
            moment = float(rows.moment[part].max(initial=0.0)) + largest
            passing = float(rows.crossing[end]) if end < n else 0.0
            costs.append(StageCost(named[0], named[-1], forward, backward, memory, held, inputs, moment, passing))
        return tuple(costs)
