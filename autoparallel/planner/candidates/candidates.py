"""Candidates: the ways to plan that are compared, and the one loop over them.

[Note: candidates] A generator proposes candidates, one after the other, and is told what became of each before it
proposes the next; what it returns is the best of them.  There is one for each thing that may be varied: presets
(``proposals``), the rows of vocabularies (``paddings``), the memory that is left and what saves it (``memory``), and a
pipeline's microbatches (``pipelines``).  They hand candidates on by ``yield from``, so that all of them end up in one
loop, that of ``Evaluator.best``.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass, replace

from autoparallel.decisions.parameters import PlanError
from autoparallel.plan import Plan


@dataclass(frozen=True)
class Candidate:
    """One way to plan a graph; equal ones have the same plan.

    Attributes:
        preset: the strategy, or "auto" for the free search.
        padding: parameter names with the rows with which vocabularies are used, where not with their own.
        may_recompute: whether layers may run again in the backward.
        limit: bytes per device that the search may add up; None for any number.
        room: bytes of the limit that are left for what the search does not add up.
        sparing: whether as little memory as possible is taken, whatever the time.
        microbatches: into how many a step is cut.
        loss_chunks: into how many chunks of rows the loss is cut, where it can be; the request may ask for more.
        offloads: whether the optimizer's states lie in host memory.
        cut: the numbers of microbatches for which the layouts, searched for the first of them, are cut into the stages
            of a pipeline; None leaves them whole.
    """

    preset: str
    padding: tuple[tuple[str, int], ...] = ()
    may_recompute: bool = False
    limit: float | None = None
    room: float = 0.0
    sparing: bool = False
    microbatches: int = 1
    loss_chunks: int = 1
    offloads: bool = False
    cut: tuple[int, ...] | None = None

    @property
    def unlimited(self) -> Candidate:
        """The same, whatever memory it takes."""
        return replace(self, limit=None, room=0.0, sparing=False)


@dataclass(frozen=True)
class Outcome:
    """What became of a candidate.

    Attributes:
        candidate: the candidate.
        plan: its plan, or None.
        error: why there is none.
        seconds: of a step, as the search adds them up.
    """

    candidate: Candidate
    plan: Plan | None = None
    error: PlanError | None = None
    seconds: float = math.inf

    def require(self) -> Plan:
        """The plan. Raises PlanError where there is none."""
        if self.plan is None:
            raise self.error or PlanError("nothing was planned")
        return self.plan


Proposals = Generator[Candidate, Outcome, Outcome]
"""Proposes candidates, is told what became of each, and returns the best (see [Note: candidates])."""
