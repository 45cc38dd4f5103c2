"""What another decision would have cost: one more search, and one more prediction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from autoparallel.decisions.decisions import Decisions
from autoparallel.decisions.parameters import PlanError
from autoparallel.decisions.prediction import LatePrediction
from autoparallel.graph.calls import Call
from autoparallel.graph.captured import Captured
from autoparallel.passes.adapt_captured import pad
from autoparallel.passes.history import PassHistory
from autoparallel.plan import Plan
from autoparallel.planner.planner import Planner
from autoparallel.planner.programs import build, prepare
from autoparallel.predict.predict import predict


@dataclass(frozen=True)
class PlanAgain:
    """What is needed to plan once more, as :class:`~autoparallel.decisions.decisions.Reasons` does.

    Attributes:
        planner: of the model.
        call: that was planned for.
    """

    planner: Planner
    call: Call

    def best_without(self, plan: Decisions, excluded: Mapping[str, frozenset[str]]) -> Plan | None:
        """See ``Reasons.best_without``."""
        original = self.planner.request
        request = replace(original, plan=plan.origin, pins=replace(original.pins, excluded=excluded))
        planner = Planner(self.planner.model, request)
        captured = self._graph.copy()
        try:
            best = planner.search(captured, self.call)
        except PlanError:
            return None
        prepare(request, captured, best, self.call)
        program = build(request, captured, best, self.call, "mesh0").programs[0]
        return best.with_prediction(LatePrediction(lambda: predict(program, best, request.profile)))

    def history(self, plan: Decisions) -> str:
        """See ``Reasons.history``."""
        assert isinstance(plan, Plan)
        captured = self._graph.copy()
        history = PassHistory(captured.module)
        pad(captured, plan.padded, history)
        build(self.planner.request, captured, plan, self.call, "mesh0", history)
        return str(history)

    @cached_property
    def _graph(self) -> Captured:
        """The graph that is planned again, traced at the first question."""
        return self.planner.capture(self.call, training=True)
