"""What another decision would have cost: one more search, and one more prediction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autoparallel.decisions.decisions import Decisions
from autoparallel.decisions.parameters import PlanError
from autoparallel.graph.calls import Call
from autoparallel.passes.adapt_captured import pad
from autoparallel.passes.history import PassHistory
from autoparallel.plan import Plan
from autoparallel.planner.planning import Planner


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
        asked = self.planner.request
        pins = replace(asked.pins, excluded=excluded)
        planner = Planner(self.planner.model, replace(asked, plan=plan.origin, pins=pins))
        planner.reductions = {}
        captured = planner.capture(self.call, training=True)
        try:
            best = planner.search(captured, self.call)
        except PlanError:
            return None
        planner.rewrite(captured, best)
        return planner.finish(captured, best, self.call, "mesh0")[0]

    def history(self, plan: Decisions) -> str:
        """See ``Reasons.history``."""
        assert isinstance(plan, Plan)
        planner = Planner(self.planner.model, replace(self.planner.request, plan=plan))
        captured = planner.capture(self.call, training=True)
        history = PassHistory(captured.module)
        pad(captured, plan, history)
        planner.build(captured, plan, self.call, "mesh0", history)
        return str(history)


__all__ = ["PlanAgain"]
