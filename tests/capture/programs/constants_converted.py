"""Tensors that a model holds in containers, and makes tensors of by ``torch.as_tensor`` and its like."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tests.capture.programs.inplace import Two
from tests.capture.registry import program


class Rates(NamedTuple):
    """As norse keeps what its neurons are like."""

    leak: Tensor = torch.tensor(0.5)
    threshold: Tensor = torch.tensor(1.0)


@program(ranks=True)
class AsTensorOfConstants(Two):
    def __init__(self) -> None:
        super().__init__()
        self.rates = Rates()

    def forward(self, x: Tensor) -> Tensor:
        leak = torch.as_tensor(self.rates.leak, dtype=x.dtype, device=x.device)
        both = torch.as_tensor([self.rates.leak, self.rates.threshold]).to(x)
        return self.b(self.a(x) * leak + torch.tensor(self.rates.threshold) * both.sum()) * torch.as_tensor(x)


@program()
class StateThatBeginsAtAConstant(Two):
    def __init__(self) -> None:
        super().__init__()
        self.rates = Rates()

    def forward(self, x: Tensor) -> Tensor:
        voltage = torch.full(x.shape, torch.as_tensor(self.rates.leak).detach(), dtype=x.dtype, device=x.device)
        voltage.requires_grad = True
        return self.b(voltage + self.a(x)) - torch.asarray(self.rates.threshold)
