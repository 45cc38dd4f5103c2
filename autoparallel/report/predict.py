"""Predicting a step's traffic, time and memory from the program itself, not from the search's estimate."""

from __future__ import annotations

from dataclasses import dataclass, field

from autoparallel.plan import Plan
from autoparallel.planner.hardware import Profile
from autoparallel.program import LocalProgram


@dataclass(frozen=True)
class Prediction:
    """What one optimizer step is predicted to cost each rank.

    Attributes:
        collectives: (kind, axis) to (how many, bytes sent).
        seconds: the predicted time.
        memory: what of, to bytes per device.
    """

    collectives: dict[tuple[str, str], tuple[int, float]] = field(default_factory=dict)
    seconds: float = 0.0
    memory: dict[str, float] = field(default_factory=dict)


def predict(program: LocalProgram, plan: Plan, profile: Profile) -> Prediction:
    return Prediction()
