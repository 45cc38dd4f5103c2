"""Further means that save memory within a limit: the loss in chunks of rows, then microbatches inside a call.

Chunks cost next to nothing, so they come first.  More and more microbatches are tried while layers would have to run
again otherwise, or nothing fits; each has its own best layouts.  Neither is taken unasked where it would change what
the model returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autoparallel.decisions.parameters import PlanError
from autoparallel.passes.chunk_loss import chunkable
from autoparallel.planner.candidates.candidates import Candidate, Outcome, Proposals
from autoparallel.planner.candidates.evaluation import Evaluator
from autoparallel.planner.candidates.memory import Gauge, fastest
from autoparallel.planner.fits import differing, returns_loss_alone
from autoparallel.planner.thresholds import THRESHOLDS


def with_means(candidate: Candidate, presets: Sequence[str], gauge: Gauge) -> Proposals:
    """The plan of some presets that is predicted to be fastest within the limit, by all means that are left open."""

    def of_presets(some: Candidate, incumbent: Outcome | None = None) -> Proposals:
        return fastest([replace(some, preset=name) for name in presets], gauge, incumbent)

    evaluator = gauge.evaluator
    best = yield from of_presets(candidate)
    if evaluator.request.memory_limit is None:
        return best
    for sparing in _means(candidate, evaluator):
        if best.plan is not None and not evaluator.recomputes(best.plan):
            break
        try:
            outcome = yield from of_presets(sparing, best if best.plan is not None else None)
        except PlanError:  # the layouts that take the least memory need the logits whole
            continue
        if outcome.plan is None and best.plan is not None:
            break
        if best.plan is None or gauge.seconds(outcome) < gauge.seconds(best):
            best = outcome
        if outcome.plan is not None and not evaluator.recomputes(outcome.plan):  # what saves more is slower
            break
    return best


def _means(candidate: Candidate, evaluator: Evaluator) -> Iterator[Candidate]:
    """The candidate with one means after the other, each of which takes less memory than the one before."""
    request, captured, call = evaluator.request, evaluator.captured, evaluator.call
    if request.loss_chunks is None and chunkable(captured.graph):
        candidate = replace(candidate, loss_chunks=THRESHOLDS.loss_chunks)
        yield candidate
    if request.microbatches is not None or not call.trains:
        return
    if not returns_loss_alone(captured, request.outputs) or call.batch % request.batch_ranks:
        return
    for count in _counts(call.batch // request.batch_ranks):
        if differing(captured, call, count):
            return
        yield replace(candidate, microbatches=count)


def _counts(rows: int) -> Iterator[int]:
    """Into how many microbatches the rows of a rank may be cut: each at least twice as many as the one before."""
    least = 2
    for count in range(2, rows + 1):
        if count >= least and rows % count == 0:
            yield count
            least = 2 * count
