"""Operators that change the shape of a tensor itself: ``x.squeeze_(0)``, ``x.t_()``.

Torch changes the part of a ``DTensor`` that this rank has, and leaves the whole's shape as it was.  A vector times a
matrix ends in such an operator, so that ``v @ weight`` had two dims.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autoparallel import _torch
from autoparallel.runtime.parameters.hooks import is_compiled
from autoparallel.runtime.parameters.parts import forget_origin, note_origin, origin_of

_FORMING = ("squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_")


def watch_forms() -> None:
    """Has operators change the shape of a ``DTensor`` as they do a plain tensor's."""
    _torch.dtensor.handle_operators(_torch.dtensor.operators_of(_FORMING), change_form)


def change_form(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Gives a ``DTensor`` the shape of the view that the operator's other form gives of it.

    Raises:
        RuntimeError: for a parameter, whose shape is the model's.
    """
    target, *rest = args
    if is_compiled(target):
        raise RuntimeError(
            f"{operator} changes the shape of a parameter of the model\nWhat to change: use x.transpose(...), which "
            "gives a view, or change it in the plain model, then compile that."
        )
    name = operator.overloadpacket.__name__.removesuffix("_")
    view = getattr(torch.ops.aten, name)(target, *rest, **kwargs)
    _torch.dtensor.change_form(operator, target, rest, view)
    origin = origin_of(view)
    if origin is None:
        forget_origin(target)
    else:
        note_origin(target, origin)
    return target
