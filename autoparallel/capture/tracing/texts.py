"""Texts of values: ``table.get(f"{n}")``, ``raise ValueError(f"{n} tokens")``, ``logger.info("%s", loss)``.

No trace has the values.  A text that only people read may be that of what stands for them; any other is read as
``int(n)`` is: of what follows from the inputs it is computed, and belongs to the kind of call, and of anything else it
is refused.  Which it is, the source around it says: see ``messages``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

from torch import Tensor

from autoparallel import _torch
from autoparallel.capture.tracing.messages import OF_OBJECTS, is_message
from autoparallel.capture.tracing.stand_ins import replacement
from autoparallel.capture.tracing.trace import Trace
from autoparallel.graph.errors import refusal
from autoparallel.graph.lines import line_of_frame
from autoparallel.graph.python_state import is_tracers_file

_MADE_FOR = (*OF_OBJECTS, "__torch_function__", "handle_torch_function")
"""Functions that make a text for who asks for it."""

_HELPERS = ("dataclasses", "reprlib")
"""Modules of which all functions do."""


def _text_of_tensor(trace: Trace, original: Callable[..., str], self: Tensor, *args: Any, **kwargs: Any) -> str:
    """Stands for a method that makes a tensor's text."""
    frame, is_around = _who_asks(), _torch.export.is_real(self)
    if not (is_around or _torch.export.is_fake(self)) or is_tracers_file(frame.f_code.co_filename):
        return original(self, *args, **kwargs)
    if is_message(frame):
        return original(self, *args, **kwargs) if is_around else _REPR(self)
    if (constant := getattr(self, "constant", None)) is not None:
        return original(constant, *args, **kwargs)
    # The text of a tensor tells on which device it is, where that is not the CPU, on which values are computed.
    is_told = self.device.type == "cpu" or original is _FORMAT and not self.ndim
    is_whole = is_around or not (self.is_floating_point() or self.is_complex())
    answer = trace.read(lambda values: original(values, *args, **kwargs), self) if is_told and is_whole else None
    if answer is None:
        raise refusal("the text of a tensor's value is read", line_of_frame(frame), INSTEAD_OF_TEXT)
    return str(answer)


def _text_of_number(number: Callable[[Any], Any], _: Trace, original: Callable[..., str], self: Any, *spec: str) -> str:
    """Stands for a method that makes the text of a size that is open, or of what is computed of one
    (``self.heads[str(x.shape[1])]``): that of the number that it is in this trace, which fixes it."""
    frame = _who_asks()
    if is_tracers_file(frame.f_code.co_filename):
        return original(self, *spec)
    value = self.node.hint if is_message(frame) else number(self)
    return str(self.node) if value is None else format(value, *spec)  # None: only values tell


def _who_asks() -> FrameType:
    """The frame that asks for the text of a value, or of an object that holds one."""
    frame: FrameType = sys._getframe(3)
    while frame.f_back is not None and (
        frame.f_code.co_name in _MADE_FOR or frame.f_globals.get("__name__") in _HELPERS
    ):
        frame = frame.f_back
    return frame


INSTEAD_OF_TEXT = (
    "read a whole number as int(n), which is told of inputs, and keep any other value a tensor; a text that is only "
    "shown is made where it is printed, logged or raised (logger.info(f'{n}')), or outside of the model"
)
"""What to do instead of reading the text of a value."""

_REPR, _FORMAT = Tensor.__repr__, Tensor.__format__
NAMES: tuple[tuple[Any, str, Any], ...] = (
    replacement(Tensor, "__repr__", _text_of_tensor),
    replacement(Tensor, "__format__", _text_of_tensor),
    *[
        replacement(cls, name, partial(_text_of_number, number))
        for cls, number in _torch.numbers.KINDS.items()
        for name in ("__repr__", "__format__")
    ],
)
"""What has no door but its name."""
