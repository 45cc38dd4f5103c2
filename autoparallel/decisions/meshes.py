"""How devices were factored into mesh axes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autoparallel.comm.world import PIPELINE_AXIS, Axes


@dataclass(frozen=True)
class Alternative:
    """What one mesh would cost.

    Attributes:
        mesh: its axes by name and size, "pp" first where it is a pipeline.
        seconds: of a step, as predicted from short models; None where there is no plan. Where every plan is slower than
            what another mesh has, that of one which need not fit.
        memory: bytes per device of the same plan, likewise.
        schedule, microbatches, bubble: of a pipeline; the bubble is the part of the schedule in which ranks wait.
        problem: why there is no plan, or why it cannot be taken.
    """

    mesh: Axes
    seconds: float | None = None
    memory: float | None = None
    schedule: str = ""
    microbatches: int = 0
    bubble: float = 0.0
    problem: str = ""

    @property
    def staged(self) -> bool:
        return self.mesh[0][0] == PIPELINE_AXIS

    def order(self, capacity: float | None) -> tuple[bool, bool, bool, float]:
        """Alternatives are better the smaller this is: one that can be taken, that fits, that is fast."""
        over = capacity is not None and self.memory is not None and self.memory > capacity
        seconds = math.inf if self.seconds is None else self.seconds
        return self.seconds is None, bool(self.problem), over, seconds

    def seconds_within(self, capacity: float | None) -> float:
        """The seconds of a step, where the mesh can be taken and its plan fits; else infinitely many."""
        *faults, seconds = self.order(capacity)
        return math.inf if any(faults) else seconds


@dataclass(frozen=True)
class MeshChoice:
    """How the devices were factored into mesh axes.

    Attributes:
        tried: what was searched, the best first, which is taken.
        untried: the meshes that were not.
        capacity: bytes of a device that a plan may take, where they are known.
    """

    tried: tuple[Alternative, ...]
    untried: tuple[Axes, ...] = ()
    capacity: float | None = None

    def __post_init__(self) -> None:
        if not self.tried:
            raise ValueError("a choice among no meshes")

    @property
    def mesh(self) -> Axes:
        """The axes that were chosen, "pp" among them where it is a pipeline."""
        return self.tried[0].mesh

    def best(self, staged: bool) -> Alternative | None:
        """The best pipeline, or the best mesh without one; None where no plan was found."""
        return next((a for a in self.tried if a.staged == staged and a.seconds is not None), None)
