"""Small models whose programs ``benchmarks.mutations`` makes wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoparallel
from tests.models.cases import Batch, Case, seeded
from tests.models.gpt import GPTConfig, build_gpt
from tests.models.mixtures import MoEConfig, build_moe
from tests.models.small import build_mlp


class Norms(nn.Module):
    """A batch norm, whose statistics are of the whole batch, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.dropout = nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Dropout(0.25)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(F.gelu(self.norm(self.up(x)))))


class Tilted(torch.autograd.Function):
    """Has a backward of its own, which no derivative would give, but which is linear in the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 3 * grads[0]


class Functions(nn.Module):
    """An autograd.Function with a rule, a region without gradients, a detach, and a loss of two means and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 16), nn.Linear(16, 12)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = Tilted.apply(self.up(x))
        with torch.no_grad():
            scale = hidden.square().mean() + 1
        out = self.down(hidden / scale) + hidden[:, :12].detach()
        loss = F.mse_loss(out, y) + 0.1 * out.square().mean(0).sum()
        return {"loss": loss, "out": out}


def _rows(step: int, rows: int, seed: int) -> tuple[torch.Generator, Tensor]:
    generator = seeded(step, seed)
    x = torch.randn(rows, 12, generator=generator, dtype=torch.float64)
    return generator, x * torch.linspace(0.5, 2.0, rows, dtype=torch.float64)[:, None]


def norms() -> Case:
    """A batch norm and dropout, with a cross-entropy of which some targets do not count."""

    def make_batch(step: int, rows: int, seed: int = 0) -> Batch:
        generator, x = _rows(step, rows, seed)
        target = torch.randint(0, 8, (rows,), generator=generator)
        target[-1] = -100
        return (x, target), {}

    return Case("norm", Norms().double(), make_batch, F.cross_entropy)


def functions() -> Case:
    """See ``Functions``."""
    autoparallel.register_rule(Tilted, "b d -> b d")

    def make_batch(step: int, rows: int, seed: int = 0) -> Batch:
        generator, x = _rows(step, rows, seed)
        return (x, torch.randn(rows, 12, generator=generator, dtype=torch.float64)), {}

    return Case("functions", Functions().double(), make_batch, None)


def _seeded(build: Callable[[], Case]) -> Case:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build()


_GPT = GPTConfig(vocabulary=16, context=4, width=8, heads=2, layers=1)
_MOE = MoEConfig(vocabulary=16, context=4, width=8, heads=2, layers=1, experts=4, hidden=8)

MODELS: dict[str, Callable[[], Case]] = {
    "mlp": partial(_seeded, partial(build_mlp, torch.float64)),
    "gpt": partial(_seeded, partial(build_gpt, torch.float64, _GPT)),
    "norm": partial(_seeded, norms),
    "moe": partial(_seeded, partial(build_moe, torch.float64, _MOE)),
    "functions": partial(_seeded, functions),
}
"""What makes a model with its batches, by name."""
