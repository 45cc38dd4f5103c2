"""What a program draws: dropout and the usual distributions, each number by its global position.

Every operator takes the ``number`` of the draw among those of a call, and ``shards``: for each dim (joined by ";") the
axes that shard it (joined by ",", outermost first), empty when whole; ``MICROBATCH`` counts as one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autoparallel.operators.random import Numbers

_ATTEMPTS = 1000  # of a rejection sampler that accepts 95 of 100; it is left when all elements are accepted


def _geometric(numbers: Numbers, dtype: torch.dtype, p: float) -> Tensor:
    if p == 1:
        return torch.ones_like(numbers.bits())
    return (numbers.inside().log() / math.log1p(-p)).ceil().clamp(min=1)


DISTRIBUTIONS: dict[str, Callable[..., Tensor]] = {
    "bernoulli": lambda numbers, dtype, p: numbers.below(p),
    "uniform": lambda numbers, dtype, low, high: numbers.uniform(dtype) * (high - low) + low,
    "normal": lambda numbers, dtype, mean, std: numbers.normal() * std + mean,
    "log_normal": lambda numbers, dtype, mean, std: (numbers.normal() * std + mean).exp(),
    "exponential": lambda numbers, dtype, rate: numbers.exponential(dtype) / rate,
    "cauchy": lambda numbers, dtype, median, sigma: (numbers.inside() - 0.5).mul(math.pi).tan() * sigma + median,
    "geometric": _geometric,
}
"""What ``draw`` draws, by name; called with the numbers, the dtype of the result, and the parameters."""


@torch.library.custom_op("autoparallel::draw", mutates_args=())
def _draw(
    size: Sequence[int],
    distribution: str,
    parameters: Sequence[float],
    number: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    shards: str = "",
) -> Tensor:
    numbers = Numbers(number, size, shards, device)
    return DISTRIBUTIONS[distribution](numbers, dtype, *parameters).to(dtype)


@torch.library.custom_op("autoparallel::draw_integers", mutates_args=())
def _draw_integers(
    size: Sequence[int],
    low: int,
    last: int,
    number: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    shards: str = "",
) -> Tensor:
    bits = Numbers(number, size, shards, device).bits()
    span = last - low + 1
    if span < 1 << 63:
        bits = (bits & ((1 << 63) - 1)) % span + low
    elif span < 1 << 64:
        bits = (bits & ((1 << 63) - 1)) + low
    return bits.to(dtype)


@torch.library.custom_op("autoparallel::draw_permutation", mutates_args=())
def _draw_permutation(n: int, number: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    return Numbers(number, (n,), "", device).bits().argsort(stable=True).to(dtype)


@torch.library.custom_op("autoparallel::draw_classes", mutates_args=())
def _draw_classes(weights: Tensor, count: int, replacement: bool, number: int, shards: str = "") -> Tensor:
    wide = weights.detach().double()
    if replacement:
        numbers = Numbers(number, (*weights.shape[:-1], count), shards, weights.device)
        reached = wide.cumsum(-1)
        return torch.searchsorted(reached / reached[..., -1:], numbers.uniform(torch.float64), right=True)
    numbers = Numbers(number, weights.shape, shards, weights.device)
    return (wide / numbers.exponential(torch.float64)).topk(count).indices


@_draw_classes.register_fake
def _(weights: Tensor, count: int, replacement: bool, number: int, shards: str = "") -> Tensor:
    return weights.new_empty((*weights.shape[:-1], count), dtype=torch.int64)


@torch.library.custom_op("autoparallel::draw_poisson", mutates_args=())
def _draw_poisson(rate: Tensor, number: int, shards: str = "") -> Tensor:
    """The least k of which the probability of at most k exceeds a uniform number, by bisection."""
    wanted = Numbers(number, rate.shape, shards, rate.device).inside()
    wide = rate.detach().double()
    low, high = torch.full_like(wide, -1), (wide + 12 * wide.sqrt() + 40).ceil()
    for _ in range(64):
        if not bool((high - low > 1).any()):
            break
        middle = ((low + high) / 2).floor()
        enough = torch.special.gammaincc(middle + 1, wide) > wanted
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    return high.to(rate.dtype)


@torch.library.custom_op("autoparallel::draw_gamma", mutates_args=())
def _draw_gamma(shape: Tensor, number: int, shards: str = "") -> Tensor:
    """By rejection (Marsaglia and Tsang 2000); every attempt of every element has numbers of its own."""
    numbers = Numbers(number, shape.shape, shards, shape.device)
    alpha = shape.detach().double()
    boost = torch.where(alpha < 1, numbers.inside(0) ** (1 / alpha), 1.0)
    d = torch.where(alpha < 1, alpha + 1, alpha) - 1 / 3
    c = 1 / (9 * d).sqrt()
    sample, accepted = d, torch.zeros_like(alpha, dtype=torch.bool)
    for attempt in range(_ATTEMPTS):
        x, u = numbers.normal(3 * attempt + 1), numbers.inside(3 * attempt + 3)
        v = (1 + c * x) ** 3
        fits = (v > 0) & (u.log() < 0.5 * x * x + d - d * v + d * v.clamp(min=1e-300).log())
        sample = torch.where(accepted, sample, torch.where(fits, d * v, sample))
        accepted = accepted | fits
        if bool(accepted.all()):
            break
    return (sample * boost).clamp(min=torch.finfo(shape.dtype).tiny).to(shape.dtype)


def _gamma_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    shape, sample = ctx.saved_tensors
    return grad * torch.ops.aten._standard_gamma_grad.default(shape, sample), None, None


_draw_gamma.register_autograd(
    _gamma_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0], output)
)


@torch.library.custom_op("autoparallel::dropout_mask", mutates_args=())
def _dropout_mask(x: Tensor, p: float, number: int, shards: str = "") -> Tensor:
    keep = Numbers(number, x.shape, shards, x.device).below(1 - p)
    return keep.to(x.dtype).div_(1 - p) if p < 1 else keep.to(x.dtype)


def dropout(x: Tensor, p: float, number: int, shards: str = "") -> Tensor:
    """Dropout whose mask depends on the seed, the draw, the call and the *global* position of each element.

    Args:
        x: any shape.
        p: the probability of a zero; neither 0 nor 1.
        number: of the draw, among those of a call.
        shards: for each dim (joined by ";") the axes that shard it (joined by ",", outermost first); empty when whole.
            ``MICROBATCH`` counts as one.
    """
    return x * torch.ops.autoparallel.dropout_mask(x.detach(), p, number, shards)


@torch.library.custom_op("autoparallel::dropout", mutates_args=())
def _traced_dropout(x: Tensor, p: float, number: int) -> Tensor:
    """Stands for :func:`dropout` in a trace, which would look inside of a function."""
    return dropout(x, p, number)


def _fake_made(
    size: int | Sequence[int], *_arguments: Any, dtype: torch.dtype, device: torch.device, shards: str = ""
) -> Tensor:
    return torch.empty(size, dtype=dtype, device=device)


def _fake_alike(x: Tensor, *_arguments: Any, **_options: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


for _operator in (_draw, _draw_integers, _draw_permutation):
    _operator.register_fake(_fake_made)
for _operator in (_draw_poisson, _draw_gamma, _dropout_mask, _traced_dropout):
    _operator.register_fake(_fake_alike)


_library = torch.ops.autoparallel
draw = _library.draw.default
draw_classes = _library.draw_classes.default
draw_gamma = _library.draw_gamma.default
draw_integers = _library.draw_integers.default
draw_permutation = _library.draw_permutation.default
draw_poisson = _library.draw_poisson.default
traced_dropout = _library.dropout.default

NUMBERS: dict[Callable[..., Tensor], int] = {
    dropout: 2, draw: 3, draw_classes: 3, draw_gamma: 1, draw_integers: 3, draw_permutation: 1, draw_poisson: 1,
}  # fmt: skip
"""Where the number of the draw stands among the arguments of each operator, by which a graph gives it."""

DRAWS = tuple(NUMBERS)
"""Every operator of a program whose result is random."""
