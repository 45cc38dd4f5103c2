"""Functions of torch that fix a number which a trace leaves open: composed of operators that take one.

An annealed dropout, a label smoothing or a threshold between two losses is an argument that torch reads into C, so
that each of its values would be a trace of its own.  What stands for such a function draws and computes what the
function does.  Where a number is at the end of its range, the model's trace is another one, as for an ``if``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autoparallel.capture.tracing.attention_kernels import ATTENTION
from autoparallel.capture.tracing.stand_ins import replacement
from autoparallel.capture.tracing.trace import Trace


def _are_open(*numbers: Any) -> bool:
    return any(isinstance(number, torch.SymFloat) for number in numbers)


def _dropout(
    _: Trace, func: Any, input: Tensor, p: Any = 0.5, training: bool = True, inplace: bool = False, **train: bool
) -> Tensor:
    """Dropout: of each element, or of all of a channel."""
    training, more = train.get("train", training), {} if func is torch.dropout else {"inplace": inplace}
    if not _are_open(p):
        return func(input, p, training, **more)
    if not training:
        return func(input, 0.5, False, **more)
    if p == 0 or p == 1:  # nothing is drawn
        return func(input, 0.0 if p == 0 else 1.0, True, **more)
    if not 0 < p < 1:
        return func(input, p, True, **more)  # raises
    factors = _factors(input, p, _CHANNELS.get(func))
    return input.mul_(factors) if inplace else input * factors


def _factors(x: Tensor, p: Any, batched: int | None) -> Tensor:
    """What dropout multiplies by.

    Args:
        batched: 0, or how many dims an input has that is a batch, where channels are dropped; None where elements are.
    """
    if batched is None:
        numbers = torch.rand_like(x, dtype=torch.float64)
    else:
        leading = 1 if x.ndim == batched - 1 else 2
        shape = [*x.shape[:leading], *[1] * (x.ndim - leading)]
        numbers = torch.rand(shape, dtype=torch.float64, device=x.device)
    return (numbers < 1 - p).to(x.dtype) / (1 - p)


_CHANNELS: dict[Any, int] = {F.dropout1d: 3, F.dropout2d: 0, F.dropout3d: 5}
"""Functions that drop whole channels."""


def _attention(
    trace: Trace, func: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: Any = 0.0,
    is_causal: bool = False, scale: Any = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Attention with dropout of the weights, in elementary operators, as it is drawn of them wherever it drops any."""
    plain = ATTENTION[func]
    if not _are_open(dropout_p) or dropout_p == 0 or not 0 < dropout_p < 1:
        p = 0.0 if _are_open(dropout_p) and dropout_p == 0 else dropout_p
        options = {"dropout_p": p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        return plain(trace, func, query, key, value, attn_mask, **options)
    heads = query.shape[-3] // key.shape[-3] if enable_gqa else 1
    if heads > 1:
        key, value = (x.repeat_interleave(heads, -3) for x in (key, value))
    scores = (query * (1.0 / math.sqrt(query.shape[-1]) if scale is None else scale)) @ key.transpose(-2, -1)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = torch.ops.aten._safe_softmax(scores, -1)
    return (weights * _factors(weights, dropout_p, None)) @ value


def _huber_loss(
    _: Trace,
    func: Any,
    input: Tensor,
    target: Tensor,
    reduction: str = "mean",
    delta: Any = 1.0,
    weight: Tensor | None = None,
) -> Tensor:
    if not _are_open(delta) or weight is not None or reduction not in _REDUCTIONS or not delta > 0:
        return func(input, target, reduction, delta, **({} if weight is None else {"weight": weight}))
    x = (input - target).abs()
    return _REDUCTIONS[reduction](torch.where(x <= delta, 0.5 * x * x, delta * (x - 0.5 * delta)))


def _smooth_l1_loss(
    _: Trace,
    func: Any,
    input: Tensor,
    target: Tensor,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    beta: Any = 1.0,
) -> Tensor:
    is_plain = not _are_open(beta) or reduction not in _REDUCTIONS or (size_average, reduce) != (None, None)
    if is_plain or not beta > 0:
        beta = 0.0 if _are_open(beta) and beta == 0 else beta
        return func(input, target, size_average, reduce, reduction, beta)
    x = (input - target).abs()
    return _REDUCTIONS[reduction](torch.where(x < beta, 0.5 * x * x / beta, x - 0.5 * beta))


_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"none": lambda x: x, "mean": Tensor.mean, "sum": Tensor.sum}


def _cross_entropy(
    _: Trace,
    func: Any,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: Any = 0.0,
) -> Tensor:
    """The cross entropy of labels that are smoothed: of their own, and of the mean over all classes."""
    s = label_smoothing
    plain = {
        "weight": weight, "size_average": size_average, "ignore_index": ignore_index, "reduce": reduce,
        "reduction": reduction,
    }  # fmt: skip
    if not _are_open(s):
        return func(input, target, **plain, label_smoothing=s)
    if s == 0:
        return func(input, target, **plain)
    if not 0 < s <= 1 or reduction not in _REDUCTIONS or (size_average, reduce) != (None, None):
        return func(input, target, **plain, label_smoothing=s)
    dim = 0 if input.ndim == 1 else 1
    if target.is_floating_point():  # the probabilities of classes
        return func(input, target * (1 - s) + s / input.shape[dim], **plain)
    odds = F.log_softmax(input, dim)
    summed = reduction if reduction == "none" else "sum"
    of_labels = F.nll_loss(odds, target, weight, ignore_index=ignore_index, reduction=summed)
    ignored = target == ignore_index
    shape = [-1 if d == dim else 1 for d in range(input.ndim)]
    losses = -(odds if weight is None else odds * weight.view(shape)).sum(dim).masked_fill(ignored, 0.0)
    loss = (1 - s) * of_labels + _REDUCTIONS[summed](losses) * (s / input.shape[dim])
    if reduction != "mean":
        return loss
    if weight is None:
        return loss / (~ignored).sum()  # one count for both, by which microbatches are weighed
    weights = weight.gather(0, target.masked_fill(ignored, 0).flatten())
    return loss / weights.masked_fill(ignored.flatten(), 0).sum()


def _gaussian_nll_loss(
    _: Trace, func: Any, input: Tensor, target: Tensor, var: Any, full: bool = False, eps: Any = 1e-6,
    reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """Torch raises variances to the least one under ``no_grad()``, which no trace of it shows: their gradients are
    those of the variances as they were."""
    if isinstance(var, Tensor) and var.requires_grad:
        var = var.detach().clamp(min=eps) + (var - var.detach())
    return func(input, target, var, full, eps, reduction)


def _triplet_margin_loss(
    _: Trace, func: Any, anchor: Tensor, positive: Tensor, negative: Tensor, margin: Any = 1.0, p: Any = 2,
    eps: Any = 1e-6, swap: bool = False, size_average: Any = None, reduce: Any = None, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    is_plain = not _are_open(margin) or reduction not in _REDUCTIONS or (size_average, reduce) != (None, None)
    if is_plain or not margin > 0:
        return func(anchor, positive, negative, margin, p, eps, swap, size_average, reduce, reduction)
    near, far = (F.pairwise_distance(anchor, x, p, eps) for x in (positive, negative))
    if swap:
        far = torch.min(far, F.pairwise_distance(positive, negative, p, eps))
    return _REDUCTIONS[reduction]((margin + near - far).clamp_min(0))


def _margin_ranking_loss(
    _: Trace, func: Any, input1: Tensor, input2: Tensor, target: Tensor, margin: Any = 0, size_average: Any = None,
    reduce: Any = None, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    if not _are_open(margin) or reduction not in _REDUCTIONS or (size_average, reduce) != (None, None):
        return func(input1, input2, target, margin, size_average, reduce, reduction)
    return _REDUCTIONS[reduction]((-target * (input1 - input2) + margin).clamp_min(0))


def _multi_margin_loss(
    _: Trace, func: Any, input: Tensor, target: Tensor, p: Any = 1, margin: Any = 1.0, weight: Tensor | None = None,
    size_average: Any = None, reduce: Any = None, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """Where a margin is just kept, torch's kernel has no gradient; what ``torch.export`` makes of it has one."""
    usual = reduction in _REDUCTIONS and (size_average, reduce) == (None, None) and p in (1, 2)
    if not usual or input.ndim != 2 or target.shape != input.shape[:1]:
        return func(input, target, p, margin, weight, size_average, reduce, reduction)
    labels = target.unsqueeze(1)
    losses = F.relu(margin - input.gather(1, labels) + input) ** p
    if weight is not None:
        losses = losses * weight[labels]
    losses = losses.where(torch.arange(input.shape[1], device=input.device) != labels, 0).mean(1)
    return _REDUCTIONS[reduction](losses)


def _batch_norm(
    _: Trace, func: Any, input: Tensor, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None,
    training: bool = False, momentum: Any = 0.1, eps: Any = 1e-5,
) -> Tensor:  # fmt: skip
    """Running statistics move towards those of the batch by an open momentum."""
    if not _are_open(momentum) or not training or running_mean is running_var is None:
        momentum = 0.1 if _are_open(momentum) else momentum
        return func(input, running_mean, running_var, weight, bias, training, momentum, eps)
    run = partial(func, input, weight=weight, bias=bias, training=True, momentum=1.0, eps=eps)
    return with_newest(run, running_mean, running_var, lambda values, new: momentum * new + (1 - momentum) * values)


def with_newest(
    run: Callable[..., Tensor], mean: Any, variance: Any, moved: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """What a batch norm gives, whose running statistics move by those of the batch alone.

    Args:
        run: the norm, given statistics that it sets to those of the batch, which autograd keeps.
        mean, variance: the running ones; None for one that there is not.
        moved: what a running statistic becomes, given it and that of the batch.
    """
    newest = [None if x is None else x.clone() for x in (mean, variance)]
    out = run(running_mean=newest[0], running_var=newest[1])
    for values, new in zip((mean, variance), newest, strict=True):
        if new is not None:
            values.copy_(moved(values, new))
    return out


# ------------------------------------------------------------------------------------------------------ random numbers


def _bernoulli_(_: Trace, func: Any, self: Tensor, p: Any = 0.5, **options: Any) -> Tensor:
    if not _are_open(p) or options or not 0 <= p <= 1:
        return func(self, p, **options)
    return self.copy_(torch.rand_like(self, dtype=torch.float64) < p)


def _normal_(_: Trace, func: Any, self: Tensor, mean: Any = 0, std: Any = 1, **options: Any) -> Tensor:
    if not _are_open(mean, std) or options or not self.is_floating_point() or not std >= 0:
        return func(self, mean, std, **options)
    return self.copy_(torch.randn_like(self, dtype=torch.float64) * std + mean)


def _normal(_: Trace, func: Any, mean: Any, std: Any = 1.0, size: Any = None, **options: Any) -> Tensor:
    numbers = not isinstance(mean, Tensor) and not isinstance(std, Tensor)
    if not numbers or not _are_open(mean, std) or not options.keys() <= {"dtype", "device"} or not std >= 0:
        return func(mean, std, *([] if size is None else [size]), **options)
    dtype = options.get("dtype") or torch.get_default_dtype()
    wide = torch.randn(size, dtype=torch.float64, device=options.get("device"))
    return (wide * std + mean).to(dtype)


def _uniform_(_: Trace, func: Any, self: Tensor, *ends: Any, **options: Any) -> Tensor:
    low = options.pop("from", ends[0] if ends else 0.0)
    high = options.pop("to", ends[1] if len(ends) > 1 else 1.0)
    if not _are_open(low, high) or options or not self.is_floating_point() or not low <= high:
        return func(self, low, high, **options)
    return self.copy_(torch.rand_like(self).double() * (high - low) + low)


# ------------------------------------------------------------------------------------------------- tensors of a number


def _new_tensor(_: Trace, func: Any, self: Tensor, data: Any, **options: Any) -> Tensor:
    return self.new_full((), data, **options) if _are_open(data) else func(self, data, **options)


def _as_tensor(_: Trace, func: Any, data: Any, dtype: Any = None, device: Any = None) -> Tensor:
    if isinstance(data, Tensor):  # of a constant torch would make one that is of no trace
        return data.to(device=device or data.device, dtype=dtype or data.dtype)
    is_copied = isinstance(data, list | tuple) or _are_open(data)
    return (torch.tensor if is_copied else func)(data, dtype=dtype, device=device)


def _quantile(_: Trace, func: Any, input: Tensor, q: Any, *args: Any, **options: Any) -> Tensor:
    if _are_open(q) and 0 <= q <= 1:
        q = torch.full((), q, dtype=input.dtype, device=input.device)
    return func(input, q, *args, **options)


OF_OPEN: dict[Any, Callable[..., Any]] = {
    F.dropout: _dropout, torch.dropout: _dropout, F.dropout1d: _dropout, F.dropout2d: _dropout, F.dropout3d: _dropout,
    F.huber_loss: _huber_loss, F.smooth_l1_loss: _smooth_l1_loss, F.cross_entropy: _cross_entropy,
    F.gaussian_nll_loss: _gaussian_nll_loss, F.triplet_margin_loss: _triplet_margin_loss,
    F.margin_ranking_loss: _margin_ranking_loss, F.multi_margin_loss: _multi_margin_loss,
    F.scaled_dot_product_attention: _attention, F.batch_norm: _batch_norm, Tensor.bernoulli_: _bernoulli_,
    Tensor.normal_: _normal_, torch.normal: _normal, Tensor.uniform_: _uniform_, Tensor.new_tensor: _new_tensor,
    torch.quantile: _quantile, Tensor.quantile: _quantile,
}  # fmt: skip
"""The functions, with what takes their place while a model is traced."""

NAMES: tuple[tuple[Any, str, Any], ...] = (replacement(torch, "as_tensor", _as_tensor),)
"""What has no door but its name."""
