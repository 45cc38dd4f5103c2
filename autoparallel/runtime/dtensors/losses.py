"""Means of losses over ``DTensor``s: ``F.mse_loss(outputs, targets)`` in a loop, where outputs lie as they are made.

Torch has each rank take the mean of its own part.  Gradients are divided by the number of elements of a part instead of
all, and values are weighed alike whatever size parts have, or how many targets in them are ignored.  So the sum is
taken, which is right, and divided by the number of all elements, or by the weight of all targets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autoparallel import _torch
from autoparallel.operators.torch_random import arguments_of

_ATEN = torch.ops.aten
_VALUES = (
    _ATEN.mse_loss.default, _ATEN.smooth_l1_loss.default, _ATEN.huber_loss.default, _ATEN.soft_margin_loss.default,
    _ATEN.binary_cross_entropy.default, _ATEN.binary_cross_entropy_with_logits.default,
)  # fmt: skip
_GRADIENTS = (
    _ATEN.mse_loss_backward.default, _ATEN.smooth_l1_loss_backward.default, _ATEN.huber_loss_backward.default,
    _ATEN.soft_margin_loss_backward.default, _ATEN.binary_cross_entropy_backward.default,
)  # fmt: skip
_OF_TARGETS = _ATEN.nll_loss_forward.default, _ATEN.nll_loss2d_forward.default
_MEAN, _SUM = 1, 2
"""As ``at::Reduction`` has them."""


def watch_losses() -> None:
    """Has means of losses, and their gradients, be those of one process."""
    _torch.dtensor.handle_first((*_VALUES, *_OF_TARGETS), divide_sum)
    _torch.dtensor.handle_first(_GRADIENTS, divide_gradient)


def divide_sum(earlier: Any, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A loss, of which a mean is its sum over the number of elements; or over the weight of its targets, which comes
    with it, and by which torch divides its gradient."""
    values = arguments_of(operator, tuple(args), dict(kwargs))
    if values["reduction"] != _MEAN:
        return _torch.dtensor.carry_out(earlier, operator, args, kwargs)
    result = _torch.dtensor.carry_out(earlier, operator, (*(values | {"reduction": _SUM}).values(),), {})
    if operator in _OF_TARGETS:
        total, weight = result
        return total / weight, weight
    return result / values["self"].numel()


def divide_gradient(earlier: Any, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The gradient of a loss, of which that of a mean is the sum's over the number of elements."""
    values = arguments_of(operator, tuple(args), dict(kwargs))
    if values["reduction"] == _MEAN:
        divided = values["grad_output"] / values["self"].numel()
        args, kwargs = (*(values | {"grad_output": divided, "reduction": _SUM}).values(),), {}
    return _torch.dtensor.carry_out(earlier, operator, args, kwargs)
