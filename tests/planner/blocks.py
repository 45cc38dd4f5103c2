"""A model of alike layers, for tests of the planner."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Blocks(nn.Module):
    """Residual layers of two linears each."""

    def __init__(self, layers: int, width: int, inner: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width, inner) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x
