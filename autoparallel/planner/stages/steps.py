"""How layers of pipeline stages run again where memory is short, and what stages take then, for all cuts at once.

[Note: layers of stages that run again] Where memory is short, layers run again in the backward, those first that save
most bytes for a second (``steps_of``).  How long a stage takes within its memory is so told for all cuts at once, by
going along these steps until it fits; what a rank's stages then take step by step is told exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autoparallel.planner.stages.rows import ANSWERS, Array, Rows
from autoparallel.planner.thresholds import THRESHOLDS


@dataclass(frozen=True)
class Step:
    """A layer of which more runs again than before.

    Attributes:
        begin, end: its rows.
        answer: how much of it runs again then: the number of a row of what ``Rows`` tells by answer.
        seconds: more than before, for each microbatch.
        saved: bytes that are kept less than before, of each microbatch.
        spared: bytes that it makes again, in all, while its backward runs.
    """

    layer: str
    begin: int
    end: int
    answer: int
    seconds: float
    saved: float
    spared: float

    @property
    def slope(self) -> float:
        """Seconds for each byte that is saved."""
        return self.seconds / self.saved


def steps_of(rows: Rows) -> list[Step]:
    """How each layer saves more and more, what costs least for a byte first; a step that the next one beats is none."""
    steps = []
    for layer, (begin, end) in rows.spans().items():
        seconds, held = (part[:, begin:end].sum(axis=1) for part in (rows.backward, rows.activations))
        answer = 0
        while better := [a for a in range(answer + 1, ANSWERS) if held[a] < held[answer]]:
            before = answer
            answer = min(better, key=lambda a: (seconds[a] - seconds[before]) / (held[before] - held[a]))
            gone = np.maximum(0.0, rows.activations[0, begin:end] - rows.activations[answer, begin:end])
            more, saved = float(seconds[answer] - seconds[before]), float(held[before] - held[answer])
            steps.append(Step(layer, begin, end, answer, more, saved, float(gone.sum())))
    return steps


@dataclass(frozen=True)
class Point:
    """What stages take when their layers have come to the same step, by the places where they begin and end.

    Attributes:
        seconds: for a microbatch.
        resting: bytes of parameters, gradients and optimizer states.
        activations: bytes for each microbatch in flight.
        moment: bytes beside these while a backward runs.
    """

    seconds: Array
    resting: Array
    activations: Array
    moment: Array


def sums_before(values: Array, places: npt.NDArray[np.intp]) -> Array:
    """The sums of what is before each place."""
    return np.concatenate([[0.0], np.cumsum(values)])[places]


def points_of(rows: Rows, steps: Sequence[Step], places: npt.NDArray[np.intp]) -> list[Point]:
    """Stages of which nothing runs again, then those whose layers have come to more and more steps.

    A layer that a cut parts does not run again.  Some of many different steps are left out.
    """

    def between(values: Array) -> Array:
        sums = sums_before(values, places)
        return sums[None, :] - sums[:, None]

    moment = np.zeros((len(places), len(places)))
    moments = np.maximum.reduceat(rows.moment, places[:-1])
    for begin in range(len(places) - 1):
        moment[begin, begin + 1 :] = np.maximum.accumulate(moments[begin:])
    seconds, resting = between(rows.forward + rows.backward[0]), between(rows.resting)
    points = [Point(seconds, resting, between(rows.activations[0]), moment)]
    slopes = sorted({float(f"{step.slope:.3g}") for step in steps})
    if len(slopes) > THRESHOLDS.slopes:
        slopes = [slopes[i] for i in np.linspace(0, len(slopes) - 1, THRESHOLDS.slopes).astype(int)]
    for slope in slopes:
        chosen = [step for step in steps if float(f"{step.slope:.3g}") <= slope]
        ending, beginning = np.zeros((2, 2, len(rows.nodes)))  # seconds and bytes, where layers end and begin
        entering = np.zeros(len(rows.nodes) + 1)
        for step in chosen:
            ending[:, step.end - 1] += step.seconds, step.saved
            beginning[:, step.begin] += step.seconds, step.saved
            entering[step.begin] = rows.entering[step.begin] if step.begin else 0.0
        more, saved = (
            np.maximum(0.0, sums_before(ends, places)[None, :] - sums_before(begins, places)[:, None])
            for ends, begins in zip(ending, beginning, strict=True)
        )
        activations = points[0].activations - saved + entering[places][:, None] * (saved > 0)
        points.append(Point(seconds + more, resting, activations, moment + max(step.spared for step in chosen)))
    return points


def seconds_within(points: Sequence[Point], limit: float, held: float, stages: int) -> Array:
    """How long a stage takes, by where it begins and ends, when as little of it runs again as its memory needs.

    Args:
        limit: bytes of its rank.
        held: the microbatches in flight.
        stages: of its rank, which share it; the backward of one runs at a time.
    """
    if limit == math.inf:
        return points[0].seconds
    fastest = np.full_like(points[0].seconds, np.inf)
    before: tuple[Array, Array] | None = None
    for point in points:
        needs = stages * (point.resting + held * point.activations) + point.moment
        fits = np.isinf(fastest) & (needs <= limit)
        if before is None:
            fastest[fits] = point.seconds[fits]
        else:
            seconds, needed = before
            part = (needed[fits] - limit) / (needed[fits] - needs[fits])
            fastest[fits] = seconds[fits] + part * (point.seconds - seconds)[fits]
        if not np.isinf(fastest).any():
            break
        before = point.seconds, needs
    return fastest
