"""Distributions that a model holds, as priors are, or makes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributions import Categorical, Independent, Normal, kl_divergence

from tests.capture.programs.inplace import Two
from tests.capture.registry import program


def fill_prior(model: Any, step: int) -> None:
    """Changes the mean of a prior in place."""
    model.prior.base_dist.loc.fill_(0.1 * step)


def set_prior(model: Any, step: int) -> None:
    """Gives a prior another mean."""
    model.prior.loc = torch.full((8,), 0.1 * step)


@program(between=fill_prior, ranks=True)
class PriorInPlace(Two):
    def __init__(self) -> None:
        super().__init__()
        self.prior = Independent(Normal(torch.zeros(8), torch.ones(8)), 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.prior.log_prob(self.a(x))


@program(between=set_prior)
class PriorWithAnotherMean(Two):
    def __init__(self) -> None:
        super().__init__()
        self.prior = Normal(torch.zeros(8), torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.prior.log_prob(self.a(x))


@program(ranks=True)
class PriorOfNumbers(Two):
    """Which torch's own retrace must not compute with: it has no values there."""

    def __init__(self) -> None:
        super().__init__()
        self.prior = Normal(0.0, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        posterior = Normal(h, torch.ones_like(h))
        standard = Normal(torch.zeros_like(h), torch.ones_like(h))
        return kl_divergence(posterior, standard) + self.prior.log_prob(h)


@program()
class EntropyThatIsComputedOnce(Two):
    def __init__(self) -> None:
        super().__init__()
        self.prior = Categorical(logits=torch.arange(8.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.prior.entropy()
