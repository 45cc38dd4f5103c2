"""The rows with which vocabularies are used: one with more rows than its model's may be cut where that could not."""

from __future__ import annotations

import math
from dataclasses import replace

from autoparallel.decisions.parameters import padded_rows
from autoparallel.passes.pad_vocabulary import find_vocabularies
from autoparallel.planner.candidates.candidates import Candidate, Proposals
from autoparallel.planner.candidates.evaluation import Evaluator


def paddings(candidate: Candidate, evaluator: Evaluator) -> Proposals:
    """A candidate with each padding; the cheapest is the best, and the first error tells for all."""
    outcomes = []
    for rows in _rows(candidate, evaluator):
        outcomes.append((yield replace(candidate, padding=tuple(rows.items()))))
    return min(outcomes, key=lambda outcome: outcome.seconds)


def _rows(candidate: Candidate, evaluator: Evaluator) -> list[dict[str, int]]:
    """The rows of vocabularies as they lie already, as a preset has them, or either way."""
    request, captured = evaluator.request, evaluator.captured
    at_rest, plan = evaluator.settled.at_rest, request.pins.plan
    if at_rest is not None or plan is not None:
        return [padded_rows(at_rest if at_rest is not None else plan.parameters)]  # type: ignore[union-attr]
    sizes, constraints = request.sizes, request.constraints(candidate.preset)
    if constraints.tensor or constraints.data or constraints.sequence:
        shards = math.prod(sizes[axis] for axis in constraints.tensor)
        return [find_vocabularies(captured.graph, captured.parameters, shards)]
    # Worth a search of its own where there is an axis that could not shard a vocabulary otherwise.
    alone: dict[str, int] = {}
    for size in set(sizes):
        alone |= find_vocabularies(captured.graph, captured.parameters, size)
    together = find_vocabularies(captured.graph, captured.parameters, math.prod(sizes))
    return [{}, {**alone, **{name: together[name] for name in alone if name in together}}] if alone else [{}]
