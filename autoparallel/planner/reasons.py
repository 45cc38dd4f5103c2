"""What another decision would have cost: one more search, and one more prediction."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from autoparallel.decisions.decisions import Decisions
from autoparallel.decisions.parameters import PlanError
from autoparallel.graph.calls import Call
from autoparallel.graph.captured import Captured
from autoparallel.passes.adapt_captured import pad
from autoparallel.passes.history import PassHistory
from autoparallel.plan import Plan
from autoparallel.planner.draft import draft_captured
from autoparallel.planner.planner import Planner
from autoparallel.planner.programs import adapt, build


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
        with suppress(PlanError):
            return draft_captured(Planner(self.planner.model, request), self._graph.copy(), self.call).plan
        return None

    def history(self, plan: Decisions) -> str:
        """See ``Reasons.history``."""
        assert isinstance(plan, Plan)
        captured, request = self._graph.copy(), self.planner.request
        adapt(request, captured, self.call, {}, plan.microbatches, plan.loss_chunks)
        history = PassHistory(captured.module)
        pad(captured, plan.padded, history)
        build(request, captured, plan, self.call, watch=history)
        return str(history)

    @cached_property
    def _graph(self) -> Captured:
        """The graph that is planned again, traced at the first question."""
        return self.planner.capture(self.call, training=True)
