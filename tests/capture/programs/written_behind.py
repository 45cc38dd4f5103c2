"""Values that are written behind autograd's back, by ``x.data`` and under ``no_grad``: gradients are as without."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.capture.programs.inplace import Two
from tests.capture.registry import program
from tests.capture.runner import numbers


@program(batch=lambda step: (numbers(4, 6, 8, seed=step), torch.arange(6).expand(4, 6) >= 6 - step), ranks=True)
class MasksEnergies(nn.Module):
    """Attention and outputs as Tacotron 2 has them."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.memory, self.score = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1, bias=False)

    def forward(self, memory: Tensor, mask: Tensor) -> list[Tensor]:
        query = self.query(memory.mean(1)).unsqueeze(1)
        alignment = self.score(torch.tanh(query + self.memory(memory))).squeeze(-1)
        alignment.data.masked_fill_(mask, -float("inf"))
        weights = alignment.softmax(1)
        outputs = [torch.bmm(weights.unsqueeze(1), memory).squeeze(1), self.query(memory)]
        outputs[1].data.masked_fill_(mask.unsqueeze(-1), 0.0)
        return outputs


@program(ranks=True)
class ArcFace(Two):
    """Angles are made larger without a gradient, as insightface does it."""

    def forward(self, x: Tensor) -> Tensor:
        logits = self.b(self.a(x)).tanh().clamp(-1, 1)
        rows, labels = torch.arange(x.shape[0]), x.argmax(-1)
        target = logits[rows, labels]
        with torch.no_grad():
            target.arccos_()
            logits.arccos_()
            logits[rows, labels] = target + 0.5
            logits.cos_()
        return logits * 64.0


@program(ranks=True)
class ReadsWhatItWrites(Two):
    """What shares the memory has the values, too."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        row, data = h.view(-1, 8), h.data
        data[0] = 3.0
        data += 1
        data[data > 2.5] = 0.5
        data[:, 1:3].clamp_(max=2.0)
        with torch.no_grad():
            first = h[:2]
            first.mul_(2)[1].zero_()
        return self.b(row * data.mean()) + data + h


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grads[0]


@program(refused=r"x \+ \(value - x\)")
class WritesWhatAFunctionKeeps(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        squared = Squares.apply(h)
        h.data.mul_(2)  # refused
        return self.b(h) + squared


@program(refused=r"x \+ \(value - x\)")
class WritesWhatTheBackwardReads(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        squared = h * h
        h.data.mul_(2)  # refused
        return self.b(squared)
