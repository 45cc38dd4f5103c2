"""Small programs against eager autograd, on one rank in this process or on several."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import autoparallel
from tests.runtime.support import gradients_off, off, parameters_off

Forward = Callable[[Any, Tensor], Any]
Loss = Callable[[Any], Tensor]

TOLERANCE = 1e-9


class Program(nn.Module):
    """A forward over a matrix ``w`` of [8, 8] and a vector ``b`` of 8."""

    def __init__(self, forward: Forward, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.w = nn.Parameter(torch.randn(8, 8, generator=generator, dtype=dtype) / 3)
        self.b = nn.Parameter(torch.randn(8, generator=generator, dtype=torch.float64))
        self.function = forward

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def rows(count: int = 4, seed: int = 1) -> Tensor:
    """A batch of [count, 6, 8]."""
    return torch.randn(count, 6, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def total(out: Any) -> Tensor:
    """The sum of an output, or of its first tensor."""
    value = out if isinstance(out, Tensor) else next(x for x in out if isinstance(x, Tensor))
    return value.abs().sum() if value.is_complex() else value.sum()


def difference(
    forward: Forward,
    loss_of: Loss = total,
    *,
    dtype: torch.dtype = torch.float64,
    inputs: Callable[[int], Tensor] = rows,
    steps: int = 2,
    mesh: Any = None,
    **options: Any,
) -> float:
    """How far compiled and plain model come apart in some steps: losses, gradients (infinite where only one of them has
    one), parameters; the second batch has another size.

    Raises:
        AssertionError: where no gradient flows at all, so that nothing would be compared.
    """
    model = Program(forward, dtype)
    plain = copy.deepcopy(model)
    compiled = autoparallel.compile(model, mesh, **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (compiled, plain)]
    worst = 0.0
    for step in range(steps):
        x = inputs(4 + 2 * step)
        losses = [loss_of(m(x)) for m in (compiled, plain)]
        for loss in losses:
            loss.backward()
        assert any(p.grad is not None and p.grad.abs().max() > 0 for p in plain.parameters())
        worst = max(worst, off(*losses), gradients_off(compiled, plain))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        worst = max(worst, parameters_off(compiled, plain))
    return worst
