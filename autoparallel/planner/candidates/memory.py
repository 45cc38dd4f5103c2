"""A plan that fits into the memory there is: by other layouts and gathers, or by running layers again in the backward.

[Note: what fits] The prediction says what fits.  The search adds up what is kept; what lives for a moment only (the
layer that runs again, the weights that are gathered for it, the loss) is no sum, and must find room beside it.  How
much that is, the prediction of a plan tells: the search is asked again with so much room, until a plan fits and leaves
little.  What needs the least memory of all decides whether anything fits; of a preset whose parameters alone, with
their gradients and the optimizer's states, take more than the limit, nothing does.

[Note: what is recomputed] Whole layers are, which ones the search decides with the layouts: a layer that runs again has
its own best.  Of layers that are alike the first ones do, because what they save lives longest.

[Note: means that save memory] A candidate says which means it may use.  Another one becomes a field of ``Means`` and
``Candidate``, and what it does to time and memory a part of what the search adds up, or a further candidate (see
``means``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace

from autoparallel.plan import Plan
from autoparallel.planner.candidates.candidates import Candidate, Outcome, Proposals
from autoparallel.planner.candidates.evaluation import Evaluator
from autoparallel.planner.candidates.paddings import paddings
from autoparallel.planner.infeasible import nothing_fits
from autoparallel.planner.thresholds import THRESHOLDS
from autoparallel.predict.forecast import Forecast


@dataclass(frozen=True)
class Gauge:
    """Tells what plans are predicted to take.

    Attributes:
        evaluator: predicts them.
        exactly: whether from whole programs; else from short ones.
        below: seconds that a plan must stay below to be of use, because something else takes as many.
    """

    evaluator: Evaluator
    exactly: bool = False
    below: float = math.inf

    def forecast(self, plan: Plan) -> Forecast:
        """What a plan takes."""
        return self.evaluator.forecast(plan, exactly=self.exactly)

    def seconds(self, outcome: Outcome) -> float:
        """The seconds of a step of what became of a candidate that has a plan."""
        return self.forecast(outcome.require()).seconds

    def memory(self, plan: Plan) -> float:
        """Bytes per device."""
        return self.forecast(plan).memory

    def exceeds(self, plan: Plan, limit: float) -> bool:
        """Whether a plan takes too much; what adds up to far too much is not predicted."""
        assert plan.estimate is not None
        return plan.estimate.memory > THRESHOLDS.too_much * limit or self.memory(plan) > limit

    def difference(self, plan: Plan) -> float:
        """By how much more is predicted than the search has added up."""
        assert plan.estimate is not None
        return self.memory(plan) - plan.estimate.memory

    def is_late(self, outcome: Outcome) -> bool:
        """Whether a plan is too slow to be of use."""
        return math.isfinite(self.below) and self.seconds(outcome) >= self.below


def exactly(search: Callable[[Gauge], Proposals], evaluator: Evaluator, below: float = math.inf) -> Proposals:
    """What a search finds by short programs, if the whole program fits into the limit; else what it finds by whole
    programs. What takes ``below`` seconds is of no use."""
    gauge = Gauge(evaluator, below=below)
    outcome, limit = (yield from search(gauge)), evaluator.request.memory_limit
    if limit is None or outcome.plan is None or gauge.is_late(outcome):
        return outcome
    if evaluator.forecast(outcome.plan, exactly=True).memory <= limit:
        return outcome
    return (yield from search(replace(gauge, exactly=True)))


def fastest(candidates: Sequence[Candidate], gauge: Gauge, incumbent: Outcome | None = None) -> Proposals:
    """The plan that a gauge says to be fastest of those that fit into the request's limit, if there is one; of plans
    that are as good, the one that the search expects most of. Where none is of use, one that is too slow, which need
    not fit.

    Args:
        candidates: what is compared; the first leaves open all that others do, so that its bound is one for all.
        incumbent: a plan that fits, of another candidate, which must be beaten.
    """
    limit = gauge.evaluator.request.memory_limit
    if limit is None and len(candidates) == 1:
        return _worth_chunks((yield from paddings(candidates[0], gauge.evaluator)), gauge, limit)
    outcomes = []  # without the limit
    for candidate in candidates:
        outcomes.append((yield from paddings(candidate, gauge.evaluator)))
    first, best = outcomes[0], incumbent
    bound = unlimited = (first.plan.lower_bound or 0.0) if first.plan is not None else 0.0
    room: float | None = None
    hopeless: list[Outcome] = []  # whose parameters alone take too much
    late: list[Outcome] = []
    sparing: list[Plan] = []  # that take the least memory, and too much
    for free in sorted(outcomes, key=_least_seconds):  # the better what is found first, the less is left to look at
        if free.plan is None or best is not None and _is_slower(free, best, gauge):
            continue
        if limit is not None and gauge.evaluator.resting(free.candidate) > limit:
            hopeless.append(free)
            continue
        outcome: Outcome | None = free
        if limit is not None and not gauge.is_late(free):
            outcome = yield from _fastest_within(free, limit, gauge, room, best)
        if outcome is None:
            continue
        plan = outcome.require()
        if free is first:
            bound = max(unlimited, plan.lower_bound or 0.0)
        if gauge.is_late(outcome):
            late.append(outcome)
            continue
        if limit is not None:
            if gauge.exceeds(plan, limit):
                sparing.append(plan)
                continue
            room = gauge.difference(plan)
        if best is None or gauge.seconds(outcome) < gauge.seconds(best):
            best = outcome
    if best is None:
        if late or not (hopeless or sparing):
            return min(late, key=gauge.seconds, default=first)
        for free in hopeless:  # one of them may still be what takes the least, of which is told
            outcome = yield replace(_with_all_means(free.candidate, gauge), sparing=True)
            sparing.append(outcome.plan or free.require())
        return _least(sparing, candidates[0], unlimited, gauge)
    if best is incumbent:
        return best
    best = _worth_chunks(best, gauge, limit)
    plan = best.require()
    if limit is not None and best.candidate.preset != candidates[0].preset:
        # A bound within a limit is about the room that is left there: that which the chosen plan needs.
        alike = yield replace(_with_all_means(first.candidate, gauge), limit=limit, room=gauge.difference(plan))
        bound = max(unlimited, (alike.plan.lower_bound or 0.0) if alike.plan is not None else 0.0)
    return replace(best, plan=replace(plan, lower_bound=min(bound, plan.cost or 0.0)))


def _least(plans: Sequence[Plan], candidate: Candidate, bound: float, gauge: Gauge) -> Outcome:
    """What becomes of a candidate where all plans were found to take more than the limit: why nothing fits; the plan
    that takes the least, where its whole program fits after all.

    Args:
        bound: seconds that no plan stays below.
    """
    limit = gauge.evaluator.request.memory_limit
    assert limit is not None
    least = min(plans, key=gauge.memory)
    forecast = gauge.evaluator.forecast(least, exactly=True)
    if forecast.memory <= limit:
        return Outcome(candidate, plan=replace(least, lower_bound=min(bound, least.cost or 0.0)))
    return Outcome(candidate, error=nothing_fits(least, limit, forecast, gauge.evaluator.closed_means(least)))


def _worth_chunks(outcome: Outcome, gauge: Gauge, limit: float | None) -> Outcome:
    """The outcome without chunks of linear layers, where the search has cut them and that is predicted to be slower."""
    plan = outcome.plan
    if plan is None or plan.linear_chunks == 1 or gauge.evaluator.request.linear_chunks is not None:
        return outcome
    whole = replace(outcome, plan=replace(plan, linear_chunks=1))
    is_faster = gauge.seconds(whole) < gauge.seconds(outcome)
    return whole if is_faster and (limit is None or gauge.memory(whole.require()) <= limit) else outcome


def _is_slower(outcome: Outcome, best: Outcome, gauge: Gauge) -> bool:
    """Whether a plan is slower than the best one by far, or as good as the same, without predicting it."""
    plan, other = outcome.plan, best.plan
    if plan is None or other is None:
        return False
    means, means_of_best = [replace(p.means, linear_chunks=1) for p in (plan, other)]
    same = means == means_of_best and (plan.operators, plan.parameters) == (other.operators, other.parameters)
    return same or _costs_more(outcome, best, gauge)


def _costs_more(outcome: Outcome, best: Outcome, gauge: Gauge) -> bool:
    """Whether a plan is slower than the best one by far, as the search adds them up."""
    plan, other = outcome.plan, best.plan
    if plan is None or other is None or plan.cost is None or plan.estimate is None or other.cost is None:
        return False
    if not gauge.evaluator.request.profile.overlap:
        return plan.cost > THRESHOLDS.nearly_equal * other.cost
    # Where sums say too much, they do so of both.
    return _least_seconds(outcome) >= max(gauge.seconds(best), other.cost)


def _least_seconds(outcome: Outcome) -> float:
    """What the search adds up, where all hides that can: what travels for parameters."""
    plan = outcome.plan
    if plan is None or plan.cost is None or plan.estimate is None:
        return math.inf
    return plan.cost - sum(plan.estimate.parameters.values())


def _fastest_within(
    free: Outcome, limit: float, gauge: Gauge, need: float | None, incumbent: Outcome | None
) -> Generator[Candidate, Outcome, Outcome | None]:
    """The fastest plan found of those that fit into a limit (see [Note: what fits]); where none does, the one that
    takes the least memory, and where none can be of use, any or none.

    Args:
        free: what becomes of a candidate without the limit.
        need: how much room another plan needs beside what the search adds up; None where none is known.
        incumbent: the best plan that fits; what takes as long without fitting takes longer if it fits.
    """
    below = gauge.below if incumbent is None else min(gauge.below, gauge.seconds(incumbent))
    assert free.plan is not None and free.plan.estimate is not None
    # What adds up to too much takes too much: that need not be predicted.
    if need is None or free.plan.estimate.memory <= limit:
        if gauge.memory(free.plan) <= limit or gauge.seconds(free) >= below:
            return free
        need = gauge.difference(free.plan)
    saving = _with_all_means(free.candidate, gauge)
    least: Outcome | None = None  # that takes the least memory
    best: Outcome | None = None
    # Too little room and by how many bytes that is over the limit, and too much of it, or more than there is.
    room, low, high = need, (-math.inf, math.inf), (math.inf, -math.inf)
    for _ in range(THRESHOLDS.rooms):
        outcome = yield replace(saving, limit=limit, room=room)
        if incumbent is not None and _costs_more(outcome, incumbent, gauge):
            return None
        if outcome.plan is None:
            high = room, -math.inf
            if least is None:
                least = yield replace(saving, sparing=True)
                if least.plan is None or gauge.exceeds(least.plan, limit):
                    break
            room = gauge.difference(least.require())
        else:
            over, difference = gauge.memory(outcome.plan) - limit, gauge.difference(outcome.plan)
            if over > 0:
                if gauge.seconds(outcome) >= below:
                    return outcome
                low, room = (room, over), max(difference, room + over)
            else:
                best = outcome if best is None else min(best, outcome, key=gauge.seconds)
                if -over < THRESHOLDS.spare * limit or difference > room - THRESHOLDS.spare * limit:
                    break
                high, room = (room, over), difference
        if math.isfinite(low[1]) and math.isfinite(high[1]):
            # Aims at a little less than the limit: layers are whole, so what just fits may not be found.
            part = (low[1] + THRESHOLDS.spare * limit / 2) / (low[1] - high[1])
            room = low[0] + (high[0] - low[0]) * min(part, 0.9)
        elif not low[0] < room < high[0]:
            room = (low[0] + high[0]) / 2
        if not math.isfinite(room) or high[0] - low[0] < THRESHOLDS.spare * limit:
            break
    if best is not None:
        return best
    least = least or (yield replace(saving, sparing=True))
    return free if least.plan is None else least


def _with_all_means(candidate: Candidate, gauge: Gauge) -> Candidate:
    """The candidate with all means that save memory (see [Note: means that save memory])."""
    return replace(candidate, may_recompute=bool(gauge.evaluator.layers))
