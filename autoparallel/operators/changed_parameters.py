"""A parameter that a call changes: what reads it behind the change reads another value, with the same gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("autoparallel::with_value", mutates_args=())
def _with_value(parameter: Tensor, value: Tensor) -> Tensor:
    return value.clone()


@_with_value.register_fake
def _(parameter: Tensor, value: Tensor) -> Tensor:
    return torch.empty_like(value)


def _pass_to_parameter(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return grad, None


_with_value.register_autograd(_pass_to_parameter)

with_value: Any = torch.ops.autoparallel.with_value.default
"""``value``, whose gradient is that of ``parameter``, of the same shape."""
