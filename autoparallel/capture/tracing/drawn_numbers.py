"""Numbers that a traced model draws one by one from Python's ``random`` or from ``numpy.random``.

What a call is given (see ``graph.drawn_numbers``) is a number that the trace leaves open: what the model asks of it is
asked at every call, and what it computes by it is computed of that call's.

A call is given none until it depends on one.  LayerDrop draws a number for every layer and compares it with its rate,
also where that is zero: a number that is not given knows its range, and a comparison that is the same for the whole
range is answered.  The program draws as often as the model does, so that the generators go on as without it; each
draw takes one step of theirs.
"""

from __future__ import annotations

import math
import operator
import random
import sys
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch

from autoparallel.capture.tracing.trace import Trace, listening
from autoparallel.graph.captured import refused_draw
from autoparallel.graph.drawn_numbers import NUMPY, RANDOM, DrawsNumbersError
from autoparallel.graph.lines import line_of_frame

_LARGEST = 1 - 2.0**-53  # that random() returns


class DrawnNumber:
    """A number between two ends, both included.

    Args:
        ends: of what may be drawn, the smaller one first.
        trace: in which it is drawn.
        source: what from.

    Raises:
        DrawsNumbersError: when something is done with it that depends on the draw.
    """

    def __init__(self, ends: tuple[float, float], trace: Trace, source: str) -> None:
        self._ends, self._trace, self._source = ends, trace, source

    def _compare(self, other: Any, comparison: Callable[[Any, Any], bool]) -> bool:
        if isinstance(other, int | float):
            answers = {comparison(end, other) for end in self._ends}
            if len(answers) == 1:
                return answers.pop()
        self._refuse()

    def __lt__(self, other: Any) -> bool:
        return self._compare(other, operator.lt)

    def __le__(self, other: Any) -> bool:
        return self._compare(other, operator.le)

    def __gt__(self, other: Any) -> bool:
        return self._compare(other, operator.gt)

    def __ge__(self, other: Any) -> bool:
        return self._compare(other, operator.ge)

    def _refuse(self, *_: Any) -> NoReturn:
        raise depends_on_draws(self._trace, self._source)

    __eq__ = __ne__ = __bool__ = __float__ = __int__ = __index__ = __round__ = __str__ = __format__ = _refuse
    __neg__ = __pos__ = __abs__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _refuse
    __hash__ = _refuse


def depends_on_draws(trace: Trace, source: str) -> DrawsNumbersError:
    """What says that a call is to be given the numbers that it draws, and at least twice as many as before."""
    lines = trace.drawn[source]
    return DrawsNumbersError(
        str(refused_draw(source, lines[-1])), source, max(2 * len(trace.ahead.get(source, ())), len(lines))
    )


def require_dropped(trace: Trace) -> None:
    """Raises DrawsNumbersError where a call has kept a number that it has drawn and was not given, which may yet decide
    something."""
    for source, number in trace.ranges:
        if number() is not None:
            raise depends_on_draws(trace, source)


def _stand_in(source: str, original: Callable[..., float], ends: Callable[..., tuple[Any, Any]]) -> Any:
    """What stands for a function that draws one number while a model is traced.

    Args:
        ends: takes what the function is given; raises TypeError where that asks for something else than one number.
    """

    def draw(*args: Any, **kwargs: Any) -> Any:
        trace = listening()
        if trace is None:
            return original(*args, **kwargs)
        try:
            low, high = ends(*args, **kwargs)
        except TypeError:
            return original(*args, **kwargs)
        if not all(isinstance(x, int | float | torch.SymFloat) for x in (low, high)):
            return original(*args, **kwargs)
        return _draw(trace, source, low, high, line_of_frame(sys._getframe(1)))

    return draw


def _draw(trace: Trace, source: str, low: Any, high: Any, line: str) -> Any:
    """A number from ``low`` to ``high``, as ``uniform()`` makes it."""
    ahead, drawn = trace.ahead.get(source, ()), trace.drawn.setdefault(source, [])
    drawn.append(line)
    if len(drawn) <= len(ahead):
        return low + (high - low) * ahead[len(drawn) - 1]
    if not all(isinstance(x, int | float) and math.isfinite(x) for x in (low, high)):
        raise depends_on_draws(trace, source)
    ends = low, low + (high - low) * _LARGEST
    number = DrawnNumber((min(ends), max(ends)), trace, source)
    trace.ranges.append((source, weakref.ref(number)))
    return number


def _of_random() -> tuple[float, float]:
    return 0.0, 1.0


def _of_uniform(a: Any, b: Any) -> tuple[Any, Any]:
    return a, b


def _of_numpy(low: Any = 0.0, high: Any = 1.0) -> tuple[Any, Any]:
    return low, high


_FUNCTIONS: tuple[tuple[Any, str, str, Callable[..., tuple[Any, Any]]], ...] = (
    (random, "random", RANDOM, _of_random),
    (random, "uniform", RANDOM, _of_uniform),
    (np.random, "random", NUMPY, _of_random),
    (np.random, "random_sample", NUMPY, _of_random),
    (np.random, "rand", NUMPY, _of_random),
    (np.random, "uniform", NUMPY, _of_numpy),
)
_STAND_INS = [(owner, name, getattr(owner, name), source, ends) for owner, name, source, ends in _FUNCTIONS]
DRAWS: tuple[tuple[Any, str, Any, Any], ...] = tuple(
    (owner, name, original, _stand_in(source, original, ends)) for owner, name, original, source, ends in _STAND_INS
)
"""Functions that draw one number, where they stand and by their names, with what stands for them while a model is
traced."""
