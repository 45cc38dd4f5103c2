"""``max`` and ``min`` of what a trace leaves open: of numbers, and of tensors of one element.

Python compares one with the next, and the first one of equals stays: it alone has the gradient.  ``torch.export`` puts
``torch.maximum`` and ``clamp`` in their place, which share it, and take NaN for the largest.
"""

from __future__ import annotations

import builtins
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from autoparallel import _torch
from autoparallel.capture.tracing.functions_of_numbers import OPEN
from autoparallel.capture.tracing.trace import listening


def _chosen(original: Callable[..., Any], choose: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """What stands for ``max`` or ``min``.

    Args:
        choose: one of two, of which at least one is open.
    """

    @functools.wraps(original)
    def extreme(*values: Any, **options: Any) -> Any:
        if len(values) == 1 and isinstance(values[0], Iterable):
            values = ([*values[0]],)
        items: Sequence[Any] = values[0] if len(values) == 1 and isinstance(values[0], list) else values
        if options.keys() <= {"default"} and _are_open(items):
            return functools.reduce(lambda x, y: choose(x, y) if _are_open((x, y)) else original(x, y), items)
        return original(*values, **options)

    return extreme


def _are_open(values: Sequence[Any]) -> bool:
    """Whether a trace chooses among some values: numbers, and tensors of one form that hold one each."""
    kinds = {*map(type, values)}
    if not kinds.isdisjoint(OPEN):
        return len(values) > 1 and kinds <= {*OPEN, float, int}
    tensors = [x for x in values if isinstance(x, Tensor)] if listening() is not None else []
    if not tensors or len({(x.shape, x.dtype, x.device) for x in tensors}) > 1 or tensors[0].numel() != 1:
        return False
    numbers = (int, float) if tensors[0].is_floating_point() else (int,)
    return all(isinstance(x, Tensor) or type(x) in numbers for x in values)


def _choose(of_two: Callable[[Any, Any], Any], is_better: Callable[[Any, Any], Any], x: Any, y: Any) -> Any:
    """The first one of two, unless the second one is better, which NaN is not.

    Args:
        of_two: what torch has for numbers, which does not tell which one came first.
    """
    if isinstance(x, Tensor) or isinstance(y, Tensor):
        return torch.where(is_better(y, x), y, x)
    trace, is_of_floats = listening(), isinstance(x, torch.SymFloat | float) or isinstance(y, torch.SymFloat | float)
    if trace is None or not is_of_floats or not any(_torch.export.is_read(n, trace.numbers) for n in (x, y)):
        return of_two(x, y)
    first, second = (torch.scalar_tensor(number, dtype=torch.float64) for number in (x, y))
    return torch.ops.aten.item.default(torch.where(is_better(second, first), second, first))


def names() -> tuple[tuple[Any, str, Any], ...]:
    """The names that are replaced while a model is traced."""
    return (
        (builtins, "max", _chosen(max, functools.partial(_choose, torch.sym_max, operator.gt))),
        (builtins, "min", _chosen(min, functools.partial(_choose, torch.sym_min, operator.lt))),
        (*_torch.export.overriding(), nullcontext),
    )
