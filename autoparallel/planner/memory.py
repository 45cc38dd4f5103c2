"""A plan that fits into the memory there is: by other layouts, or by running layers again in the backward.

[Note: what fits] The prediction says what fits.  The search adds up what is kept, simply: where less is predicted, the
search may take more than the limit, and where its plan is predicted to be over the limit, it must leave that much room.

[Note: what is recomputed] Whole layers are, the first ones: what they save lives longest.  Layouts are searched with
every layer recomputed; then as few are as the prediction says must be, and layouts are searched again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from autoparallel.decisions.parameters import PlanError
from autoparallel.plan import Plan
from autoparallel.planner.candidates import Candidate, Outcome, Proposals
from autoparallel.planner.evaluation import Evaluator
from autoparallel.planner.paddings import paddings
from autoparallel.planner.thresholds import THRESHOLDS
from autoparallel.predict.forecast import Forecast


@dataclass(frozen=True)
class Gauge:
    """Tells what plans are predicted to take.

    Attributes:
        evaluator: predicts them.
        exactly: whether from whole programs; else from short ones.
        correction: bytes by which short programs tell too little.
    """

    evaluator: Evaluator
    exactly: bool = False
    correction: float = 0.0

    def forecast(self, plan: Plan) -> Forecast:
        """What a plan takes."""
        return self.evaluator.forecast(plan, exactly=self.exactly)

    def memory(self, plan: Plan) -> float:
        """Bytes per device."""
        forecast = self.forecast(plan)
        return forecast.memory + (0.0 if forecast.whole else self.correction)

    def difference(self, plan: Plan) -> float:
        """By how much more is predicted than the search has added up."""
        assert plan.estimate is not None
        return self.memory(plan) - plan.estimate.memory


def within(candidate: Candidate, evaluator: Evaluator) -> Proposals:
    """The plan that is predicted to be fastest of those that fit exactly into a candidate's limit, if it has one."""
    limit = candidate.limit
    if limit is None:
        return (yield from paddings(candidate, evaluator))
    gauge = Gauge(evaluator)
    for _ in range(THRESHOLDS.corrections):
        outcome = yield from _fastest(candidate, limit, gauge)
        if outcome.plan is None:
            # Without a correction: the maximum of what grows with the layers is convex, the whole needs more, not less.
            if not gauge.correction:
                return outcome
            break
        forecast, whole = gauge.forecast(outcome.plan), evaluator.forecast(outcome.plan, exactly=True)
        if whole.memory <= limit:
            return replace(outcome, forecast=whole)
        gauge = replace(gauge, correction=max(gauge.correction, whole.memory - forecast.memory))
    outcome = yield from _fastest(candidate, limit, gauge := Gauge(evaluator, exactly=True))
    return outcome if outcome.plan is None else replace(outcome, forecast=gauge.forecast(outcome.plan))


def _fastest(candidate: Candidate, limit: float, gauge: Gauge) -> Proposals:
    """The plan that is predicted to be fastest of those that a gauge says to fit."""
    free = yield from paddings(replace(candidate, limit=None), gauge.evaluator)
    if free.plan is None or gauge.memory(free.plan) <= limit:
        return free
    outcomes = [(yield from _with_room(candidate, limit, gauge, min(0.0, gauge.difference(free.plan))))]
    if layers := gauge.evaluator.layers:
        outcomes.append((yield from _with_few_layers(replace(candidate, recompute=layers), limit, gauge)))
    if all(outcome.plan is None for outcome in outcomes):
        problems = [str(outcome.error) for outcome in outcomes]
        problems[1:] = [f"with every layer recomputed in the backward, {problem}" for problem in problems[1:]]
        return Outcome(candidate, error=PlanError("; ".join(problems)))
    fits = [(gauge.forecast(outcome.plan).seconds, outcome) for outcome in outcomes if outcome.plan is not None]
    _, fastest = min(fits, key=lambda pair: pair[0])
    return replace(fastest, plan=replace(fastest.require(), lower_bound=free.plan.lower_bound))


def _with_room(candidate: Candidate, limit: float, gauge: Gauge, room: float) -> Proposals:
    """A candidate that leaves more room, or less, until its plan is predicted to fit (see [Note: what fits])."""
    least, over, infeasible = math.inf, 0.0, math.inf
    for i in range(THRESHOLDS.rooms):
        outcome = yield from paddings(replace(candidate, room=room), gauge.evaluator)
        if outcome.plan is None:
            if least == math.inf:
                return outcome
            infeasible = room
        else:
            memory, estimate = gauge.memory(outcome.plan), outcome.plan.estimate
            if memory <= limit:
                return outcome
            assert estimate is not None
            # Less room than the plan leaves would find the same plan.
            least, over = min(least, memory), max(room, limit - estimate.memory)
        room = over + (least - limit) * 2**i if infeasible == math.inf else (over + infeasible) / 2
    message = (
        f"no plan was found that fits in {limit / 1e6:.1f} MB per device; the smallest needs {least / 1e6:.1f} MB: "
        "raise memory_limit, or use a larger mesh or a smaller batch"
    )
    return Outcome(candidate, error=PlanError(message))


def _with_few_layers(candidate: Candidate, limit: float, gauge: Gauge) -> Proposals:
    """A candidate that recomputes every layer, then only as few as must be (see [Note: what is recomputed])."""
    every = yield from _with_room(candidate, limit, gauge, 0.0)
    if every.plan is None:
        return every
    few, many = 0, len(candidate.recompute)
    plans = [replace(every.plan, recompute=candidate.recompute[:count], cost=None) for count in range(many)]
    plans.append(every.plan)
    if gauge.memory(plans[few]) <= limit:
        return replace(every, plan=plans[few])
    while many - few > 1:
        most, least = gauge.memory(plans[few]), gauge.memory(plans[many])
        guess = few + math.ceil((many - few) * (most - limit) / max(most - least, 1.0))
        guess = min(max(guess, few + 1), many - 1)
        few, many = (few, guess) if gauge.memory(plans[guess]) <= limit else (guess, many)
    plan = plans[many]
    again = replace(candidate, recompute=plan.recompute, room=gauge.difference(plan))
    outcome = yield from paddings(again, gauge.evaluator)
    # The layouts that were searched with every layer recomputed may be the only ones that fit.
    fits = outcome.plan is not None and gauge.memory(outcome.plan) <= limit
    return outcome if fits else replace(every, plan=plan)


__all__ = ["within"]
