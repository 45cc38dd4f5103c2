"""Further means that save memory within a limit: the loss in chunks of rows, then microbatches inside a call.

Chunks cost next to nothing, so they come first.  More and more microbatches are tried while layers would have to run
again otherwise, or nothing fits; each has its own best layouts.  Neither is taken unasked where it would change what
the model returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from autoparallel.decisions.parameters import PlanError
from autoparallel.passes.chunk_loss import chunkable
from autoparallel.planner.candidates.candidates import Candidate, Outcome, Proposals
from autoparallel.planner.candidates.evaluation import Evaluator
from autoparallel.planner.candidates.memory import Gauge
from autoparallel.planner.fits import differing, returns_loss_alone
from autoparallel.planner.thresholds import THRESHOLDS

Search = Callable[[Candidate, Outcome | None], Proposals]
"""Proposes all that a candidate leaves open, which must beat a plan that fits, where there is one."""


def with_means(candidate: Candidate, gauge: Gauge, search: Search) -> Proposals:
    """The plan that is predicted to be fastest within the limit, by all means that are left open."""
    evaluator = gauge.evaluator
    best = yield from search(candidate, None)
    if evaluator.request.memory_limit is None:
        return best
    for sparing in _means(candidate, evaluator):
        if best.plan is not None and not evaluator.recomputes(best.plan):
            break
        try:
            outcome = yield from search(sparing, best if best.plan is not None else None)
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
    count, ranks = 2, math.prod(request.sizes[axis] for axis in request.constraints().data)
    if not returns_loss_alone(captured, request.outputs):
        return
    while not differing(captured, call, count) and call.batch // count % ranks == 0:
        yield replace(candidate, microbatches=count)
        count *= 2
