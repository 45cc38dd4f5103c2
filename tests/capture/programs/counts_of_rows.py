"""How many rows values select, as a number that is kept or returned; flags that are written before they are asked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.capture.programs.inplace import Two
from tests.capture.registry import program
from tests.capture.runner import signed


@program(batch=signed, ranks=True)
class ReturnsACount(Two):
    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.a(x)
        selected = h[h > 0]
        return {"out": self.b(h), "count": len(selected), "share": len(selected) / h.numel()}


@program(batch=signed, ranks=True)
class KeepsACount(Two):
    def __init__(self) -> None:
        super().__init__()
        self.count, self.share, self.total = 0, 0.0, 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        rows = h[h[:, 0] > 0]
        self.count = rows.shape[0]
        self.share = float(len(rows)) / x.shape[0]
        self.total += len(rows)
        return self.b(h) + rows.sum()


@program(batch=signed, ranks=True)
class ComputesWithACount(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        places = (h > 0).nonzero()
        return self.b(h) * (places.shape[0] / 10) / max(len(h[h > 1]), 1)


@program(batch=signed, ranks=True)
class AsksAndReturnsACount(Two):
    def forward(self, x: Tensor) -> tuple[Tensor, int, bool]:
        h = self.a(x)
        rows = h[h[:, 0] > 0]
        if len(rows) > 2:
            h = h * 2
        return self.b(h), rows.numel(), len(rows) == 0


@program(batch=signed, ranks=True)
class WritesAFlagAndAsks(Two):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ready", torch.tensor(False))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if not self.ready:
            h = h * 2
        self.ready.fill_(True)
        self.calls += 1
        if self.ready:
            h = h + 1
        if self.calls > 1:
            h = h * 3
        return self.b(h)


@program(batch=signed, random=True)
class WritesAFlagAndDraws(Two):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ready", torch.tensor(False))
        self.register_buffer("noise", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if not self.ready:
            self.noise.copy_(torch.rand(8))
            self.ready.fill_(True)
        if self.ready:
            h = h + self.noise + torch.rand_like(h)
        return self.b(h)


@program(batch=signed, ranks=True)
class WritesAndAsks(Two):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ready", torch.tensor(1))
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> tuple[Tensor, bool]:
        h = self.a(x)
        before = bool(self.ready)
        self.ready.zero_()
        if self.ready.item() == 0:
            h = h * 2
        self.ready.add_(1)
        if self.ready:
            h = h + 1
        self.scale.fill_(0.5)
        if self.scale.item() < 0.7:
            h = h * self.scale
        self.ready.fill_(1)
        return self.b(h), before


@program(batch=signed, ranks=True)
class FillsOnOneWay(Two):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if x.sum() > 0:
            self.seen.fill_(True)
        if self.seen:
            h = h * 2
        return self.b(h)
