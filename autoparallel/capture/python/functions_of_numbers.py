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

from autoparallel._torch.numbers import FUNCTIONS

_OPEN = frozenset({torch.SymInt, torch.SymFloat})


def _power(x: Any, y: Any) -> Any:
    return torch.sym_float(x) ** torch.sym_float(y)


def _log(x: Any, base: Any = math.e) -> Any:
    numerator, denominator = (FUNCTIONS["log"](n) for n in (x, base))
    return numerator / denominator


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
)
"""Where they stand."""
