"""Factories that the command line's tests name."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    """Two blocks of two linears."""

    def __init__(self, width: int = 16, hidden: int = 32, classes: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)) for _ in range(2)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def net(batch: int = 8) -> tuple[nn.Module, tuple[Any, ...], Any]:
    """The net in float64, and a batch."""
    model = Net().double()
    return model, (torch.randn(batch, 16, dtype=torch.float64), torch.randint(0, 4, (batch,))), F.cross_entropy


def reads_values() -> tuple[nn.Module, tuple[Any, ...]]:
    """A factory that the meta device is too little for."""
    width = int(torch.tensor(6).item())
    return nn.Linear(width, 4), (torch.randn(8, width),)


def fails() -> Any:
    """A factory with a fault of its own."""
    return {}["width"]
