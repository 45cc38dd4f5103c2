"""``math.exp(-10 * step)``, ``np.cos(t)``: functions of Python and of numpy of numbers that a trace leaves open.

They read what is no number of Python's into one, which fixes it: a schedule in ``forward`` would be a trace for each of
its steps.  torch's own functions of such numbers stand for them.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from autoparallel._torch.numbers import FUNCTIONS, is_whole

OPEN = frozenset({torch.SymInt, torch.SymFloat})
"""The types of numbers that a trace leaves open."""


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


def _remainder(x: Any, y: Any) -> Any:
    """As ``math.fmod``: of the sign of the first one, where ``%`` is of that of the second."""
    rest = abs(torch.sym_float(x)) % abs(torch.sym_float(y))
    return rest if x >= 0 else -rest


def _with_sign(x: Any, y: Any) -> Any:
    size = abs(torch.sym_float(x))
    return -size if y < 0 or y == 0 and math.copysign(1.0, float(y)) < 0 else size


def _is_finite(x: Any) -> bool:
    return bool(x >= -_LARGEST) and bool(x <= _LARGEST)


def _is_infinite(x: Any) -> bool:
    return bool(x > _LARGEST) or bool(x < -_LARGEST)


def _is_nan(x: Any) -> bool:
    return not (bool(x <= _LARGEST) or bool(x > _LARGEST))


_LARGEST = sys.float_info.max
_OF_FLOATS = [{torch.SymFloat, kind} for kind in (torch.SymFloat, torch.SymInt, float, int)] + [{torch.SymInt, float}]
_POWER = vars(torch.SymFloat)["__pow__"]

_OF_OPEN: dict[str, Callable[..., Any]] = {
    **FUNCTIONS,
    "log": _log,
    "fabs": lambda x: abs(torch.sym_float(x)),
    "pow": _power,
    "radians": lambda x: torch.sym_float(x) * (math.pi / 180),
    "degrees": lambda x: torch.sym_float(x) * (180 / math.pi),
    "fmod": _remainder,
    "copysign": _with_sign,
    "isfinite": _is_finite,
    "isinf": _is_infinite,
    "isnan": _is_nan,
}

_OF_NUMPY: dict[str, Callable[..., Any]] = {
    "deg2rad": _OF_OPEN["radians"],
    "rad2deg": _OF_OPEN["degrees"],
    **{f"arc{name}": FUNCTIONS[f"a{name}"] for name in ("sin", "cos", "tan")},
    "rint": lambda x: torch.sym_float(round(torch.sym_float(x))),
}
"""What numpy calls otherwise than ``math`` does."""


def _interpolate(x: Any, xp: Any, fp: Any, left: Any = None, right: Any = None, period: Any = None) -> Any:
    """As ``np.interp``: the model asks between which points a number is."""
    if period is not None:
        return np.interp(float(x), xp, fp, left, right, period)
    points, values = np.asarray(xp, np.float64).tolist(), np.asarray(fp, np.float64).tolist()
    if x < points[0]:
        return values[0] if left is None else float(left)
    for i in range(len(points) - 1):
        if x < points[i + 1]:
            slope = (values[i + 1] - values[i]) / (points[i + 1] - points[i])
            return slope * (torch.sym_float(x) - points[i]) + values[i]
    return values[-1] if right is None or x == points[-1] else float(right)


def _round(x: Any, decimals: int = 0, **_: Any) -> Any:
    return round(torch.sym_float(x), decimals) if decimals else torch.sym_float(round(torch.sym_float(x)))


def _sign(x: Any, **_: Any) -> float:
    return 1.0 if x > 0 else -1.0 if x < 0 else 0.0


def _clip(x: Any, a_min: Any = None, a_max: Any = None, **_: Any) -> Any:
    x = torch.sym_float(x)
    x = x if a_min is None else torch.sym_max(x, torch.sym_float(a_min))
    return x if a_max is None else torch.sym_min(x, torch.sym_float(a_max))


class _NumpyFunction:
    """A function of numpy that also takes open numbers, of which numpy itself makes whole ones, or fixes them."""

    def __init__(self, function: Callable[..., Any], of_open: Callable[..., Any]) -> None:
        self._function, self._of_open = function, of_open
        functools.update_wrapper(self, function, assigned=("__name__", "__doc__"), updated=())

    def __call__(self, *values: Any, **options: Any) -> Any:
        is_open = not OPEN.isdisjoint(map(type, values))
        return (self._of_open if is_open else self._function)(*values, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)


_REPLACED_IN_NUMPY: Mapping[str, Callable[..., Any]] = {
    "floor": lambda x: torch.sym_float(math.floor(x)), "ceil": lambda x: torch.sym_float(math.ceil(x)),
    "trunc": lambda x: torch.sym_float(math.trunc(x)),
    "minimum": lambda x, y: torch.sym_min(torch.sym_float(x), torch.sym_float(y)),
    "maximum": lambda x, y: torch.sym_max(torch.sym_float(x), torch.sym_float(y)), "clip": _clip,
    "sign": _sign, "interp": _interpolate, "round": _round, "around": _round, "isfinite": _is_finite,
    "isinf": _is_infinite, "isnan": _is_nan,
}  # fmt: skip
OF_NUMPY: Mapping[str, tuple[Any, Any]] = {
    name: (getattr(np, name), _NumpyFunction(getattr(np, name), of_open))
    for name, of_open in _REPLACED_IN_NUMPY.items()
}
"""Functions of numpy by their names, and what stands for them while a model is traced."""


def _stand_in(function: Callable[..., Any], of_open: Callable[..., Any]) -> Callable[..., Any]:
    """A function of ``math`` that also takes open numbers."""

    @functools.wraps(function)
    def of_any(*values: Any) -> Any:
        return function(*values) if OPEN.isdisjoint(map(type, values)) else of_open(*values)

    return of_any


OF_MATH: Mapping[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    name: (getattr(math, name), _stand_in(getattr(math, name), of_open)) for name, of_open in _OF_OPEN.items()
}
"""Functions of ``math`` by their names, and what stands for them while a model is traced."""

NAMES: tuple[tuple[Any, str, Any], ...] = (
    *((math, name, stand_in) for name, (_, stand_in) in OF_MATH.items()),
    # numpy calls methods of these names of what is no number to it.
    *((np, name, stand_in) for name, (_, stand_in) in OF_NUMPY.items()),
    *((kind, name, of_open) for kind in OPEN for name, of_open in (_OF_OPEN | _OF_NUMPY).items() if name != "pow"),
    *((kind, name, _divides(kind, name)) for kind in OPEN for name in ("__floordiv__", "__rfloordiv__")),
    (torch.SymFloat, "__pow__", _power_of),
    (torch.SymBool, "__float__", lambda truth: float(bool(truth))),
)
"""Where they stand."""
