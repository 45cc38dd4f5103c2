"""Pipelines: layouts for one microbatch on the mesh's other axes, then the cuts under them.

More and more microbatches are tried while a step gets faster: the more there are, the less ranks wait, and the less is
in flight.  The search minimises what all ranks do, and adds up more memory for a stage than it takes; so presets are
looked at, too, and the fastest layouts are cut before those that the search says to fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autoparallel.decisions.parameters import PlanError
from autoparallel.decisions.pipeline import Pipeline
from autoparallel.graph.captured import InputSpec
from autoparallel.planner.candidates import Candidate, Cut, Outcome, Proposals
from autoparallel.planner.evaluation import Evaluator
from autoparallel.planner.fits import require_cuttable
from autoparallel.planner.paddings import paddings
from autoparallel.planner.programs import microbatches_of
from autoparallel.planner.thresholds import THRESHOLDS
from autoparallel.program import require_stageable

STAGE_PRESETS = ("data_parallel", "fsdp", "tensor_parallel")
"""The presets whose layouts are cut into stages, too."""


def microbatches_in_call(evaluator: Evaluator) -> int:
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
    require_cuttable(captured, call, count)
    return count


def pipelines(evaluator: Evaluator, *, thorough: bool) -> Proposals:
    """The fastest pipeline that fits.

    Args:
        thorough: whether "auto" looks at the presets, too.

    Raises:
        PlanError: where the batch cannot be cut.
    """
    request, limit = evaluator.request, evaluator.request.memory_limit
    counts = list(_counts(evaluator))
    fastest: Outcome | None = None
    errors: list[str] = []
    for some in counts:
        outcome = yield from _attempt(evaluator, some, fits=limit is None)
        if outcome.plan is None and limit is not None:
            outcome = yield from _attempt(evaluator, some, limit)
        if outcome.plan is None:
            errors.append(str(outcome.error))
            continue
        if fastest is not None and outcome.seconds >= fastest.seconds:
            break
        fastest, pipeline = outcome, outcome.plan.pipeline
        if pipeline is not None and pipeline.bubble < THRESHOLDS.bubble and not outcome.plan.recompute:
            break
    if fastest is None:
        fastest = yield from _last_resorts(evaluator, counts, errors)
    if fastest.plan is None or not thorough or request.plan != "auto" or evaluator.settled.at_rest is not None:
        return fastest
    assert fastest.candidate.cut is not None
    for preset in STAGE_PRESETS:
        some, below = fastest.candidate.cut.microbatches, fastest.seconds
        outcome = yield from _attempt(evaluator, some, preset=preset, fits=limit is None, below=below)
        if outcome.plan is not None and outcome.seconds < below:
            fastest = replace(outcome, plan=replace(outcome.plan, origin="auto"))
    return fastest


def _last_resorts(evaluator: Evaluator, counts: Sequence[tuple[int, ...]], errors: list[str]) -> Proposals:
    """Where nothing fits: layouts where layers may run again; else the stages say which of them does not fit."""
    limit = evaluator.request.memory_limit
    if limit is not None and evaluator.layers:
        outcome = yield from _attempt(evaluator, counts[0], limit, may_recompute=True)
        if outcome.plan is not None:
            return outcome
        errors.append(str(outcome.error))
    if limit is not None:
        outcome = yield from _attempt(evaluator, counts[-1])
        if outcome.plan is not None:
            return outcome
        errors.append(str(outcome.error))
    error = PlanError("; ".join(dict.fromkeys([errors[-1], errors[0]])))
    return Outcome(Candidate(evaluator.request.origin), error=error)


def _attempt(
    evaluator: Evaluator,
    counts: tuple[int, ...],
    limit: float | None = None,
    *,
    may_recompute: bool = False,
    preset: str | None = None,
    fits: bool = True,
    below: float = math.inf,
) -> Proposals:
    """The cheapest layouts for the first number of microbatches, cut into stages.

    Args:
        limit: the layouts are searched within it.
        may_recompute: whether they are searched for layers that may run again.
        preset: whose layouts; those of the request unless told.
        fits: whether layouts are cut whatever the search adds up; else hopeless ones are not, and those that are must
            fit without recomputing layers.
        below: a step of this many seconds is known, slower ones are of no use.
    """
    preset = preset or evaluator.request.origin
    candidate = Candidate(preset, may_recompute=may_recompute, limit=limit, microbatches=counts[0])
    outcome = yield from paddings(candidate, evaluator)
    plan, capacity = outcome.plan, evaluator.request.memory_limit
    if plan is None:
        return outcome
    needed = plan.estimate.memory if plan.estimate is not None else 0.0
    if not fits and capacity is not None and needed > THRESHOLDS.hopeless * capacity:
        message = f"the fastest layouts need {needed / 1e6:.1f} MB per device"
        return Outcome(outcome.candidate, error=PlanError(message))
    if outcome.seconds * counts[0] / evaluator.request.stages >= THRESHOLDS.far * below:
        message = "the ranks have far more to do than those of the pipeline that is known"
        return Outcome(outcome.candidate, error=PlanError(message))
    return (yield replace(outcome.candidate, cut=Cut(counts, may_recompute=fits)))


def _counts(evaluator: Evaluator) -> Iterator[tuple[int, ...]]:
    """The numbers of microbatches that are tried together, then more of them, one after the other, within a limit.

    Raises:
        PlanError: where the batch cannot be cut, or the model not be run in stages; before anything is searched.
    """
    captured, call, request, settled = evaluator.captured, evaluator.call, evaluator.request, evaluator.settled
    if settled.pipeline is not None:
        first: tuple[int, ...] = (microbatches_of(settled.pipeline, captured, call),)
    else:
        first = tuple(microbatch_counts(call.batch, request.stages, evaluator.pipeline))
    if not captured.batches and max(first) > 1 and any(isinstance(s, InputSpec) for s in call.specs):
        raise PlanError(
            f"the batch size is fixed at {call.batch}, so that it cannot be cut into microbatches: {captured.why_fixed}"
        )
    require_stageable(captured, request.outputs, min(first), call.is_training)
    yield first
    count = 2 * first[0]
    if request.memory_limit is not None and evaluator.pipeline.microbatches is None:
        while call.batch % count == 0:
            yield (count,)
            count *= 2


def microbatch_counts(batch: int, ranks: int, request: Pipeline) -> list[int]:
    """The numbers of microbatches to try, the largest first; each divides it.

    Raises:
        PlanError: when the batch cannot be cut.
    """
    if request.microbatches is not None:
        if batch % request.microbatches:
            raise PlanError(
                f"a batch of {batch} rows does not divide into {request.microbatches} microbatches: change one of them"
            )
        return [request.microbatches]
    fitting = [m for m in range(ranks, min(8 * ranks, batch) + 1) if batch % m == 0]
    if not fitting:
        raise PlanError(
            f"a batch of {batch} rows does not divide into {ranks} to {8 * ranks} microbatches, for a pipeline over "
            f"{ranks} ranks: use a batch that is a multiple of {ranks}"
        )
    most = max(fitting, key=lambda m: (m % ranks == 0, m <= 4 * ranks, m))
    return sorted((m for m in fitting if most % m == 0), reverse=True)
