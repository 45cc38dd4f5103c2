"""Linear layers whose parameters' gradients are computed while the gradient of what they read is reduced.

``late_linear`` hands on the gradient of ``x`` at once, and leaves what the others follow from (the gradient of its
result, and ``x``) to the node that ``late_parameters`` has made before: autograd, which goes back in the order in which
nodes were made, comes to it once the collective that reduces the gradient of ``x`` has been started
(see ``comm.in_flight``), as Megatron-LM does it (Narayanan et al. 2021).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from autoparallel.comm.in_flight import Started

Late = tuple[Tensor, Tensor]
"""Stand for the result of a linear layer and for what it reads: their gradients are the result's, and what is read."""


def late_parameters(started: Started, weight: Tensor, bias: Tensor | None, dim: int, times: int) -> Late:
    """Where the gradients of parameters are computed.

    Args:
        started: the redistribution of what the layer reads [..., k], which makes it ``times`` as long along ``dim``.
        weight: [n, k].
        bias: [n].
    """
    shape = list(started[1].shape)
    shape[dim] *= times
    late: Late = _Late.apply(weight, bias, shape)
    return late


def late_linear(x: Tensor, weight: Tensor, bias: Tensor | None, late: Late) -> Tensor:
    """``F.linear(x, weight, bias)``; the gradients of the parameters come from ``late``."""
    result: Tensor = _LateLinear.apply(x, weight.detach(), None if bias is None else bias.detach(), *late)
    return result


class _Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor | None, shape: list[int]) -> Late:
        ctx.set_materialize_grads(False)
        return tuple(weight.new_empty(1).expand(*shape[:-1], size) for size in weight.shape)  # type: ignore[return-value]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, x: Tensor | None) -> Any:
        if grad is None or x is None:
            return None, None, None
        rows = grad.reshape(-1, grad.shape[-1])
        for_weight, for_bias = ctx.needs_input_grad[:2]
        return (
            rows.t().mm(x.reshape(-1, x.shape[-1])) if for_weight else None,
            rows.sum(0) if for_bias else None,
            None,
        )


class _LateLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, late_result: Tensor, late_x: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.set_materialize_grads(False)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return None, None, None, None, None
        x, weight = ctx.saved_tensors
        return grad.matmul(weight) if ctx.needs_input_grad[0] else None, None, None, grad, x
