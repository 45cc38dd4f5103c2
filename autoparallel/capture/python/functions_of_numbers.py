"""``math.exp(-10 * step)``, ``np.cos(t)``: functions of Python and of numpy of numbers that a trace leaves open.

They read what is no number of Python's into one, which fixes it: a schedule in ``forward`` would be a trace for each of
its steps.  torch's own functions of such numbers stand for them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from autoparallel._torch.numbers import FUNCTIONS, is_whole

_OPEN = frozenset({torch.SymInt, torch.SymFloat})


def _power(x: Any, y: Any) -> Any:
    x = torch.sym_float(x)
    return _power_of(x, y) if isinstance(x, torch.SymFloat) else x ** torch.sym_float(y)


def _log(x: Any, base: Any = math.e) -> Any:
    numerator, denominator = (FUNCTIONS["log"](n) for n in (x, base))
    return numerator / denominator


def _power_of(self: torch.SymFloat, exponent: Any) -> Any:
    """As ``**``, which torch refuses of a number below 0, also where the exponent is whole."""
    if is_whole(exponent):
        return self.__float_pow__(exponent)
    return _POWER(self, exponent)


def _quotient(x: Any, y: Any) -> Any:
    """As ``//`` of floats, which is not the next whole number below ``x / y`` where that is rounded."""
    return torch.sym_float(math.floor((x - x % y) / y + 0.5))


def _divides(kind: Any, name: str) -> Callable[[Any, Any], Any]:
    """What stands for ``//`` of open numbers, from the left or from the right."""
    of_whole, is_reflected = vars(kind)[name], name == "__rfloordiv__"

    def divide(self: Any, other: Any) -> Any:
        if {type(self), type(other)} in _OF_FLOATS:
            x, y = map(torch.sym_float, (other, self) if is_reflected else (self, other))
            return _quotient(x, y)
        return of_whole(self, other)

    return divide


_OF_FLOATS = [{torch.SymFloat, kind} for kind in (torch.SymFloat, torch.SymInt, float, int)] + [{torch.SymInt, float}]
_POWER = vars(torch.SymFloat)["__pow__"]

_OF_OPEN: Mapping[str, Callable[..., Any]] = {
    **FUNCTIONS,
    "log": _log,
    "fabs": lambda x: abs(torch.sym_float(x)),
    "pow": _power,
    "radians": lambda x: torch.sym_float(x) * (math.pi / 180),
    "degrees": lambda x: torch.sym_float(x) * (180 / math.pi),
}


def _stand_in(function: Callable[..., Any], of_open: Callable[..., Any]) -> Callable[..., Any]:
    """A function of ``math`` that also takes open numbers."""

    @functools.wraps(function)
    def of_any(*values: Any) -> Any:
        return function(*values) if _OPEN.isdisjoint(map(type, values)) else of_open(*values)

    return of_any


OF_MATH: Mapping[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    name: (getattr(math, name), _stand_in(getattr(math, name), of_open)) for name, of_open in _OF_OPEN.items()
}
"""Functions of ``math`` by their names, and what stands for them while a model is traced."""

NAMES: tuple[tuple[Any, str, Any], ...] = (
    *((math, name, stand_in) for name, (_, stand_in) in OF_MATH.items()),
    # numpy calls methods of these names of what is no number to it.
    *((kind, name, of_open) for kind in _OPEN for name, of_open in _OF_OPEN.items() if name != "pow"),
    *((kind, name, _divides(kind, name)) for kind in _OPEN for name in ("__floordiv__", "__rfloordiv__")),
    (torch.SymFloat, "__pow__", _power_of),
    (torch.SymBool, "__float__", lambda truth: float(bool(truth))),
)
"""Where they stand."""
