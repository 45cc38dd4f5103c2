"""Python that asks again and again: ways that meet before the end are traced once for each question, not for each set
of answers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.capture.registry import program
from tests.capture.runner import Run, numbers, sgd


def eight_steps(run: Run) -> None:
    model = run.start()
    optimizer = sgd(model, lr=0.01)
    for step in range(8):
        run.step(model, optimizer, step)


def flags(step: int) -> tuple[Any, ...]:
    """Four rows of eight numbers, and five flags: each pair of them has all four values in these steps."""
    patterns = torch.tensor([0b11111, 0b00000, 0b10101, 0b01010, 0b01101, 0b11000, 0b00111, 0b10010])
    return numbers(4, 8, seed=step), (patterns[step] >> torch.arange(5)) % 2 - numbers(5, seed=step).sigmoid()


def few_rows(step: int) -> tuple[Any, ...]:
    """One row or three of eight numbers, so that not all experts have some."""
    return (numbers(1 + step % 2 * 2, 8, seed=step),)


class Five(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
        self.register_buffer("load", torch.zeros(5))


class Routed(Five):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 5)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        return weights, chosen


@program(batch=few_rows, loop=eight_steps)
class SkipsExpertsWithoutRows(Routed):
    """As a mixture of experts is mostly written by hand; who has no row has no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.route(x)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.layers):
            mask = chosen == i
            if mask.any():
                rows, places = torch.where(mask)
                out.index_add_(0, rows, expert(x[rows]) * weights[rows, places, None])
        return out


@program(batch=few_rows, loop=eight_steps)
class LeavesOutExpertsByTheirRows(Routed):
    """And counts in a buffer how many each had."""

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.route(x)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.layers):
            rows, places = torch.where(chosen == i)
            if rows.numel() == 0:
                continue
            out[rows] += expert(x[rows]) * weights[rows, places].unsqueeze(-1)
            self.load[i] += (chosen == i).sum()
        return out + self.load.sum()


@program(batch=flags, loop=eight_steps)
class ReadsWhatAnEarlierWayLeft(Five):
    def forward(self, x: Tensor, flags: Tensor) -> Tensor:
        out, last = self.layers[0](x), x.cos()
        for i, layer in enumerate(self.layers):
            if flags[i] > 0:
                last = layer(last)
            else:
                out = out + last
        return out


@program(batch=flags, loop=eight_steps)
class ExchangesTwoNames(Five):
    def forward(self, x: Tensor, flags: Tensor) -> Tensor:
        a, b = self.layers[0](x), self.layers[1](x)
        for i in range(5):
            if flags[i] > 0:
                a, b = b, a
        return a + 2 * b


@program(batch=flags, loop=eight_steps)
class AddsUpInAnAttribute(Five):
    def forward(self, x: Tensor, flags: Tensor) -> Tensor:
        out = self.layers[0](x)
        self.total = out.mean() * 0
        for i, layer in enumerate(self.layers):
            if flags[i] > 0:
                out = layer(out)
                self.total = self.total + out.square().mean()
        return out + self.total


@program(batch=flags, refused="torch.where")
class CountsItsWays(Five):
    """What follows depends on all answers, and these on parameters."""

    def forward(self, x: Tensor, flags: Tensor) -> Tensor:
        out, used = self.layers[0](x), 0
        for i, layer in enumerate(self.layers):
            if flags[i] + out.mean() * 0 > 0:  # refused
                out, used = layer(out), used + 1
        return out / max(used, 1)


@program(batch=flags, loop=eight_steps)
class HasNumbersInExpressions(Five):
    """A number waits for the others."""

    def weight(self, flag: Tensor) -> int:
        if flag > 0:
            return 1
        return 2

    def forward(self, x: Tensor, flags: Tensor) -> Tensor:
        return self.layers[0](x) * (self.weight(flags[0]) + self.weight(flags[1]) * self.weight(flags[2]))


@program(batch=flags, loop=eight_steps)
class WritesIntoOneOfTwoNames(Five):
    """Both are of one tensor on some ways."""

    def forward(self, x: Tensor, flags: Tensor) -> Tensor:
        a = self.layers[0](x)
        b = a
        for flag in flags[:3]:
            if flag > 0:
                b = b.clone()
            b.mul_(2)
        return a + 3 * b


@program(batch=flags, loop=eight_steps)
class AsksForAGradientBetween(Five):
    """Whether one is required depends on earlier answers."""

    def forward(self, x: Tensor, flags: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for i in range(3):
            if flags[i] > 0:
                out = out + self.layers[i](x)
            elif out.requires_grad:
                out = out * 2
            else:
                out = out + 5
        return out + self.layers[3](x)
