"""The planner of one model: from a call to a graph, a plan, and a rank's program with its prediction.

Nothing here needs a process group, a device, or a parameter's memory, so it plans for any number of devices on a
laptop.  ``compile()`` uses it on every rank, and ``python -m autoparallel plan`` on none (see ``draft``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from autoparallel.capture.capture import capture
from autoparallel.capture.settings import CaptureSettings
from autoparallel.decisions.parameters import PlanError
from autoparallel.decisions.prediction import LatePrediction, Prediction
from autoparallel.graph.calls import Call
from autoparallel.graph.captured import Captured
from autoparallel.graph.surroundings import surroundings_of
from autoparallel.passes.mark_batch import mark_batch, mark_batch_behind_time
from autoparallel.passes.sort_calls import sort_calls
from autoparallel.plan import Plan
from autoparallel.planner.candidates.evaluation import Evaluator
from autoparallel.planner.candidates.proposals import proposals
from autoparallel.planner.plan_cache import PlanCache
from autoparallel.planner.programs import build, prepare
from autoparallel.planner.request.request import UNSETTLED, Request, Settled
from autoparallel.predict.pipeline_traffic import pipeline_traffic
from autoparallel.predict.predict import predict
from autoparallel.predict.reductions import choose_reductions, with_reductions
from autoparallel.program.program import LocalProgram
from autoparallel.program.stages import StagedProgram, find_owners
from autoparallel.text import LOGGER


class Planner:
    """Captures, searches and finishes for one model; keeps what must be the same for all of its calls.

    Args:
        cache: of plans that were searched before.

    Attributes:
        surroundings: the variables around the model that its calls change.
        sorts_calls: whether the calls of graphs are sorted, because ranks have traced them in other orders.
    """

    def __init__(self, model: nn.Module, request: Request, cache: PlanCache | None = None) -> None:
        self.model, self.request, self.cache = model, request, cache or PlanCache()
        self.surroundings = surroundings_of(model)
        self.sorts_calls = False
        self._predicted: tuple[Plan, tuple[Any, ...], tuple[LocalProgram, Prediction] | None] | None = None
        # When the gradient of each parameter is reduced; within a limit that is chosen on the first program that
        # trains, for all kinds of calls, and None before.
        self._reductions: Mapping[str, str] | None = None
        if isinstance(request.plan, Plan):
            self._reductions = {name: p.reduce for name, p in request.plan.parameters.items()}
        elif request.memory_limit is None or request.stages:
            self._reductions = {}

    def capture(self, call: Call, training: bool | None = None) -> Captured:
        """The forward graph of a call; a batch that the model fixes is marked in it."""
        request = self.request
        settings = CaptureSettings(
            2 * math.prod(request.sizes),
            call.batch,
            loss_fn=request.loss_fn if call.with_target else None,
            training=training,
            detach_beside_loss=request.outputs == "auto",
            precision=request.precision,
            ranks=math.prod(request.sizes),
            gradients=call.gradients or training is True,
            autocast=call.autocast,
            device=request.device,
        )
        captured = capture(self.model, call.specs, call.in_spec, settings, call.values)
        if not mark_batch_behind_time(captured) and not captured.batches:
            mark_batch(captured)
        return sort_calls(captured) if self.sorts_calls else captured

    def search(
        self,
        captured: Captured,
        call: Call,
        settled: Settled = UNSETTLED,
        evaluator: Evaluator | None = None,
    ) -> Plan:
        """The best plan; the graph stays as it is.

        A later kind of call that a preset does not fit is planned freely, around parameters as they lie: an uneven
        batch, or one that goes another way through the model, which the layouts were not chosen for.

        Args:
            settled: what an earlier plan of the model has settled.
            evaluator: of this request, which may know much of it already.

        Raises:
            PlanError: when no plan satisfies the constraints, the pins or the limit.
        """
        key = self.cache.key(self.request, captured, call, settled)
        cached = self.cache.get(key, partial(self._read_plan, captured, call))
        if cached is not None:
            return cached
        evaluator = evaluator or Evaluator(self.request, captured, call, settled)
        try:
            plan = evaluator.best(proposals(evaluator)).require()
        except PlanError as error:
            if settled.at_rest is None or self.request.plan == "auto":
                raise
            LOGGER.info("a kind of call is planned freely, around parameters as they lie: %s", error)
            return Planner(self.model, replace(self.request, plan="auto")).search(captured, call, settled)
        self._predicted = plan, call.specs, evaluator.predicted(plan)
        plan = replace(plan, frontier=evaluator.frontier(plan))
        self.cache.put(key, plan.to_json())
        return plan

    def _read_plan(self, captured: Captured, call: Call, text: str) -> Plan:
        """A plan that was kept, and that the graph can be prepared for."""
        plan = Plan.from_json(text)
        prepare(self.request, captured.copy(), plan, call)
        return plan

    def finish(
        self, captured: Captured, plan: Plan, call: Call, prefix: str, owners: Mapping[str, int] | None = None
    ) -> tuple[Plan, LocalProgram | StagedProgram]:
        """What a plan makes of a graph, and the plan with its prediction and with the times of reducing that fit the
        limit; that of a pipeline with what its stages send in a call that is differentiated.

        Args:
            captured: is used up.
            prefix: the name under which the mesh is bound.
            owners: in a pipeline, the rank on its axis on which each parameter lies; that of the first stage that uses
                it, unless told.
        """
        request, profile = self.request, self.request.profile
        if plan.staging is None:
            plan = with_reductions(plan, self._reductions or {})
        built = build(request, captured, plan, call, prefix)
        if isinstance(built, LocalProgram):
            _, prediction = self._prediction(plan, call) or (built, None)
            late = LatePrediction(lambda: prediction or predict(built, plan, profile))
            return self._time_reductions(plan, built, late), built
        if plan.pipeline is None:
            return plan.with_prediction(LatePrediction(lambda: predict(built.programs[0], plan, profile))), built
        if captured.objective is not None and call.is_training:
            owners = owners or find_owners(built, plan.parameters)
            traffic = pipeline_traffic(built, plan, call, profile, owners, request.redistributor)
            plan = replace(plan, pipeline=replace(built.plan, traffic=traffic))
        return plan, built

    def outlook(self, plan: Plan, call: Call) -> Plan | None:
        """A plan that the search has found for a call, as :meth:`finish` gives it, but without a program that may run;
        None where the search has not predicted the whole program."""
        plan = plan if plan.staging is not None else with_reductions(plan, self._reductions or {})
        predicted = self._prediction(plan, call)
        if predicted is None:
            return None
        built, prediction = predicted
        return self._time_reductions(plan, built, LatePrediction(lambda: prediction))

    def _time_reductions(self, plan: Plan, built: LocalProgram, late: LatePrediction) -> Plan:
        """The plan with its prediction and with the times of reducing that fit the limit, given to its program, too."""
        request, profile = self.request, self.request.profile
        if self._reductions is None and any(cost.seconds for cost in late().reductions.values()):
            assert request.memory_limit is not None
            left = request.memory_limit - late().total_memory
            self._reductions = choose_reductions(built.buckets, request.sizes, profile, left)
            chosen = with_reductions(plan, self._reductions)
            if chosen.parameters != plan.parameters:
                built.reducing(chosen)
                return chosen.with_prediction(LatePrediction(lambda: predict(built, chosen, profile)))
        return plan.with_prediction(late)

    def _prediction(self, plan: Plan, call: Call) -> tuple[LocalProgram, Prediction] | None:
        """What the search has predicted of the whole program, where the plan is the one that it found for the call."""
        row, self._predicted = self._predicted, None  # asked for once: a planner that lives on keeps no program alive
        return None if row is None or row[1] != call.specs or row[0] != plan else row[2]
