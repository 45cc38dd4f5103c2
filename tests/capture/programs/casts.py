"""Gradient modes in regions of autocast, whose parts a trace cuts at both."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.capture.registry import program
from tests.capture.runner import numbers


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.weight = nn.Linear(8, 8), nn.Parameter(numbers(8, 8, seed=2))
        self.register_buffer("mean", torch.zeros(8))


@program(ranks=True)
class NoGradWithoutAutocast(Layer):
    """As a codebook does, which leaves autocast and updates its averages."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        with torch.autocast("cpu", enabled=False):
            doubled = h * 2
            with torch.no_grad():
                fixed = h.tanh()
                with torch.enable_grad():
                    tripled = h * 3
                self.mean.lerp_(h.mean(0), 0.1)
        return h * fixed + doubled.sigmoid() + tripled + self.mean


@program(ranks=True)
class ChangedWithoutAutocast(Layer):
    """A parameter is changed there."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False), torch.no_grad():
            self.weight.mul_(0.9)
        return torch.tanh(x @ self.weight)


@program(ranks=True)
class NoGradUnderAutocast(Layer):
    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            scores = h @ self.weight
            with torch.no_grad():
                fixed = (h @ self.weight).tanh()
                with torch.enable_grad():
                    tripled = h * 3
            with torch.autocast("cpu", enabled=False), torch.no_grad():
                waves = h.sin()
        return h * fixed + scores + tripled * waves


@program(ranks=True)
class WrittenUnderAutocast(Layer):
    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x) * 2
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h.mul_(0.5)
            scores = h @ self.weight
        return h * scores


# -- refused --------------------------------------------------------------------------------------------------------


@program(refused="before the region begins")
class ParameterUnderAutocast(Layer):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                self.weight.mul_(0.9)  # refused
            return self.linear(x) @ self.weight


@program()
class BehindAutogradUnderAutocast(Layer):
    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x) * 2
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            h.mul_(0.5)
        return h * h


@program()
class ThroughDetachUnderAutocast(Layer):
    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x) * 2
        k = h.detach()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            k.mul_(0.5)
        return h * h
