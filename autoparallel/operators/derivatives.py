"""Gradients that a model takes inside of its forward, as calls of a trace: a pass writes out what they compute.

What keeps statistics for its backward, or has none, stands here composed of operators that autograd differentiates as
often as one likes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_LIBRARY = torch.library.Library("autoparallel", "FRAGMENT")
_LIBRARY.define("derivative(Tensor[] outputs, Tensor[] inputs, Tensor[] gradients, bool follows) -> Tensor[]")
DERIVATIVE = torch.ops.autoparallel.derivative.default
"""The gradients of ``inputs``, where ``gradients`` are those of ``outputs``, and whether these carry gradients
themselves; it exists while a model is traced only."""

_LIBRARY.define("leaf(Tensor x) -> Tensor")
LEAF = torch.ops.autoparallel.leaf.default
"""A tensor of the model's own from where it requires a gradient on: what was computed of it before has none with
respect to it.  It exists while a model is traced only, and shares the memory of ``x``, which nobody may change then."""


@torch.library.register_fake("autoparallel::leaf", lib=_LIBRARY)
def _(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


@torch.library.impl("autoparallel::leaf", "CompositeExplicitAutograd", lib=_LIBRARY)
def _(x: Tensor) -> Tensor:
    return x.clone()  # of a constant of the trace, whose value torch follows


@torch.library.register_fake("autoparallel::derivative", lib=_LIBRARY)
def _(outputs: Sequence[Tensor], inputs: Sequence[Tensor], gradients: Sequence[Tensor], follows: bool) -> list[Tensor]:
    return [torch.empty_like(x) for x in inputs]


def _normalise(x: Tensor, dims: list[int], eps: float) -> Tensor:
    centred = x - x.mean(dims, keepdim=True)
    return centred * (centred.square().mean(dims, keepdim=True) + eps).rsqrt()


def _weigh(x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int] | None = None) -> Tensor:
    """``weight * x + bias``, of a shape."""
    if weight is not None:
        x = x * (weight if shape is None else weight.reshape(shape))
    if bias is not None:
        x = x + (bias if shape is None else bias.reshape(shape))
    return x


def _channels(x: Tensor) -> list[int]:
    """The shape of one number for each channel."""
    return [1, -1, *[1] * (x.ndim - 2)]


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: bool
) -> Tensor:
    return _weigh(_normalise(x, [*range(-len(shape), 0)], eps), weight, bias)


def _native_layer_norm(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """What ``vmap`` has in the place of a layer norm."""
    return (_layer_norm(x, *rest),)


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Any = None, eps: float | None = None) -> Tensor:
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return _weigh(x * (x.square().mean([*range(-len(shape), 0)], keepdim=True) + eps).rsqrt(), weight, None)


def _group_norm(x: Tensor, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: bool) -> Tensor:
    grouped = _normalise(x.unflatten(1, (groups, -1)), [*range(2, x.ndim + 1)], eps)
    return _weigh(grouped.flatten(1, 2), weight, bias, _channels(x))


def _instance_norm(
    x: Tensor, weight: Any, bias: Any, mean: Any, variance: Any, of_batch: bool, momentum: float, eps: float, *_: bool
) -> Tensor:
    if not of_batch:
        return _batch_norm_of(x, weight, bias, mean, variance, momentum, eps)[0]
    return _weigh(_normalise(x, [*range(2, x.ndim)], eps), weight, bias, _channels(x))


def _batch_norm(x: Tensor, weight: Any, bias: Any, *rest: Any) -> tuple[Tensor, ...]:
    dims = [0, *range(2, x.ndim)]
    return (_weigh(_normalise(x, dims, rest[-1]), weight, bias, _channels(x)),)


def _batch_norm_of(
    x: Tensor, weight: Any, bias: Any, mean: Tensor, variance: Tensor, momentum: float, eps: float
) -> tuple[Tensor, ...]:
    shape = _channels(x)
    return (_weigh((x - mean.reshape(shape)) * (variance.reshape(shape) + eps).rsqrt(), weight, bias, shape),)


def _copy(x: Tensor, source: Tensor, *_: bool) -> Tensor:
    return source.to(x.dtype).expand(x.shape)


def _dropout(x: Tensor, p: float, number: int) -> Tensor:
    return x * torch.ops.autoparallel.dropout(torch.ones_like(x), p, number)


COMPOSED: dict[Any, Callable[..., Any]] = {
    aten.layer_norm.default: _layer_norm,
    aten.native_layer_norm.default: _native_layer_norm,
    aten.rms_norm.default: _rms_norm,
    aten.group_norm.default: _group_norm,
    aten.instance_norm.default: _instance_norm,
    aten._native_batch_norm_legit.no_stats: _batch_norm,
    aten._native_batch_norm_legit_functional.default: _batch_norm,
    aten._native_batch_norm_legit_no_training.default: _batch_norm_of,
    aten.copy.default: _copy,
    torch.ops.autoparallel.dropout.default: _dropout,
}
"""What stands for operators; of several results, the first alone."""
