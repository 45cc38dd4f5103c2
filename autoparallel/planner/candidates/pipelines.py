"""Pipelines: layouts for one microbatch on the mesh's other axes, then the cuts under them.

More and more microbatches are tried while a step gets faster: the more there are, the less ranks wait, and the less is
in flight.  The search minimises what all ranks do, and adds up for all stages what the first one takes; so presets are
looked at, too, and with the layouts that the search says to fit also those that would be fastest without a limit: where
layers run again, cutting decides in either case.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace

from autoparallel.decisions.parameters import PlanError
from autoparallel.decisions.pipeline import Pipeline
from autoparallel.graph.captured import InputSpec
from autoparallel.planner.candidates.candidates import Candidate, Outcome, Proposals
from autoparallel.planner.candidates.evaluation import Evaluator
from autoparallel.planner.candidates.paddings import paddings
from autoparallel.planner.programs import microbatches_of
from autoparallel.planner.thresholds import THRESHOLDS
from autoparallel.program.requirements import require_stageable


def pipelines(evaluator: Evaluator, presets: Sequence[str], offloads: bool) -> Proposals:
    """The fastest pipeline that fits.

    Args:
        presets: whose layouts are looked at.
        offloads: whether the optimizer's states lie in host memory.

    Raises:
        PlanError: where the batch cannot be cut.
    """
    request = evaluator.request
    fastest: Outcome | None = None
    errors: list[str] = []
    for counts in list(_counts(evaluator)):
        before = fastest
        for preset in presets:
            for outcome in (
                yield from _layouts(evaluator, Candidate(preset, microbatches=counts[0], offloads=offloads))
            ):
                if fastest is not None and _is_hopeless(outcome, evaluator, fastest):
                    continue
                if outcome.plan is not None:
                    outcome = yield replace(outcome.candidate, cut=counts)
                if outcome.plan is None:
                    errors.append(str(outcome.error))
                elif fastest is None or outcome.seconds < fastest.seconds:
                    fastest = replace(outcome, plan=replace(outcome.plan, origin=request.origin))
        if fastest is None:
            continue
        assert fastest.plan is not None and fastest.plan.pipeline is not None
        waits = fastest.plan.pipeline.bubble >= THRESHOLDS.bubble or evaluator.recomputes(fastest.plan)
        if fastest is before or not waits:
            break
    if fastest is None:
        error = PlanError("; ".join(dict.fromkeys([errors[-1], errors[0]])))
        return Outcome(Candidate(request.origin), error=error)
    return fastest


def _layouts(evaluator: Evaluator, candidate: Candidate) -> Generator[Candidate, Outcome, list[Outcome]]:
    """The cheapest layouts of a preset for so many microbatches: within the limit, for layers that may run again, and
    without one, where that is not the same."""
    limit = evaluator.request.memory_limit
    free = yield from paddings(candidate, evaluator)
    if limit is None or free.plan is None or free.plan.estimate is None or free.plan.estimate.memory <= limit:
        return [free]
    saving = replace(candidate, limit=limit, may_recompute=bool(evaluator.layers))
    return [(yield from paddings(saving, evaluator)), free]


def _is_hopeless(outcome: Outcome, evaluator: Evaluator, fastest: Outcome) -> bool:
    """Whether layouts need not be cut: a pipeline is known whose ranks have far less to do, or which fits, and they
    were searched without the limit and need far more."""
    request, candidate = evaluator.request, outcome.candidate
    if outcome.seconds * candidate.microbatches / request.stages >= THRESHOLDS.far * fastest.seconds:
        return True
    estimate = outcome.require().estimate
    if request.memory_limit is None or candidate.limit is not None or estimate is None:
        return False
    return estimate.memory > THRESHOLDS.hopeless * request.memory_limit


def _counts(evaluator: Evaluator) -> Iterator[tuple[int, ...]]:
    """The numbers of microbatches that are tried together, then more of them, one after the other, within a limit.

    Raises:
        PlanError: where the batch cannot be cut, or the model not be run in stages; before anything is searched.
    """
    captured, call, request, settled = evaluator.captured, evaluator.call, evaluator.request, evaluator.settled
    ranks, wanted = request.batch_ranks, evaluator.pipeline
    if settled.pipeline is not None:
        wanted = replace(wanted, microbatches=microbatches_of(request, settled.pipeline, captured, call))
    first = tuple(microbatch_counts(call.batch, request.stages, wanted, ranks))
    if max(first) > 1 and not captured.is_open(call.specs) and any(isinstance(s, InputSpec) for s in call.specs):
        raise PlanError(
            f"the batch size is fixed at {call.batch}, so that it cannot be cut into microbatches: {captured.why_fixed}"
        )
    require_stageable(captured, request.outputs, min(first), call.trains)
    yield first
    count = 2 * first[0]
    if request.memory_limit is not None and evaluator.pipeline.microbatches is None:
        while call.batch % (count * ranks) == 0:
            yield (count,)
            count *= 2


def microbatch_counts(batch: int, ranks: int, request: Pipeline, sharing: int = 1) -> list[int]:
    """The numbers of microbatches to try, the largest first; each divides the batch.

    Args:
        batch: its rows.
        ranks: of the pipeline.
        sharing: the ranks that shard a microbatch; the rows of each must divide by them.

    Raises:
        PlanError: when the batch cannot be cut.
    """
    if request.microbatches is not None:
        if batch % request.microbatches:
            raise PlanError(
                f"a batch of {batch} rows does not divide into {request.microbatches} microbatches: use one that does "
                "(drop_last=True in the data loader), or another number of microbatches in compile()"
            )
        return [request.microbatches]
    fitting = [m for m in range(ranks, min(8 * ranks, batch) + 1) if batch % (m * sharing) == 0]
    if not fitting:
        each = f", each of which divides by the {sharing} ranks that shard it" if sharing > 1 else ""
        raise PlanError(
            f"a batch of {batch} rows does not divide into {ranks} to {8 * ranks} microbatches{each}, for a pipeline "
            f"over {ranks} ranks: use a batch that is a multiple of {ranks * sharing}"
        )
    most = max(fitting, key=lambda m: (m % ranks == 0, m <= 4 * ranks, m))
    return sorted((m for m in fitting if most % m == 0), reverse=True)
