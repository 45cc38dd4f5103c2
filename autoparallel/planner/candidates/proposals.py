"""What is proposed for a mesh: a preset's layouts, or the free search's and every preset's beside it."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import replace

from autoparallel.pipeline.schedules import cut_rows
from autoparallel.planner.candidates.candidates import Candidate, Outcome, Proposals
from autoparallel.planner.candidates.evaluation import Evaluator
from autoparallel.planner.candidates.means import with_means
from autoparallel.planner.candidates.memory import exactly, fastest
from autoparallel.planner.candidates.paddings import paddings
from autoparallel.planner.candidates.pipelines import pipelines
from autoparallel.planner.fits import require_cuttable
from autoparallel.planner.thresholds import THRESHOLDS


def proposals(evaluator: Evaluator, *, thorough: bool = True, below: float = math.inf) -> Proposals:
    """All candidates for what the evaluator's request asks, within its limit on memory.

    [Note: what a sum cannot tell] The search adds up prices.  What hides behind what is no sum, and on hardware
    where nothing hides, sums that are nearly equal may be in the wrong order.  So "auto" is the best of what the
    search chooses freely and of the presets, as the program of each is predicted (see ``predict.forecast``), each with
    the same means that save memory.

    [Note: states in host memory cost a step's transfer] Nothing hides it, so the states of the optimizer go there only
    where nothing fits otherwise, or where all other means together cost more: then the preset that was the fastest is
    searched once more with them there, and without microbatches that nobody asked for.

    Args:
        thorough: whether "auto" looks at the presets, too; else this is a first look.
        below: seconds of a step that a plan without a pipeline must stay below to be of use; where none does, one that
            takes longer is what comes out, and need not fit.
    """
    choice, presets = evaluator.offloads, evaluator.presets(thorough)
    outcome = yield from _best(evaluator, presets, choice or False, below)
    if choice is None and thorough and (yield from _may_offload(outcome, evaluator)):
        outcome = yield from _move_states(evaluator, presets, outcome)
    origin = evaluator.request.origin
    return outcome if outcome.plan is None else replace(outcome, plan=replace(outcome.plan, origin=origin))


def _best(evaluator: Evaluator, presets: Sequence[str], offloads: bool, below: float = math.inf) -> Proposals:
    """The fastest plan of some presets, with the optimizer's states in host memory or not."""
    request = evaluator.request
    if request.stages:
        return (yield from pipelines(evaluator, presets, offloads))
    candidate = Candidate(request.origin, microbatches=_microbatches_in_call(evaluator), offloads=offloads)
    return (yield from exactly(lambda gauge: with_means(candidate, presets, gauge), evaluator, below))


def _move_states(evaluator: Evaluator, presets: Sequence[str], best: Outcome) -> Proposals:
    """The fastest plan with the optimizer's states in host memory, or the best one without, where that is faster."""
    if best.plan is None:
        return (yield from _best(evaluator, presets, True))
    preset = best.candidate.preset
    if evaluator.request.stages:
        other = yield from _best(evaluator, [preset], True)
        return other if other.plan is not None and other.seconds < best.seconds else best
    count, loss_chunks = _microbatches_in_call(evaluator), best.candidate.loss_chunks
    candidate = Candidate(preset, microbatches=count, loss_chunks=loss_chunks, offloads=True)
    return (yield from exactly(lambda gauge: fastest([candidate], gauge, best), evaluator))


def _may_offload(outcome: Outcome, evaluator: Evaluator) -> Generator[Candidate, Outcome, bool]:
    """Whether states in host memory may be faster than a plan.

    Not where their way takes longer than all that saves memory now, nor where what they leave is too little to do
    without much of that: what is saved last costs more than on average, but not by far.
    """
    request = evaluator.request
    if outcome.plan is None or request.stages:
        return outcome.plan is None or evaluator.recomputes(outcome.plan)
    candidate = Candidate(outcome.candidate.preset, microbatches=_microbatches_in_call(evaluator))
    free = yield from paddings(candidate, evaluator)
    if free.plan is None or request.memory_limit is None:
        return True
    without = evaluator.forecast(free.plan)
    saving = evaluator.forecast(outcome.plan).seconds - without.seconds
    over = max(without.memory - request.memory_limit, 1.0)
    part = min(1.0, THRESHOLDS.steep * evaluator.states / over)
    return request.profile.host_seconds(evaluator.states) < part * saving


def _microbatches_in_call(evaluator: Evaluator) -> int:
    """How many microbatches a call without a pipeline has been asked to run in; 1 where nothing is differentiated.

    Raises:
        PlanError: where the batch cannot be cut.
    """
    request, captured, call = evaluator.request, evaluator.captured, evaluator.call
    count = request.microbatches or 1
    if count == 1 or request.stages or not call.trains:
        return 1
    if captured.objective is None and request.loss_fn is not None and not call.with_target:
        return 1
    count = cut_rows(count, call.batch)
    require_cuttable(captured, call, count)
    return count
