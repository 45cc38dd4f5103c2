"""Numbers that a traced model draws one by one from Python's ``random`` or from ``numpy.random``.

What a call is given (see ``graph.drawn_numbers``) is a number that the trace leaves open: what the model asks of it is
asked at every call, and what it computes by it is computed of that call's.

A call is given none until it depends on one.  LayerDrop draws a number for every layer and compares it with its rate,
also where that is zero: a number that is not given knows its range, and a comparison that is the same for the whole
range is answered.  The program draws what the model does, in its order, so that the generators go on as without it: a
whole number below another takes as many of their steps as it needs, which depends on what comes.
"""

from __future__ import annotations

import math
import operator
import random
import sys
import weakref
from collections.abc import Callable
from functools import partial, partialmethod
from typing import Any, NoReturn

import numpy as np
import torch

from autoparallel import _torch
from autoparallel.capture.tracing.stand_ins import replacement
from autoparallel.capture.tracing.trace import Trace, listening
from autoparallel.graph.drawn_numbers import MOST_BELOW, NUMPY, RANDOM, DrawsNumbersError
from autoparallel.graph.errors import refused_draw
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

    def _compare(self, comparison: Callable[[Any, Any], bool], other: Any) -> bool:
        if isinstance(other, int | float):
            answers = {comparison(end, other) for end in self._ends}
            if len(answers) == 1:
                return answers.pop()
        self._refuse()

    __lt__, __le__ = partialmethod(_compare, operator.lt), partialmethod(_compare, operator.le)
    __gt__, __ge__ = partialmethod(_compare, operator.gt), partialmethod(_compare, operator.ge)

    def _refuse(self, *_: Any) -> NoReturn:
        raise depends_on_draws(self._trace, self._source)

    __eq__ = __ne__ = __bool__ = __float__ = __int__ = __index__ = __round__ = __str__ = __format__ = _refuse
    __neg__ = __pos__ = __abs__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _refuse
    __hash__ = _refuse


def depends_on_draws(trace: Trace, source: str) -> DrawsNumbersError:
    """What says that a call is to be given the numbers that it draws, where all are of one kind at least twice as many
    as before."""
    script = trace.draw_scripts[source]
    if not any(script):
        script = (0,) * max(2 * len(trace.ahead.get(source, ())), len(script))
    return DrawsNumbersError(str(refused_draw(source, trace.drawn[source][-1])), source, script)


def require_dropped(trace: Trace) -> None:
    """Raises DrawsNumbersError where a call has kept a number that it has drawn and was not given, which may yet decide
    something."""
    for source, number in trace.ranges:
        if number() is not None:
            raise depends_on_draws(trace, source)


def _draw_one(source: str, ends: Callable[..., tuple[Any, Any]]) -> Callable[..., Any]:
    """What stands for a function that draws one number while a model is traced.

    Args:
        ends: takes what the function is given; raises TypeError where that asks for something else than one number.
    """

    def draw(trace: Trace, original: Callable[..., float], *args: Any, **kwargs: Any) -> Any:
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
    if (share := trace.draw(source, 0, line)) is not None:
        return low + (high - low) * share
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


# ------------------------------------------------------------------------------------------------------- whole numbers


def _draw_below(trace: Trace, source: str, below: int, line: str) -> Any:
    """A whole number below another, which the trace leaves open unless it fixes such numbers."""
    share = trace.draw(source, below, line)
    if share is not None:
        trace.has_open_whole = not trace.fixes_whole
        return int(share * below) if trace.fixes_whole else math.floor(share * below)
    if below > 1:
        if _torch.export.place_in_trace()[0] is not None:
            raise depends_on_draws(trace, source)
        trace.ranges.append((source, lambda: trace))  # a run goes on, so that a call is given all of them at once
    return (len(trace.ranges) - 1) % below  # another one each time: a model may draw until it has another


class _Generator(random.Random):
    """Python's generator, as a traced model has it: with all that is made of what it draws."""

    def random(self) -> Any:
        return random.random()

    def _randbelow(self, n: Any) -> Any:
        frame = sys._getframe(1)
        trace = listening()
        if trace is None or not n or n > MOST_BELOW:
            return _RANDRANGE(n)
        number = _draw_below(trace, RANDOM, int(n), line_of_frame(frame))
        return number if frame.f_code is random.Random.randrange.__code__ else int(number)


_RANDRANGE, _GENERATOR = random.randrange, _Generator()
_MADE_OF_DRAWS = ("choice", "choices", "randint", "randrange", "sample", "shuffle")


def _draw_of_generator(name: str, _: Trace, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands for a function of Python's ``random``."""
    return getattr(_GENERATOR, name)(*args, **kwargs)


def _randint(trace: Trace, original: Any, low: Any, high: Any = None, size: Any = None, dtype: Any = int) -> Any:
    first, count = (0, low) if high is None else (low, high - low)
    plain = size is None and dtype is int and isinstance(count, int) and isinstance(first, int)
    if not plain or not 0 < count <= MOST_BELOW:
        return original(low, high, size, dtype)
    return first + _draw_below(trace, NUMPY, count, line_of_frame(sys._getframe(1)))


def _choice(trace: Trace, original: Any, a: Any, size: Any = None, replace: bool = True, p: Any = None) -> Any:
    items = np.arange(a) if isinstance(a, int) else np.asarray(a)
    if size is not None or items.ndim != 1 or not 0 < len(items) <= MOST_BELOW:
        return original(a, size, replace, p)
    line = line_of_frame(sys._getframe(1))
    if p is None:
        place = int(_draw_below(trace, NUMPY, len(items), line))
    else:
        if np.shape(p) != items.shape or np.min(p) < 0 or abs(np.sum(p) - 1) > 1e-8:
            return original(a, size, replace, p)
        ends = np.cumsum(np.asarray(p, np.float64))
        share = _draw(trace, NUMPY, 0.0, 1.0, line)
        place = next((i for i, end in enumerate((ends / ends[-1]).tolist()) if share < end), len(items) - 1)
    return int(items[place]) if isinstance(a, int) else items[place]


def _set_state(source: str, trace: Trace, set_state: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Has a generator go on from elsewhere, unless it was drawn from before, which is not seen there."""
    if trace.draws.get(source):
        raise refused_draw(f"{source}, which is set back to a state,", line_of_frame(sys._getframe(1)))
    set_state(*args, **kwargs)


DRAWS: tuple[tuple[Any, str, Any], ...] = (
    *(replacement(owner, name, _draw_one(source, ends)) for owner, name, source, ends in _FUNCTIONS),
    *(replacement(random, name, partial(_draw_of_generator, name)) for name in _MADE_OF_DRAWS),
    replacement(np.random, "randint", _randint),
    replacement(np.random, "choice", _choice),
    replacement(random, "setstate", partial(_set_state, RANDOM)),
    replacement(np.random, "set_state", partial(_set_state, NUMPY)),
)
"""Functions that draw, where they stand and by their names, with what stands for them while a model is traced."""
