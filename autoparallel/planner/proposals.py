"""What is proposed for a mesh: a preset's layouts, or the free search's and every preset's beside it."""

from __future__ import annotations

from dataclasses import replace

from autoparallel.planner.candidates import Candidate, Outcome, Proposals
from autoparallel.planner.evaluation import Evaluator
from autoparallel.planner.means import with_means
from autoparallel.planner.memory import within
from autoparallel.planner.microbatches import microbatches_in_call, pipelines
from autoparallel.planner.paddings import paddings
from autoparallel.planner.presets import EXPERT_AXIS, PRESETS
from autoparallel.planner.thresholds import THRESHOLDS


def proposals(evaluator: Evaluator, *, thorough: bool = True) -> Proposals:
    """All candidates for what the evaluator's request asks.

    Args:
        thorough: whether "auto" looks at the presets, too, and a limit at what is predicted; else this is a first
            look, by what the search adds up, and recomputing layers is asked about only where nothing fits without.
    """
    request = evaluator.request
    if request.stages:
        return (yield from pipelines(evaluator, thorough=thorough))
    count = microbatches_in_call(request, evaluator.captured, evaluator.call)
    candidate = Candidate(request.origin, limit=request.memory_limit, microbatches=count)
    if not thorough:
        outcome = yield from paddings(candidate, evaluator)
        return outcome if outcome.plan is not None else (yield from within(candidate, evaluator))
    alone = request.plan != "auto" or evaluator.settled.at_rest is not None
    search = within if alone else presets
    return (yield from with_means(candidate, evaluator, lambda some: search(some, evaluator)))


def presets(candidate: Candidate, evaluator: Evaluator) -> Proposals:
    """A candidate of the free search, and the presets that are predicted to be faster.

    [Note: what a sum cannot tell] The search adds up prices.  What hides behind what is no sum, and on hardware
    where nothing hides, sums that are nearly equal may be in the wrong order.  So "auto" is the best of what the
    search chooses freely and of the presets, as the program of each is predicted (see ``predict.forecast``).
    """
    limit, names = candidate.limit, [name for name, _ in evaluator.request.axes]
    fastest = yield from within(candidate, evaluator)
    for preset in PRESETS:
        if preset == "auto" or preset == "expert_parallel" and EXPERT_AXIS not in names:
            continue
        outcome = yield from paddings(replace(candidate, preset=preset, limit=None), evaluator)
        if outcome.plan is None or _is_slower(outcome, fastest, evaluator):
            continue
        forecast = evaluator.forecast(outcome.plan)
        if fastest.plan is not None:
            fastest = replace(fastest, forecast=fastest.forecast or evaluator.forecast(fastest.plan))
            if forecast.seconds >= fastest.forecast.seconds:  # type: ignore[union-attr]
                continue
        if limit is not None:
            if not forecast.whole and forecast.memory <= limit:
                forecast = evaluator.forecast(outcome.plan, exactly=True)
            if forecast.memory > limit:
                continue
        fastest = replace(outcome, forecast=forecast)
    return fastest if fastest.plan is None else replace(fastest, plan=replace(fastest.plan, origin="auto"))


def _is_slower(outcome: Outcome, fastest: Outcome, evaluator: Evaluator) -> bool:
    """Whether a plan is slower than the fastest one by far, or as good as the same, without predicting it."""
    plan, other = outcome.plan, fastest.plan
    if plan is None or other is None or plan.cost is None or plan.estimate is None or other.cost is None:
        return False
    if (plan.operators, plan.parameters) == (other.operators, other.parameters):
        return True
    if not evaluator.request.profile.overlap:
        return plan.cost > THRESHOLDS.nearly_equal * other.cost
    # All hides that can: what travels for parameters.
    hidden = sum(plan.estimate.parameters.values())
    return fastest.forecast is not None and plan.cost - hidden >= fastest.forecast.seconds


__all__ = ["proposals"]
