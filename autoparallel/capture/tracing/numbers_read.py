"""Python that reads a tensor's numbers: what it is told (see ``inputs_read``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from autoparallel import _torch
from autoparallel.capture.tracing.trace import Trace, listening
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


READS: dict[Any, Callable[..., Any]] = dict.fromkeys(
    (Tensor.numpy, Tensor.__array__, Tensor.__int__, Tensor.__float__, Tensor.__index__), _read
)
"""The functions that read values, with what takes their place while a model is traced."""

NAMES: tuple[tuple[Any, str, Any], ...] = tuple(
    (cls, "tolist", _listened_to(vars(cls)["tolist"])) for cls in _torch.export.TRACED
)
"""What has no door but its name."""
