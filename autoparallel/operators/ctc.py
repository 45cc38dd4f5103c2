"""Connectionist temporal classification: what each sequence loses.

The sizes of what torch's operator keeps for its backward are known by the lengths of the targets alone, which no trace
has; here the backward makes it again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("autoparallel::ctc_losses", mutates_args=())
def _ctc_losses(
    odds: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    lengths = input_lengths, target_lengths
    return torch.ops.aten._ctc_loss.Tensor(odds, targets, *lengths, blank, zero_infinity)[0].clone()


@_ctc_losses.register_fake
def _(
    odds: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    return odds.new_empty(odds.shape[1])


@torch.library.custom_op("autoparallel::ctc_losses_backward", mutates_args=())
def _ctc_losses_backward(
    grad: Tensor,
    odds: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    lengths = input_lengths, target_lengths
    losses, paths = torch.ops.aten._ctc_loss.Tensor(odds, targets, *lengths, blank, zero_infinity)
    return torch.ops.aten._ctc_loss_backward.Tensor(
        grad.contiguous(), odds, targets, *lengths, losses, paths, blank, zero_infinity
    )


@_ctc_losses_backward.register_fake
def _(
    grad: Tensor,
    odds: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    return torch.empty_like(odds)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[4:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.autoparallel.ctc_losses_backward(grad, *ctx.saved_tensors, *ctx.options), *[None] * 5


_ctc_losses.register_autograd(_backward, setup_context=_setup)

ctc_losses: Any = torch.ops.autoparallel.ctc_losses.default
"""What each row loses by ``odds [steps, rows, classes]``, logarithms of probabilities, and targets ``[rows, length]``
or one after the other; infinite where no path leads there."""
