"""How far rounding alone may move what a training run shows: measured, by moving it.

[Note: a tolerance that is measured] A parallel program adds in another order, so its results are rounded otherwise.
In float64 nothing of that reaches 1e-9; in the user's own dtypes it may be anything, and no number fits all models.
So the plain model is trained a few times more with all parameters, floating-point buffers and inputs moved by the
relative rounding error of their dtype, up or down at random, and every operator's result moved in the same way,
forward and backward (Monte Carlo arithmetic: Parker 1997).  What a quantity moves by at most, times ``FACTOR``, is its
tolerance, and at least ``ROUNDINGS`` roundings of its largest element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autoparallel import _torch
from autoparallel.rules import operator_name
from autoparallel.tools.parity.comparison import Record, difference
from autoparallel.tools.parity.task import Task
from autoparallel.tools.parity.training import Draws, LimitOf, call, module_stack, observe

TOLERANCES = {torch.float64: (1e-9, 1e-6), torch.float32: (1e-5, 1e-2)}
"""By dtype: where nothing is cast to a narrower dtype, and where the model itself does that."""

RUNS = 4
FACTOR = 4.0
ROUNDINGS = 2.0


class _Noise(TorchDispatchMode):
    """Moves every new floating-point tensor by the rounding error of its dtype."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(r.alias_info is not None for r in func._schema.returns):
            return result
        return pytree.tree_map_only(Tensor, lambda x: moved(x, self.generator), result)


def moved(x: Tensor, generator: torch.Generator) -> Tensor:
    """A floating-point tensor with every element rounded up or down at random; others as they are."""
    if not (x.is_floating_point() or x.is_complex()) or not x.numel():
        return x
    sign = torch.randint(0, 2, x.shape, generator=generator) * 2 - 1
    return x * (1 + torch.finfo(x.dtype).eps * sign).to(x.dtype)


def noisy_records(task: Task, run: int, limit_of: LimitOf) -> list[Record]:
    """What a training run of the plain model shows with everything moved, in a way that the run's number tells.

    It takes a process of its own: what calls change outside of the model (a count of the loss function, a global) is no
    part of a copy, and a second run would begin where the first one has left it.
    """
    generator = torch.Generator().manual_seed(task.seed + 1 + run)
    noisy = task.copy()
    inputs = pytree.tree_leaves([(b.args, b.kwargs) for b in noisy.batches])
    with torch.no_grad():
        for x in (*noisy.model.parameters(), *noisy.model.buffers(), *inputs):
            if isinstance(x, Tensor) and x.is_floating_point():
                x.copy_(moved(x, generator))
    with _Noise(generator):
        return list(observe(noisy.model, noisy, limit_of))


def tolerances_of(reference: Sequence[Record], runs: Sequence[Sequence[Record]]) -> dict[tuple[int, str, str], float]:
    """The tolerance of everything that a training run of the plain model shows, by what noisy ones show."""
    spread = {(step, kind, name): 0.0 for step, kind, name, _ in reference}
    values = {(step, kind, name): value for step, kind, name, value in reference}
    for step, kind, name, value in (record for records in runs for record in records):
        expected = values.get((step, kind, name))
        if value is not None and expected is not None:
            off = difference(value, expected)
            spread[step, kind, name] = max(spread[step, kind, name], off if math.isfinite(off) else 0.0)
    return {key: max(FACTOR * spread[key], _floor(values[key])) for key in spread}


def _floor(x: Tensor | None) -> float:
    if x is None or not x.numel() or not (x.is_floating_point() or x.is_complex()):
        return 0.0
    largest = x.abs().nan_to_num(0.0, 0.0, 0.0).max().item()
    return ROUNDINGS * torch.finfo(x.dtype).eps * min(1.0, largest)


class _Casts(_torch.export.AttendingMode):
    """Notes where a model makes a result that is narrower than all its operands, and than ``dtype``."""

    def __init__(self, dtype: torch.dtype, path: Callable[[], str]) -> None:
        super().__init__()
        self.dtype, self.path = dtype, path
        self.places: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        widths = [x.dtype.itemsize for x in _floating_tensors((args, kwargs))]
        for x in _floating_tensors(result):
            if widths and x.dtype.itemsize < min(max(widths), self.dtype.itemsize):
                narrow = str(x.dtype).removeprefix("torch.")
                self.places[f"{self.path()}: {operator_name(func)} to {narrow}"] = None
        return result


def _floating_tensors(values: Any) -> list[Tensor]:
    return [x for x in _torch.tensors.tensors_in(values) if x.is_floating_point()]


def narrowing_casts(task: Task) -> tuple[str, ...]:
    """Where the plain model itself casts to a dtype narrower than the task's: ``module path: operator to dtype``."""
    task, dtype = task.copy(), task.dtype or torch.float64
    stack = module_stack(task.model)
    casts = _Casts(dtype, lambda: (stack[-1] if stack else "") or "the top level")
    with casts, Draws(task.seed).call():
        call(task.model, task, task.batch(1))
    return tuple(casts.places)
