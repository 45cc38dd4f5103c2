"""What candidates are worth: the plan of each, by one search of layouts, and what a plan is predicted to take."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Hashable
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch import fx

from autoparallel.decisions.decisions import FULL
from autoparallel.decisions.frontier import Frontier, Tried, frontier_of
from autoparallel.decisions.parameters import ParameterPlan, PlanError
from autoparallel.decisions.pipeline import Pipeline
from autoparallel.decisions.prediction import Prediction
from autoparallel.graph.calls import Call, micro_specs, sizes_of
from autoparallel.graph.captured import Captured, InputSpec
from autoparallel.passes.chunk_loss import chunkable
from autoparallel.passes.cut_stages import staged_nodes
from autoparallel.passes.recompute_layers import checkpointed_layers, find_layers
from autoparallel.placements import Invariant
from autoparallel.plan import Plan
from autoparallel.planner.candidates.candidates import Candidate, Outcome, Proposals
from autoparallel.planner.fits import differing, require_chunkable, returns_loss_alone
from autoparallel.planner.layouts import cheapest
from autoparallel.planner.programs import adapt, build
from autoparallel.planner.request.presets import possible_presets
from autoparallel.planner.request.request import UNSETTLED, Request, Settled
from autoparallel.planner.space.interleaving import why_whole
from autoparallel.planner.space.problem import Problem
from autoparallel.planner.space.space import SearchSpace
from autoparallel.planner.space.subject import Subject
from autoparallel.planner.stages.stages import StagePlanner
from autoparallel.planner.thresholds import THRESHOLDS
from autoparallel.predict.forecast import Forecast, Short, extrapolated
from autoparallel.predict.optimizer import parameter_cost
from autoparallel.predict.predict import predict
from autoparallel.predict.stages import parameter_seconds
from autoparallel.program.program import LocalProgram


class Evaluator:
    """Plans candidates for one graph on one mesh, and forecasts plans; each once.

    Args:
        captured: the graph, which stays as it is.

    Attributes:
        request, call: what is planned for.
        settled: what an earlier plan of the model has settled.

    Raises:
        PlanError: where the loss cannot be cut into the chunks that are asked for.
    """

    def __init__(self, request: Request, captured: Captured, call: Call, settled: Settled = UNSETTLED) -> None:
        self.request, self.call, self.settled = request, call, settled
        self.captured = captured
        if request.stages and not captured.flows_from_loss_alone or (request.loss_chunks or 1) > 1:
            self.captured = self._adapted_graph()
            if call.trains and self.captured.objective is not None:
                require_chunkable(self.captured.graph, request.loss_chunks or 1)
        self._outcomes: dict[Candidate, Outcome] = {}
        self._graphs: dict[Hashable, Captured] = {}
        self._subjects: dict[Candidate, Subject] = {}
        self._problems: dict[Candidate, Problem] = {}
        self._forecasts: dict[tuple[Hashable, ...], tuple[Plan, Forecast]] = {}
        self._short: dict[Hashable, Short] = {}
        self._exact: list[tuple[Plan, tuple[LocalProgram, Prediction]]] = []

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """The layers that can run again in the backward."""
        return tuple(find_layers(self.captured.graph))

    @cached_property
    def checkpointed(self) -> tuple[str, ...]:
        """The layers that run again in any case, because the model itself asks for it."""
        return tuple(checkpointed_layers(self.captured.graph))

    def recomputes(self, plan: Plan) -> bool:
        """Whether layers run again in a plan's backward that need not."""
        return not plan.recompute.keys() <= {*self.checkpointed}

    @cached_property
    def pipeline(self) -> Pipeline:
        """What is fixed of the pipeline, by the request or by an earlier plan."""
        settled = self.settled.pipeline
        if settled is None:
            return self.request.pipeline or Pipeline()
        places = {node.meta["key"]: place for place, node in enumerate(staged_nodes(self.captured))}
        begins = [places.get(cut, -1) for cut in settled.cuts]
        cuts = settled.cuts if -1 not in begins and begins == sorted(begins) else None
        return Pipeline(settled.schedule, settled.microbatches, settled.count // settled.ranks, cuts)

    @property
    def offloads(self) -> bool | None:
        """Whether the optimizer's states lie in host memory; None where that is open."""
        request = self.request
        choice = self.settled.offload_optimizer if self.settled.at_rest is not None else request.offload_optimizer
        may = request.memory_limit is not None and request.profile.host_bandwidth is not None
        return choice if choice is not None or may else False

    @cached_property
    def states(self) -> float:
        """Bytes of a rank's share of the optimizer's states."""
        captured, sizes, profile = self.captured, self.request.sizes, self.request.profile
        whole = (Invariant,) * len(sizes)
        costs = [parameter_cost(captured, node, whole, sizes, profile) for node in captured.parameter_nodes]
        return sum(cost.states for cost in costs) / math.prod(sizes)

    def closed_means(self, plan: Plan) -> list[str]:
        """The options that would save memory beside what a plan does, were outputs beside the loss given up."""
        request, captured = self.request, self.captured
        if request.outputs != "auto" or not self.call.trains:
            return []
        means = []
        if plan.loss_chunks == 1 and chunkable(self._adapted_graph(loss_chunks=2).graph):
            means.append(f"loss_chunks={THRESHOLDS.loss_chunks}")
        may_cut = request.microbatches is None and not request.stages and not differing(captured, self.call, 2)
        if plan.microbatches == 1 and may_cut and not returns_loss_alone(captured, request.outputs):
            means.append("microbatches=2 (or more)")
        return means

    def presets(self, thorough: bool) -> list[str]:
        """Whose layouts are looked at: what is asked for, and beside "auto" every preset that the mesh has axes for."""
        request = self.request
        if not thorough or request.plan != "auto" or self.settled.at_rest is not None:
            return [request.origin]
        return [*possible_presets(request.names)]

    def about(self, plan: str) -> Evaluator:
        """The evaluator of the same request for another preset; both share what they find out."""
        other = copy.copy(self)
        other.request = replace(self.request, plan=plan)
        return other

    # -- plans ------------------------------------------------------------------------------------------------------

    def best(self, proposals: Proposals) -> Outcome:
        """What a generator chooses among its candidates, each of which is planned, once, before it proposes the next.

        A candidate with a cut must have been proposed without it before.
        """
        outcome: Any = None  # what starts a generator
        while True:
            try:
                candidate = proposals.send(outcome)
            except StopIteration as end:
                return end.value
            if candidate not in self._outcomes:
                try:
                    if candidate.cut is not None:
                        outcome = self._cut(candidate)
                    else:
                        if (problem := self._problems.get(candidate.unlimited)) is None:
                            subject = self._subject(candidate)
                            self._require_open_batch(subject, candidate.preset)
                            inputs = subject.captured.input_layouts(self.call.specs, self.call.layouts)
                            space = SearchSpace(subject, candidate.preset, self.settled.at_rest, inputs)
                            problem = self._problems[candidate.unlimited] = Problem(space)
                        plan = cheapest(problem, candidate.limit, candidate.room, sparing=candidate.sparing)
                        outcome = self._complete(plan, problem.space, candidate)
                except PlanError as error:
                    outcome = Outcome(candidate, error=error)
                self._outcomes[candidate] = outcome
            outcome = self._outcomes[candidate]

    def resting(self, candidate: Candidate) -> float:
        """Bytes that parameters take at least, with their gradients and the optimizer's states, under a candidate that
        was planned, whatever else it does: a prediction says no less."""
        return self._problems[candidate.unlimited].resting

    def _require_open_batch(self, subject: Subject, preset: str) -> None:
        """Raises PlanError where a preset shards the batch, and it is fixed; one row is no rank's part."""
        graph = subject.captured
        fixed = not graph.batches and not any("batch_factors" in node.meta for node in graph.graph.nodes)
        is_cut = self.call.batch > 1 and any(isinstance(s, InputSpec) for s in self.call.specs)
        if is_cut and fixed and self.request.constraints(preset).data:
            raise PlanError(
                f"the plan {preset!r} shards the batch, but the batch size is fixed at {self.call.batch}: "
                f"{graph.why_fixed}; or use plan='auto', which needs no open batch"
            )

    def _subject(self, candidate: Candidate) -> Subject:
        """What a candidate is about; presets have the same."""
        key = replace(candidate.unlimited, preset="")
        if key not in self._subjects:
            graph = self._graph(candidate)
            may_recompute = self.layers if candidate.may_recompute else self.checkpointed
            chunks = self._loss_chunks(candidate, graph.graph)
            self._subjects[key] = Subject(
                graph, self.request, may_recompute, candidate.microbatches, chunks, candidate.offloads
            )
        return self._subjects[key]

    def _loss_chunks(self, candidate: Candidate, graph: fx.Graph) -> int:
        return self.request.loss_chunks or candidate.loss_chunks if chunkable(graph) else 1

    def _complete(self, plan: Plan, space: SearchSpace, candidate: Candidate) -> Outcome:
        """The plan of a step, with what the space does not choose, and with notes."""
        request, padding = self.request, dict(candidate.padding)
        cutting = space.constraints.tensor or (
            {*range(len(request.axes))} - space.constraints.data - space.constraints.sequence
        )
        axes = [request.axes[a] for a in sorted(cutting) if request.sizes[a] > 1]
        if space.pins.freed:
            warnings.warn(
                f"{len(space.pins.freed)} decisions of the pinned plan are not possible any more and were searched "
                f"again: {', '.join(space.pins.freed[:5])}",
                stacklevel=2,
            )
        count = 1 if request.stages else candidate.microbatches
        parameters = plan.parameters
        if padding:
            parameters = {name: replace(p, rows=padding.get(name)) for name, p in parameters.items()}
        if count > 1:
            parameters = {name: replace(p, reduce=_reduction(p)) for name, p in parameters.items()}
        plan = replace(
            plan,
            parameters=parameters,
            microbatches=count,
            loss_chunks=self._loss_chunks(candidate, space.captured.graph),
            linear_chunks=request.linear_chunks or plan.linear_chunks,
            offload_optimizer=candidate.offloads,
            checkpointed=self.checkpointed,
            notes=why_whole(space.captured.graph, axes, space.size.shape),
        )
        plan = _plan_of_a_step(plan, count)
        assert plan.cost is not None
        return Outcome(candidate, plan, seconds=plan.cost)

    def _graph(self, candidate: Candidate) -> Captured:
        """The graph that a candidate is about: with padded vocabularies and, for a pipeline, a microbatch's sizes."""
        key = candidate.padding, candidate.microbatches
        if key not in self._graphs:
            cut = candidate.microbatches > 1 and not self.request.stages
            graph = self.captured
            if candidate.padding or cut:
                graph = self._adapted_graph(candidate.padding, candidate.microbatches)
            if self.request.stages or cut:
                graph = replace(graph, actual=sizes_of(graph, micro_specs(self.call.specs, candidate.microbatches)))
            self._graphs[key] = graph
        return self._graphs[key]

    def _adapted_graph(
        self, padding: tuple[tuple[str, int], ...] = (), microbatches: int = 1, loss_chunks: int | None = None
    ) -> Captured:
        """A copy of the graph, as a plan with such decisions is about it."""
        graph = self.captured.copy()
        loss_chunks = loss_chunks or self.request.loss_chunks or 1
        adapt(self.request, graph, self.call, dict(padding), microbatches, loss_chunks)
        return graph

    def _cut(self, candidate: Candidate) -> Outcome:
        """The layouts of a candidate, cut into stages."""
        assert candidate.cut is not None
        whole, settled = replace(candidate, cut=None), self.settled
        plan = _plan_of_a_step(self._outcomes[whole].require(), candidate.microbatches)
        subject = self._subject(replace(whole, may_recompute=self.request.memory_limit is not None))
        planner = StagePlanner(subject, plan)
        if settled.pipeline is None:
            pipeline = planner.choose(candidate.cut, self.pipeline)
            again = planner.recompute
        else:
            pipeline = planner.settled(self.pipeline)
            again = {layer: much for layer, much in settled.recompute.items() if layer in self.layers}
        plan = replace(plan, pipeline=pipeline, recompute={**again, **dict.fromkeys(self.checkpointed, FULL)})
        return Outcome(candidate, plan, seconds=pipeline.seconds + max(parameter_seconds(subject.captured, plan)))

    # -- forecasts --------------------------------------------------------------------------------------------------

    def forecast(self, plan: Plan, *, exactly: bool = False) -> Forecast:
        """What a plan takes; unless exactly, from short models, where layers repeat."""
        # Plans that differ in what they recompute share their operators, which the table keeps alive.
        key = id(plan.operators), tuple(plan.recompute.items()), plan.means, exactly
        graph = self._graph(Candidate(plan.origin, microbatches=plan.microbatches))
        if key not in self._forecasts:
            if exactly:
                program, prediction = self.predict_program(graph.copy(), plan)
                self._exact.append((plan, (program, prediction)))
                forecast = Forecast.of(prediction)
            else:
                short = extrapolated(
                    graph, plan, lambda *about: self.predict_program(*about, parts=False)[1], self._short
                )
                forecast = short or self.forecast(plan, exactly=True)
            self._forecasts[key] = plan, forecast
        return self._forecasts[key][1]

    def predicted(self, plan: Plan) -> tuple[LocalProgram, Prediction] | None:
        """The whole program of a plan, unchecked, and what it was predicted to cost; None where that was not asked."""
        return next((row for other, row in self._exact if replace(other, origin=plan.origin) == plan), None)

    def frontier(self, chosen: Plan) -> Frontier | None:
        """What the plans take that were forecast, or cut into stages; None where there were none."""
        plans: dict[Hashable, tuple[Plan, float, float]] = {}
        for (*key, exactly), (plan, forecast) in self._forecasts.items():
            if exactly or (*key,) not in plans:  # what the whole program told goes before what short ones did
                plans[(*key,)] = plan, forecast.seconds, forecast.memory
        for outcome in self._outcomes.values():
            if outcome.plan is not None and outcome.plan.pipeline is not None:
                memory = max(outcome.plan.pipeline.memory_by_rank())
                plans[id(outcome)] = outcome.plan, outcome.seconds, memory
        first: list[Tried] = []
        tried: list[Tried] = []
        for plan, seconds, memory in plans.values():
            is_chosen = not first and plan == replace(chosen, origin=plan.origin)
            (first if is_chosen else tried).append(plan.tried(seconds, memory))
        return frontier_of([*first, *tried], self.request.memory_limit) if tried or first else None

    def predict_program(self, graph: Captured, plan: Plan, *, parts: bool = True) -> tuple[LocalProgram, Prediction]:
        """The program that a plan makes of a graph, which is used up, unchecked, and what it is predicted to cost;
        ``parts`` as ``predict`` takes it."""
        program = build(self.request, graph, plan, self.call, checked=False).programs[0]
        return program, predict(program, plan, self.request.profile, parts=parts)


def _reduction(parameter: ParameterPlan) -> str:
    """When gradients of microbatches are reduced: what is not kept whole leaves no whole gradient either."""
    return "across_replicas_per_step" if parameter.gather == "per_use" else parameter.reduce


def _plan_of_a_step(plan: Plan, microbatches: int) -> Plan:
    """The plan with what the search added up for one microbatch, and its share of a step, as that of the step."""
    assert plan.cost is not None and plan.lower_bound is not None and plan.estimate is not None
    parameters = {name: seconds * microbatches for name, seconds in plan.estimate.parameters.items()}
    return replace(
        plan,
        cost=plan.cost * microbatches,
        lower_bound=plan.lower_bound * microbatches,
        estimate=replace(plan.estimate, parameters=parameters),
    )
