"""Random operators, compared with the plain model that is given the same numbers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.programs.inplace import Two
from tests.capture.registry import program
from tests.capture.runner import tokens


@program(random=True, ranks=True)
def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 8), nn.Dropout(0.1))


@program(random=True)
class FunctionalDropout(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.dropout(self.a(x), 0.4, self.training))


@program(random=True)
class DropoutAlways(Two):
    """Monte Carlo dropout: active in evaluation, too; in place."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.dropout(self.a(x).clone(), 0.4, True, inplace=True))


@program(random=True)
def alpha_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.SELU(), nn.AlphaDropout(0.2), nn.Linear(8, 8))


@program(random=True, ranks=True)
class FeatureDropout(nn.Module):
    """Whole channels."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop, self.b = nn.Linear(8, 8), nn.Dropout1d(0.4), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.drop(self.a(x).view(-1, 4, 2)))


@program(random=True, ranks=True)
class DropPath(Two):
    """A residual branch is dropped for a whole row (timm)."""

    def forward(self, x: Tensor) -> Tensor:
        keep = 0.7
        mask = x.new_empty((x.shape[0], 1)).bernoulli_(keep)
        return x + self.a(x) * mask.div_(keep)


@program(random=True, ranks=True)
class Noise(Two):
    """Gaussian noise, scaled by a parameter: noisy gates."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return h + torch.randn_like(h) * F.softplus(self.b(x))


@program(random=True, ranks=True)
class NoGenerator(Two):
    """A function hands its ``generator=None`` on (the posterior of an autoencoder of diffusers)."""

    def forward(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        h = self.a(x) + torch.randn(x.shape, generator=generator, dtype=x.dtype)
        h = h * torch.rand(x.shape, generator=generator, dtype=x.dtype)
        signs = torch.randint(2, (8,), generator=generator) * torch.randint(1, 3, (8,), generator=generator)
        return self.b(h * signs)[:, torch.randperm(8, generator=generator)]


@program(random=True, ranks=True)
class Reparameterized(Two):
    """A VAE's sample."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log = self.a(x), self.b(x)
        z = mean + torch.randn(mean.shape, dtype=mean.dtype) * (0.5 * log).exp()
        return z, -0.5 * (1 + log - mean.square() - log.exp()).sum(-1)


@program(random=True)
class GumbelSoftmax(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.gumbel_softmax(self.a(x), tau=0.7, hard=True))


@program(random=True)
class Exponential(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) - torch.empty_like(x).exponential_().log()


@program(random=True)
class UniformNoise(Two):
    """Dequantisation, drawn in place."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) + torch.empty(x.shape, dtype=x.dtype).uniform_(-0.1, 0.1)) * torch.rand_like(x)


@program(random=True, batch=tokens)
class TokenMasking(nn.Module):
    """Masked language modelling inside the model: rand, randint, bernoulli."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        masked = torch.rand(ids.shape) < 0.3
        other = torch.randint(0, 8, ids.shape)
        keep = torch.bernoulli(torch.full(ids.shape, 0.5)).bool()
        return self.head(self.table(torch.where(masked & keep, other, ids)))


@program(random=True)
class Shuffled(Two):
    """Negatives by a permutation of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        order = torch.randperm(x.shape[0])
        return (self.a(x) * self.b(x)[order]).sum(-1)


@program(random=True)
class Sampled(Two):
    """Actions by multinomial."""

    def forward(self, x: Tensor) -> Tensor:
        p = self.a(x).softmax(-1)
        action = torch.multinomial(p, 1)
        return p.gather(1, action).log()


@program(random=True)
class NormalDistribution(Two):
    """torch.distributions: rsample, with the checks of values that they make."""

    def forward(self, x: Tensor) -> Tensor:
        d = torch.distributions.Normal(self.a(x), F.softplus(self.b(x)))
        z = d.rsample()
        return d.log_prob(z.detach()) + z


@program(random=True)
class BayesByBackprop(Two):
    """Noise on weights."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.a.weight + 0.1 * torch.randn_like(self.a.weight)
        return F.linear(x, w, self.b.bias)


@program(random=True)
class RandomizedRelu(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.rrelu(self.a(x), training=self.training))


@program(random=True)
class AttentionDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x.view(-1, 2, 4)).view(-1, 2, 3, 2, 2).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3 if self.training else 0.0)


@program(random=True)
class RecurrentDropout(nn.Module):
    """One mask for all times (locked dropout)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        mask = x.new_empty(x.shape[0], 8).bernoulli_(0.6) / 0.6
        h = torch.zeros(x.shape[0], 8)
        for part in x.view(-1, 4, 2).unbind(1):
            h = torch.tanh(self.a(part) + self.b(h * mask))
        return h


@program(refused=".")
class OwnGenerator(Two):
    """A generator that the model keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + torch.rand(8, generator=self.generator)  # refused


@program(refused=".")
class SeedsItself(Two):
    """The same projection at every call, by a fixed seed."""

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(7)  # refused
        return self.a(x) @ torch.randn(8, 3)


@program(refused="others with torch")
class OwnGeneratorOfPython(Two):
    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.random.random()  # refused


@program(refused="others with torch")
class OwnGeneratorOfNumpy(Two):
    def __init__(self) -> None:
        super().__init__()
        self.random = np.random.default_rng(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * float(self.random.uniform(0.5, 1.0))  # refused


GENERATOR = np.random.default_rng(1)


@program(refused="others with torch")
class GlobalGeneratorOfNumpy(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * float(GENERATOR.random())  # refused


@program()
class GeneratorThatIsNotAsked(Two):
    """In evaluation and at a rate of zero nothing is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.random, self.rate = np.random.default_rng(1), 0.0

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return h * float(self.random.random()) if self.rate and self.random is not None else h


@program(refused="others with torch")
class GeneratorOfAClass(Two):
    random = random.Random(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.random.random()  # refused


@program(refused="others with torch")
class MethodOfAGenerator(Two):
    def __init__(self) -> None:
        super().__init__()
        self.draw = random.Random(1).random

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.draw()  # refused


_CHECKED = """
def checked(function):
    def check(module, rows):
        if not isinstance(rows[getrandbits(32) % len(rows)], Tensor):
            raise TypeError("rows")
        return function(module, rows)
    return check
"""


def beartype(function: Any) -> Any:
    """What that decorator makes of a function with a list: each call checks the type of one item that it draws."""
    names: dict[str, Any] = {"getrandbits": random.getrandbits, "Tensor": Tensor}
    exec(compile(_CHECKED, "<@beartype(rows) at 0x1>", "exec"), names)
    return names["checked"](function)


@program(ranks=True)
class ChecksTypes(Two):
    @beartype
    def add_up(self, rows: list[Tensor]) -> Tensor:
        return torch.stack(rows).sum(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.add_up([self.a(x), x, x * 2]))
