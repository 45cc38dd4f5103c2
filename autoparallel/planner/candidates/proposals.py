"""What is proposed for a mesh: a preset's layouts, or the free search's and every preset's beside it."""

from __future__ import annotations

from dataclasses import replace

from autoparallel.planner.candidates.candidates import Candidate, Proposals
from autoparallel.planner.candidates.evaluation import Evaluator
from autoparallel.planner.candidates.means import with_means
from autoparallel.planner.candidates.memory import fastest
from autoparallel.planner.candidates.microbatches import microbatches_in_call, pipelines


def proposals(evaluator: Evaluator, *, thorough: bool = True) -> Proposals:
    """All candidates for what the evaluator's request asks, within its limit on memory.

    [Note: what a sum cannot tell] The search adds up prices.  What hides behind what is no sum, and on hardware
    where nothing hides, sums that are nearly equal may be in the wrong order.  So "auto" is the best of what the
    search chooses freely and of the presets, as the program of each is predicted (see ``predict.forecast``), each with
    the same means that save memory.

    Args:
        thorough: whether "auto" looks at the presets, too; else this is a first look.
    """
    request = evaluator.request
    if request.stages:
        return (yield from pipelines(evaluator, thorough=thorough))
    count = microbatches_in_call(evaluator)

    def search(some: Candidate) -> Proposals:
        candidates = [replace(some, preset=name) for name in evaluator.presets(thorough)]
        return fastest(candidates, request.memory_limit, evaluator, exactly=thorough)

    candidate = Candidate(request.origin, microbatches=count)
    outcome = yield from with_means(candidate, evaluator, search) if thorough else search(candidate)
    return outcome if outcome.plan is None else replace(outcome, plan=replace(outcome.plan, origin=request.origin))
