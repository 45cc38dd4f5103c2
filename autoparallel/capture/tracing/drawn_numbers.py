"""Numbers that a traced model draws from Python's ``random``, where they decide nothing.

LayerDrop draws a number for every layer and compares it with its rate, also where that is zero.  So a number that is
drawn while a model is traced knows only its range: a comparison that is the same for the whole range is answered, and
whatever else is done with the number is refused.  The program draws as often as the model does, so that Python's
generator goes on as without it; each draw takes one step of it.
"""

from __future__ import annotations

import math
import operator
import random
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from autoparallel.capture.tracing.trace import listening
from autoparallel.graph.captured import refused_draw
from autoparallel.graph.lines import line_of_frame

_LARGEST = 1 - 2.0**-53  # that random() returns


class DrawnNumber:
    """A number between two ends, both included.

    Args:
        ends: of what may be drawn, the smaller one first.
        line: at which it is drawn.

    Raises:
        CaptureError: when something is done with it that depends on the draw.
    """

    def __init__(self, ends: tuple[float, float], line: str) -> None:
        self._ends, self._line = ends, line

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
        raise refused_draw("Python's random", self._line)

    __eq__ = __ne__ = __bool__ = __float__ = __int__ = __index__ = __round__ = __str__ = __format__ = _refuse
    __neg__ = __pos__ = __abs__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _refuse
    __hash__ = _refuse


def require_dropped(drawn: Sequence[tuple[str, weakref.ref[DrawnNumber]]]) -> None:
    """Raises CaptureError where a call has kept a number that it has drawn, which may yet decide something.

    Args:
        drawn: as ``Trace.drawn``.
    """
    for line, number in drawn:
        if number() is not None:
            raise refused_draw("Python's random", line)


def draw_random() -> Any:
    """As ``random.random()``; while a model is traced, what is known of it."""
    return _RANDOM() if listening() is None else _draw(0.0, _LARGEST)


def draw_uniform(a: Any, b: Any) -> Any:
    """As ``random.uniform()``; while a model is traced, what is known of it."""
    if listening() is None or not all(isinstance(x, int | float) and math.isfinite(x) for x in (a, b)):
        return _UNIFORM(a, b)
    return _draw(a + (b - a) * 0.0, a + (b - a) * _LARGEST)


def _draw(*ends: float) -> DrawnNumber:
    trace = listening()
    assert trace is not None
    line = line_of_frame(sys._getframe(2))
    number = DrawnNumber((min(ends), max(ends)), line)
    trace.drawn.append((line, weakref.ref(number)))
    return number


_RANDOM, _UNIFORM = random.random, random.uniform
NAMES: tuple[tuple[Any, str, Any], ...] = ((random, "random", draw_random), (random, "uniform", draw_uniform))
