"""Cross-entropies as sums and weights, also of sharded classes, and means of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autoparallel.comm.collectives import all_reduce, is_compiled, redistribute
from autoparallel.comm.groups import axis_index
from autoparallel.operators.tables import local_rows


def cross_entropy_sum(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    classes: int | None = None,
) -> Tensor:
    """The sum of the cross-entropies of ``x`` [..., C] and class indices ``target`` [...].

    float32 or wider: a sum over a batch does not fit into half precision.  The columns from ``classes`` on are padding.
    """
    if classes is not None:
        x = x.narrow(-1, 0, classes)
    if x.ndim > 2:  # torch's kernels take rows, or classes in dim 1; neither is a copy
        side_by_side = isinstance(x.stride(-1), int) and x.stride(-1) == 1
        x, target = (x.flatten(0, -2), target.flatten()) if side_by_side else (x.movedim(-1, 1), target)
    half = x.dtype in (torch.float16, torch.bfloat16)
    losses = F.cross_entropy(
        x,
        target,
        weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="none" if half else "sum",
    )
    return losses.float().sum() if half else losses


def cross_entropy_weight(target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """What ``reduction="mean"`` divides by: the number (or summed class weight) of the targets not ignored."""
    valid = target != ignore_index
    if weight is None:
        return valid.sum().to(dtype)
    return (weight.take(target.where(valid, 0)) * valid).sum().to(dtype)


def weighted_mean(total: Tensor, weight: Tensor) -> Tensor:
    """``total / weight``, element by element, whose gradient of zero stays one where ``weight`` is 0: a microbatch with
    nothing to count adds nothing to the others'."""
    return _WeightedMean.apply(total, weight)


def mean_or_sum(total: Tensor, weight: Tensor) -> Tensor:
    """``total / weight``, element by element, and ``total`` where ``weight`` is 0."""
    return total / torch.where(weight == 0, 1, weight)


class _WeightedMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, weight: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(weight)
        return total / weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if grads[0] is None:
            return None, None
        (weight,) = ctx.saved_tensors
        return grads[0] / torch.where((weight == 0) & (grads[0] == 0), 1, weight), None


def cross_entropy_sum_sharded(
    x: Tensor, target: Tensor, ignore_index: int, group: str, classes: int | None = None
) -> Tensor:
    """``cross_entropy_sum`` of logits whose classes, the last dim, are sharded over ``group``.

    Two all-reduces of [...]-shaped tensors forward, none backward (Shoeybi et al. 2019, Megatron-LM, section 3).
    """
    loss, *_ = _ShardedCrossEntropy.apply(x, target, ignore_index, group, classes)
    return loss


class _ShardedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, target: Tensor, ignore_index: int, group: str, total: int | None
    ) -> tuple[Tensor, ...]:
        ctx.dtype, ctx.group = x.dtype, group
        ctx.set_materialize_grads(False)
        if x.dtype in (torch.float16, torch.bfloat16):
            x = x.float()
        if total is not None:  # columns of padding count as minus infinity
            columns = max(0, min(x.shape[-1], total - axis_index(group) * x.shape[-1]))
            if columns < x.shape[-1]:
                x = x.clone()
                x.narrow(-1, columns, x.shape[-1] - columns).fill_(-torch.inf)
        valid = target != ignore_index
        local, is_local = local_rows(target.where(valid, 0), x.shape[-1], group, total)
        local = local.unsqueeze(-1)
        shifted = x - all_reduce(x.amax(-1), "max", group).unsqueeze(-1)
        picked = shifted.gather(-1, local).squeeze(-1).where(is_local, 0)
        exp = shifted.exp()
        del shifted  # as large as the logits
        totals = all_reduce(torch.stack([exp.sum(-1), picked]), "sum", group)
        softmax = exp / totals[0].unsqueeze(-1)
        ctx.save_for_backward(softmax, local, is_local, valid)
        loss = (totals[0].log() - totals[1]).where(valid, 0).sum()
        return (loss,) if is_compiled(x) else (loss, softmax)  # so that what is saved can be differentiated

    @staticmethod
    def backward(ctx: Any, of_loss: Tensor | None, of_softmax: Tensor | None = None) -> Any:
        softmax, local, is_local, valid = ctx.saved_tensors
        grad: Tensor | None = None
        if of_loss is not None:
            grad = softmax.scatter_add(-1, local, -is_local.to(softmax.dtype).unsqueeze(-1))
            grad = grad * redistribute(of_loss, "I", "R", ctx.group)  # two of these at a time, not three
            grad = grad.where(valid.unsqueeze(-1), 0)  # also where that of a mean over no target is infinite, or NaN
        if of_softmax is not None:  # from a derivative of this backward
            along = redistribute((softmax * of_softmax).sum(-1, keepdim=True), "P", "R", ctx.group)
            through = softmax * (of_softmax - along)
            grad = through if grad is None else grad + through
        return None if grad is None else grad.to(ctx.dtype), None, None, None, None
