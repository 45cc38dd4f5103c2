"""Distributions that a model holds, as priors are, or makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Categorical, Independent, MultivariateNormal, Normal, kl_divergence

from tests.capture.programs.inplace import Two
from tests.capture.registry import loop, program
from tests.capture.runner import STEPS, Run, numbers


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


@program(ranks=True)
class NormalOfACovariance(Two):
    """Its constraint asks whether the matrices are symmetric before it looks for negative eigenvalues."""

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.diag_embed(self.b(x).exp()) + 0.1
        normal = MultivariateNormal(self.a(x), covariance_matrix=scale @ scale.mT)
        return normal.log_prob(x) + normal.entropy()


@dataclass
class Decision:
    policy: Any
    info: dict[str, float]


@loop(ranks=True)
def a_number_in_an_object_that_is_first_seen(run: Run) -> None:
    class Decides(Two):
        def forward(self, x: Tensor) -> Decision:
            policy = Categorical(logits=self.b(self.a(x)))
            return Decision(policy, {"entropy": policy.entropy().mean().item()})

    model = run.compile(Decides().double())
    for step in range(STEPS):
        decision = model(numbers(8, 8, seed=step))
        run.note("info", decision.info)
        decision.policy.log_prob(torch.arange(8)).mean().backward()
        run.note_gradients(model)
