"""Planning a pipeline, its stages as local programs, and this rank's part of them at run time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from autoparallel.comm.world import PIPELINE_AXIS
from autoparallel.decisions.parameters import ParameterPlan, PlanError
from autoparallel.decisions.pipeline import Pipeline, PipelinePlan
from autoparallel.graph.calls import Call, micro_specs, sizes_of
from autoparallel.graph.captured import Captured, InputSpec
from autoparallel.passes.adapt_captured import leave_only_loss
from autoparallel.passes.cut_stages import staged_nodes
from autoparallel.passes.recompute_layers import find_layers
from autoparallel.pipeline.schedules import SPLIT
from autoparallel.plan import Plan
from autoparallel.planner.planning import Draft, Planner, Request, Told
from autoparallel.planner.problem import Schedule
from autoparallel.planner.stages import StagePlanner, microbatch_counts
from autoparallel.predict.pipeline_traffic import pipeline_traffic
from autoparallel.predict.stages import parameter_seconds, predict_stages
from autoparallel.program import StagedProgram, build_stages, find_owners

WORTHWHILE = 0.1
"""The part of a schedule in which ranks wait from which on more microbatches are tried, beyond the usual."""


STAGE_PRESETS = ("data_parallel", "fsdp", "tensor_parallel")
"""The presets that "auto" looks at, too."""

FAR = 1.25
"""How much more than a known step takes its ranks may have to do, in the largest number of microbatches, to be cut."""

HOPELESS = 2.0
"""How many times the limit the search may add up for layouts that are cut into stages all the same."""


@dataclass(frozen=True)
class _Attempt:
    """A pipeline that fits, how long its step takes, the numbers of microbatches tried, and the graph it is about."""

    seconds: float
    counts: Sequence[int]
    plan: Plan
    cut: PipelinePlan
    captured: Captured


def _or_none(attempt: Callable[[], _Attempt], problems: list[str]) -> _Attempt | None:
    try:
        return attempt()
    except PlanError as error:
        problems.append(str(error))
        return None


class StagedPlanner(Planner):
    """Plans layouts for one microbatch on the mesh's other axes, then the cuts under them.

    Args:
        ranks: of the pipeline's axis; ``request`` is about the others.
        pipeline: what is fixed of the pipeline.

    Attributes:
        stages, recompute: the pipeline of the first kind of call, and the layers that run again in its backward; all
            others have the same, as far as they can.
    """

    def __init__(self, model: nn.Module, request: Request, ranks: int, pipeline: Pipeline) -> None:
        super().__init__(model, replace(request, memory_limit=None))
        self.memory_limit, self.ranks, self.pipeline = request.memory_limit, ranks, pipeline
        self.stages: PipelinePlan | None = None
        self.recompute: tuple[str, ...] = ()

    def prepare(self, captured: Captured, plan: Plan) -> None:
        """See ``Planner.prepare``; a pipeline differentiates its loss only."""
        leave_only_loss(captured)
        super().prepare(captured, plan)

    def search(self, captured: Captured, call: Call, at_rest: Mapping[str, ParameterPlan] | None = None) -> Plan:
        """The plan that the search chooses (see ``Planner.search``)."""
        leave_only_loss(captured)
        known, pipeline = self.stages, self.pipeline
        if known is not None:
            keys = {node.meta["key"] for node in staged_nodes(captured)}
            cuts = known.cuts if keys.issuperset(known.cuts) else None
            pipeline = Pipeline(known.schedule, known.microbatches, known.count // known.ranks, cuts)
            tries = [[_count(known, captured, call)]]
        else:
            tries = [microbatch_counts(call.batch, self.ranks, pipeline)]
            if self.memory_limit is not None and pipeline.microbatches is None:  # the more, the less is in flight
                tries += [[m] for m in _multiples(tries[0][0], call.batch)]
        if not captured.actual and max(tries[0]) > 1 and any(isinstance(s, InputSpec) for s in call.specs):
            raise PlanError(
                f"the model fixes the batch size at {call.batch}, so that it cannot be cut into microbatches: use "
                "x.shape[0] instead of a number"
            )
        attempt = partial(self._attempt, captured, call, at_rest, pipeline)
        best: _Attempt | None = None
        problems: list[str] = []
        for counts in tries:
            found: _Attempt | None = None
            # The fastest layouts where stages of them fit: what the search adds up for a stage is more than it takes.
            for limit in dict.fromkeys([None, self.memory_limit]):
                if found is None:
                    found = _or_none(partial(attempt, counts, limit), problems if limit == self.memory_limit else [])
            if found is None:
                continue
            if best is not None and found.seconds >= best.seconds:
                break
            best = found
            if found.cut.bubble < WORTHWHILE and not found.plan.recompute:
                break
        if best is None and self.memory_limit is not None:
            # With every layer recomputed something may fit; else the stages say which of them does not.
            if layers := [] if self.request.hoist_all else find_layers(captured.graph):
                best = _or_none(partial(attempt, tries[0], self.memory_limit, layers), problems)
            if best is None:
                best = _or_none(partial(attempt, tries[-1], None, named=True), problems)
        if best is None:
            raise PlanError("; ".join(dict.fromkeys([problems[-1], problems[0]])))
        if self.thorough and self.request.plan == "auto" and at_rest is None and known is None:
            # The search minimises what all ranks do; the slowest of them may have less to do under a preset.
            for preset in STAGE_PRESETS:
                free = partial(attempt, best.counts, None, origin=preset, below=best.seconds)
                found = _or_none(free, [])
                if found is not None and found.seconds < best.seconds:
                    best = replace(found, plan=replace(found.plan, origin="auto"))
        captured.module, captured.actual = best.captured.module, best.captured.actual
        return best.plan

    def _attempt(
        self,
        captured: Captured,
        call: Call,
        at_rest: Mapping[str, ParameterPlan] | None,
        pipeline: Pipeline,
        counts: Sequence[int],
        limit: float | None,
        layers: Sequence[str] = (),
        *,
        named: bool = False,
        origin: str | None = None,
        below: float = math.inf,
    ) -> _Attempt:
        """The best pipeline of so many microbatches, of layouts that are searched within a limit.

        Args:
            layers: are recomputed.
            named: whether stages are cut whatever they need, so that an error names the one that needs too much.
            origin: the preset; that which is asked for unless told.
            below: a step of this many seconds is known, slower ones are of no use.

        Raises:
            PlanError: where nothing fits.
        """
        graph = captured.copy()
        graph.actual = sizes_of(captured, micro_specs(call.specs, counts[0]))
        self.schedule = Schedule(counts[0], self.ranks)
        plan = self._search(graph, call, origin or self.request.origin, at_rest, limit, layers)
        free = limit is None and self.memory_limit is not None and not named
        if free and plan.estimate is not None and plan.estimate.memory > HOPELESS * self.memory_limit:  # type: ignore[operator]
            raise PlanError(f"the fastest layouts need {plan.estimate.memory / 1e6:.1f} MB per device")
        plan = _of_a_step(plan, counts[0])
        if plan.cost is not None and plan.cost / self.ranks >= FAR * below:
            raise PlanError("the ranks have far more to do than those of the pipeline that is known")
        self.rewrite(graph, plan)
        planner = self._cut(graph, plan)
        planner.may_recompute = planner.may_recompute and not free
        cut = planner.choose(counts, pipeline, checked=self.stages is None)
        again = planner.recompute if self.stages is None else self._recomputed(graph)
        plan = replace(plan, pipeline=cut, recompute=again)
        return _Attempt(cut.seconds + max(parameter_seconds(graph, plan)), counts, plan, cut, graph)

    def _cut(self, captured: Captured, plan: Plan) -> StagePlanner:
        profile, limit = self.request.profile, self.memory_limit
        planner = StagePlanner(captured, plan, profile, self.redistributor, PIPELINE_AXIS, self.ranks, limit)
        planner.may_split = planner.may_recompute = not self.request.hoist_all
        return planner

    def _recomputed(self, captured: Captured) -> tuple[str, ...]:
        """Those of the known layers that run again which a call has, too."""
        layers = {*find_layers(captured.graph)} if self.recompute else set()
        return tuple(layer for layer in self.recompute if layer in layers)

    def build_stages(self, captured: Captured, plan: Plan, call: Call, prefix: str) -> StagedProgram:
        """The local program of every stage, the same on all ranks."""
        request = self.request
        assert plan.pipeline is not None
        if plan.pipeline.schedule in SPLIT and request.hoist_all:
            raise PlanError(
                f"the schedule {plan.pipeline.schedule!r} parts the backward of a stage, which backend='inductor' does "
                "not: use '1f1b' or 'interleaved_1f1b', or backend='eager'"
            )
        captured.actual = sizes_of(captured, micro_specs(call.specs, _count(plan.pipeline, captured, call)))
        return build_stages(
            captured,
            plan,
            prefix=prefix,
            redistributor=self.redistributor,
            outputs=request.outputs,
            device=torch.device(request.device),
            hoist_all=request.hoist_all,
            reduce_dtype=request.precision.reduce_dtype if request.precision is not None else None,
            node=request.profile.node,
            training=call.training[0] if call.training else True,
        )

    def with_traffic(self, staged: StagedProgram, plan: Plan, call: Call, owners: Mapping[str, int]) -> Plan:
        """The plan with what its stages send in a call that is differentiated."""
        traffic = pipeline_traffic(staged, plan, call, self.request.profile, owners, self.redistributor)
        return replace(plan, pipeline=replace(staged.plan, traffic=traffic))


def draft_stages(planner: StagedPlanner, captured: Captured, call: Call, told: Told = lambda phase: None) -> Draft:
    """Plans one call of a model in training as a pipeline, without ranks, with what a step is predicted to cost.

    Args:
        captured: the graph of the call; it is used up.
        told: is told each phase as it begins.

    Raises:
        PlanError: when the model cannot be planned so.
    """
    told("search")
    requested = planner.request.plan
    if isinstance(requested, Plan):
        if requested.pipeline is None or requested.pipeline.ranks != planner.ranks:
            raise PlanError(f"the plan is not for a pipeline over {planner.ranks} ranks: plan again")
        plan = requested
        planner.prepare(captured, plan)
        captured.actual = sizes_of(captured, micro_specs(call.specs, _count(requested.pipeline, captured, call)))
    else:
        plan = planner.search(captured, call)
    told("predict")
    predicted = predict_stages(captured, plan, planner.request.profile)
    staged = planner.build_stages(captured, plan, call, "mesh0")
    plan = planner.with_traffic(staged, plan, call, find_owners(staged, plan.parameters))
    assert plan.pipeline is not None and plan.pipeline.traffic is not None
    sent = plan.pipeline.traffic
    busiest = max(range(planner.ranks), key=lambda rank: (sent.calls[rank] + sent.gradients[rank]).total_bytes)
    predicted = replace(predicted, forward=sent.calls[busiest], gradients=sent.gradients[busiest])
    return Draft(plan, None, predicted)


def _of_a_step(plan: Plan, microbatches: int) -> Plan:
    """The plan with what the search added up for one microbatch, and its share of a step, as that of the step."""
    assert plan.cost is not None and plan.lower_bound is not None and plan.estimate is not None
    parameters = {name: seconds * microbatches for name, seconds in plan.estimate.parameters.items()}
    return replace(
        plan,
        cost=plan.cost * microbatches,
        lower_bound=plan.lower_bound * microbatches,
        estimate=replace(plan.estimate, parameters=parameters),
    )


def _multiples(count: int, batch: int) -> list[int]:
    """Twice a number of microbatches, four times and so on, as far as the batch can be cut so."""
    found = []
    while batch % (count := 2 * count) == 0:
        found.append(count)
    return found


def _count(pipeline: PipelinePlan, captured: Captured, call: Call) -> int:
    """How many microbatches a call has, or at least may have."""
    return pipeline.microbatches if captured.objective is not None else math.gcd(pipeline.microbatches, call.batch)


__all__ = ["StagedPlanner", "draft_stages"]
