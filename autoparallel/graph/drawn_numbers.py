"""Numbers that a call draws one by one and may decide by, from Python's ``random``, ``numpy.random`` or
``torch.rand([])``: they are drawn ahead, and a program is given them beside the arguments.

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

from autoparallel.graph.captured import NumberSpec, ReadAgainError
from autoparallel.operators.random import RandomState, number_alone

DRAWS = "numbers that the call draws"
"""The name of the argument that holds them."""

RANDOM, NUMPY, TORCH = "Python's random", "numpy.random", "torch.rand([])"
"""What they are drawn from."""

CHECKS = "beartype"
"""What draws from Python's, too, by which only the type of some item is looked at."""

_GENERATORS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], None], Callable[[], float]]] = {
    RANDOM: (random.getstate, random.setstate, random.random),
    NUMPY: (np.random.get_state, np.random.set_state, np.random.random_sample),
    CHECKS: (random.getstate, random.setstate, partial(random.getrandbits, 32)),
}


class DrawsNumbersError(ReadAgainError):
    """A call depends on numbers that it draws, and is not given as many yet.

    Attributes:
        source: what they are drawn from.
        count: how many it is to be given.
    """

    def __init__(self, text: str, source: str, count: int) -> None:
        super().__init__(text)
        self.source, self.count = source, count


def drawn_ahead(counts: Mapping[str, int], state: RandomState) -> dict[str, tuple[float, ...]]:
    """What comes next, in [0, 1); the generators of Python and numpy stay as they are.

    Args:
        counts: how many numbers, by what they are drawn from.
        state: what the call's random numbers of torch depend on.
    """
    drawn: dict[str, tuple[float, ...]] = {}
    for source, count in counts.items():
        if source == TORCH:
            drawn[source] = tuple([number_alone(state, place) for place in range(count)])
            continue
        get_state, set_state, draw = _GENERATORS[source]
        before = get_state()
        try:
            drawn[source] = tuple([draw() for _ in range(count)])
        finally:
            set_state(before)
    return drawn


def move_on(counts: Mapping[str, int]) -> None:
    """Draws so many numbers from the generators of Python and numpy."""
    for source, (_, _, draw) in _GENERATORS.items():
        for _ in range(counts.get(source, 0)):
            draw()


def describe_draws(drawn: Mapping[str, tuple[float, ...]]) -> list[NumberSpec]:
    """The inputs that they are, which are left open from the first call on."""
    return [NumberSpec(float, number, is_drawn=True) for numbers in drawn.values() for number in numbers]


def without_draws(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], Mapping[str, tuple[Any, ...]]]:
    """The keyword arguments of a call, and what is drawn for it."""
    arguments = dict(kwargs)
    return arguments, arguments.pop(DRAWS, {})
