"""``if torch.rand([]) < self.layerdrop``: a tensor of one number that a traced model draws with torch and decides by.

It is made of a number that the call is given (see ``drawn_numbers``), and so is what is told of comparisons with it.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autoparallel.capture.tracing.drawn_numbers import depends_on_draws
from autoparallel.capture.tracing.trace import Trace
from autoparallel.graph.drawn_numbers import TORCH
from autoparallel.graph.lines import line_of_frame
from autoparallel.operators.random import digits_of

_LEFT_AS_THEY_ARE = frozenset(("generator", "out", "names"))


def _rand(trace: Trace, func: Any, *size: Any, **options: Any) -> Tensor:
    sizes = options.get("size", size[0] if len(size) == 1 and isinstance(size[0], list | tuple) else size)
    if len(sizes) or not _LEFT_AS_THEY_ARE.isdisjoint(options):
        drawn: Tensor = func(*size, **options)
        return drawn
    number = trace.draw(TORCH, 0, line_of_frame(sys._getframe(1)))
    if number is None:
        raise depends_on_draws(trace, TORCH)
    if (digits := digits_of(options.get("dtype") or torch.get_default_dtype())) < digits_of(torch.float64):
        number = torch.sym_float(math.floor(number * 2.0**digits)) * 2.0**-digits
    options.pop("size", None)
    tensor = torch.full((), number, **options)
    trace.scalars[id(tensor)] = tensor, tensor._version, number
    return tensor


def _compare(comparison: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """What compares such a tensor with a number, of which it is known how they compare."""

    def compare(trace: Trace, func: Any, *args: Any, **kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        scalar, *others = args
        number = number_of(trace, scalar)
        if number is not None and len(others) == 1 and isinstance(others[0], int | float | torch.SymFloat):
            answer = comparison(number, _round_like(others[0], scalar.dtype))
            trace.scalars[id(result)] = result, result._version, answer
        return result

    return compare


def _round_like(number: Any, dtype: torch.dtype) -> Any:
    """A number as torch rounds it that compares a tensor of a dtype with it."""
    return float(np.float32(number)) if isinstance(number, float) and dtype == torch.float32 else number


def number_of(trace: Trace, tensor: Any) -> Any:
    """The number, or the truth value, that is known of a tensor; None where none is."""
    scalar = trace.scalars.get(id(tensor))
    return None if scalar is None or scalar[1] != tensor._version else scalar[2]


DRAWING: dict[Any, Callable[..., Any]] = {
    torch.rand: _rand,
    **{
        getattr(owner, name): _compare(getattr(operator, name))
        for owner in (torch, Tensor)
        for name in ("lt", "le", "gt", "ge")
    },
    **{getattr(Tensor, f"__{name}__"): _compare(getattr(operator, name)) for name in ("lt", "le", "gt", "ge")},
}
"""The functions of torch with what takes their place while a model is traced."""
