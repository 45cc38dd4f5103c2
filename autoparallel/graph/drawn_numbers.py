"""Numbers that a call draws one by one and may decide by, from Python's ``random``, ``numpy.random`` or
``torch.rand([])``: they are drawn ahead, and a program is given them beside the arguments.

What comes next depends on what is drawn: ``random.choice`` takes as many steps of the generator as it needs.  So
numbers are drawn ahead by a script, one for each order in which the model has drawn; the trace of a call goes by those
scripts that begin as it does.

Before:
    model(x)                # if random.random() < self.rate: return x
After:
    program(x, number), where number = random.random(); one program for each answer
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from autoparallel.graph.captured import NumberSpec
from autoparallel.graph.errors import CaptureError, ReadAgainError
from autoparallel.operators.random import RandomState, number_alone

RANDOM, NUMPY, TORCH = "Python's random", "numpy.random", "torch.rand([])"
"""What they are drawn from."""

Script = tuple[int, ...]
"""What is drawn one after another: 0 stands for a number in [0, 1), and any other for a whole one below it."""

MOST_BELOW = 2**40
"""A whole number below more than this is not told exactly by one in [0, 1)."""

CHECKS = "beartype"
"""What draws from Python's, too, by which only the type of some item is looked at."""

_GENERATORS: Mapping[
    str, tuple[Callable[[], Any], Callable[[Any], None], Callable[[], float], Callable[[int], int]]
] = {
    RANDOM: (random.getstate, random.setstate, random.random, random.randrange),
    NUMPY: (np.random.get_state, np.random.set_state, np.random.random_sample, np.random.randint),
    CHECKS: (random.getstate, random.setstate, partial(random.getrandbits, 32), random.randrange),
}

_MOST_SCRIPTS = 16
"""In so many orders a model may draw."""


class DrawsNumbersError(ReadAgainError):
    """A call depends on numbers that it draws, and is not given them yet.

    Attributes:
        source: what they are drawn from.
        script: what it is to be given.
    """

    def __init__(self, text: str, source: str, script: Script) -> None:
        super().__init__(text)
        self.source, self.script = source, script


def label_of(source: str, script: Script) -> str:
    """The name under which a call is given what it draws by a script."""
    return f"{source}: {' '.join(map(str, script))}" if any(script) else source


def script_of(label: str, count: int) -> tuple[str, Script]:
    """The source, and the script, behind such a name.

    Args:
        count: how many numbers a call is given.
    """
    source, _, script = label.partition(": ")
    return source, tuple(map(int, script.split())) if script else (0,) * count


def add_script(scripts: Mapping[str, Script], error: DrawsNumbersError) -> dict[str, Script]:
    """The scripts of a model's calls, by their names, with one more; those that it goes on from are left out.

    Raises:
        CaptureError: where the model draws in too many orders.
    """
    label, script = label_of(error.source, error.script), error.script
    before = {
        name: numbers
        for name, numbers in scripts.items()
        if script_of(name, 0)[0] != error.source or script[: len(numbers)] != numbers
    }
    if len(before) >= _MOST_SCRIPTS or scripts.get(label) == script:
        raise CaptureError(str(error))
    return {**before, label: script}


def drawn_ahead(scripts: Mapping[str, Script], state: RandomState) -> dict[str, tuple[float, ...]]:
    """What comes next, in [0, 1); the generators of Python and numpy stay as they are.

    Args:
        scripts: what is drawn, by their names.
        state: what the call's random numbers of torch depend on.
    """
    drawn: dict[str, tuple[float, ...]] = {}
    for label, script in scripts.items():
        source, _ = script_of(label, 0)
        if source == TORCH:
            drawn[label] = tuple([number_alone(state, place) for place in range(len(script))])
            continue
        get_state, set_state, *_ = _GENERATORS[source]
        before = get_state()
        try:
            drawn[label] = tuple([_draw(source, below) for below in script])
        finally:
            set_state(before)
    return drawn


def _draw(source: str, below: int) -> float:
    """Draws a number; a whole one is told as the middle of its part of [0, 1)."""
    _, _, number, whole = _GENERATORS[source]
    return (whole(below) + 0.5) / below if below else number()


def move_on(scripts: Mapping[str, Script]) -> None:
    """Draws from the generators of Python and numpy.

    Args:
        scripts: what is drawn, by its source.
    """
    for source in _GENERATORS:
        for below in scripts.get(source, ()):
            _draw(source, below)


def describe_draws(drawn: Mapping[str, tuple[float, ...]]) -> list[NumberSpec]:
    """The inputs that they are, which are left open from the first call on."""
    return [NumberSpec(float, number, is_drawn=True) for numbers in drawn.values() for number in numbers]
