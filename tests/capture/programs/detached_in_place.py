"""``x.detach_()``: where a tensor itself is cut from its gradient."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.capture.registry import program


class _TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("total", torch.zeros(()))


@program()
class DetachInPlace(_TwoLayers):
    """``detach_`` cuts the tensor itself."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        before = h.mean()
        h.detach_()
        return self.b(h) + before


@program()
class DetachInPlaceWithoutGradients(_TwoLayers):
    """``detach_`` cuts the tensor, whatever the mode; what it becomes then is another's gradient."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        weights = h * 2
        with torch.no_grad():
            weights.detach_()
        weights += 1
        return self.b(h) * weights


@program(ranks=True)
class DetachInPlaceBetweenSteps(_TwoLayers):
    """Truncated backpropagation through time."""

    def forward(self, x: Tensor) -> Tensor:
        h, losses = x, []
        for step in range(4):
            if step % 2 == 0:
                h = h.clone()
                h.detach_()
            h = self.a(h).tanh()
            losses.append(self.b(h).square().mean())
        return torch.stack(losses).mean()


@program(ranks=True)
class PenaltyThatStartsAgain(_TwoLayers):
    """A buffer gathers a penalty, is read, cut from its gradient and set to zero, as regularizers of pykeen do."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.total = self.total + h.abs().mean()
        penalty = 0.1 * self.total
        self.total.detach_().zero_()
        return self.b(h).square().mean() + penalty
