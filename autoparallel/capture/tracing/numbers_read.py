"""Python that reads a tensor's numbers: what it is told (see ``inputs_read``)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autoparallel import _torch
from autoparallel.capture.tracing.trace import Trace, listening, refuse
from autoparallel.graph.captured import note_raised


def _read(trace: Trace, func: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """What Python is told that reads a tensor's values."""
    answer = trace.read(lambda values: func(values, *args, **kwargs), x)
    if answer is not None:
        return answer
    try:
        return func(x, *args, **kwargs)
    except Exception as error:
        note_raised(error)
        raise


def _listened_to(tolist: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """What stands for a method of torch's own classes that no ``TorchFunctionMode`` sees."""

    def method(self: Tensor) -> Any:
        trace = listening()
        answer = None if trace is None else trace.read(Tensor.tolist, self)
        return tolist(self) if answer is None else answer

    return method


def _require_another(differs: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """What stands for ``!=`` of numbers: of one and the same the trace says no, without asking whether it is NaN."""

    def method(self: torch.SymFloat, other: Any) -> Any:
        by_torch = str(sys._getframe(1).f_globals.get("__name__")).startswith("torch.")
        if other is self and not by_torch and listening() is not None and _torch.export.has_values(self):
            raise refuse("the model asks whether a number that it reads of a tensor is NaN (n != n)", _OF_NAN)
        return differs(self, other)

    return method


_OF_NAN = "ask the tensor, if x.isnan().any(): ..., or look at the loss in the loop"

READS: dict[Any, Callable[..., Any]] = dict.fromkeys(
    (Tensor.numpy, Tensor.__array__, Tensor.__int__, Tensor.__float__, Tensor.__index__), _read
)
"""The functions that read values, with what takes their place while a model is traced."""

NAMES: tuple[tuple[Any, str, Any], ...] = (
    *((cls, "tolist", _listened_to(vars(cls)["tolist"])) for cls in _torch.export.TRACED),
    (torch.SymFloat, "__ne__", _require_another(vars(torch.SymFloat)["__ne__"])),
)
"""What has no door but its name."""
