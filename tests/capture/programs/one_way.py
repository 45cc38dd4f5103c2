"""Attributes that are set, and answers that are given, on one of the ways alone that Python may take by a tensor's
value: the best so far, early stopping, plateaus."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from tests.capture.programs.changing_attributes import over_lengths
from tests.capture.programs.inplace import Two
from tests.capture.registry import loop, program
from tests.capture.runner import Run, sgd, signed

SIX = (6,) * 6


@loop(ranks=True)
def best_so_far(run: Run) -> None:
    class Best(Two):
        def __init__(self) -> None:
            super().__init__()
            self.best = math.inf

        def forward(self, x: Tensor) -> Tensor:
            loss = self.b(self.a(x)).square().mean()
            n = loss.item()
            if n < self.best:
                self.best = n
            return loss

    over_lengths(run, Best(), SIX)


@loop(ranks=True)
def stops_early(run: Run) -> None:
    class Stops(Two):
        def __init__(self) -> None:
            super().__init__()
            self.best, self.bad = float("inf"), 0

        def forward(self, x: Tensor) -> Tensor:
            h = self.b(self.a(x))
            n = h.square().mean().item()
            if n < self.best:
                self.best = n
                self.bad = 0
            else:
                self.bad += 1
            return h * 2 if self.bad > 2 else h

    over_lengths(run, Stops(), (6,) * 9)


@program(batch=signed, ranks=True)
class SetsANumberThatIsThere(Two):
    def __init__(self) -> None:
        super().__init__()
        self.last, self.sign, self.name = 0.0, False, 3

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if x.sum() > 0:
            self.last = 1.0
            self.sign = True
        else:
            self.name = 4
        return self.b(h)


@program(batch=signed, ranks=True)
class ReturnsAnswers(Two):
    def __init__(self) -> None:
        super().__init__()
        self.is_less, self.both = True, False

    def forward(self, x: Tensor) -> tuple[Tensor, bool, int, float]:
        h = self.a(x)
        n, k = x.sum().item(), (h > 0).sum().item()
        self.is_less = not (n > 0)
        self.both = (n > 0) and (k < 12)
        return self.b(h), not (n > 0), (n > 0) + (k > 12), 1.0 if n > 0 else n


class Tracked(nn.Module):
    """A layer that keeps the least mean of what it gives, and how often it was none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.least, self.misses = 1e3, 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x).tanh()
        if (n := h.mean().item()) < self.least:
            self.least = n
        else:
            self.misses += 1
        return h


@loop(ranks=True)
def in_layers(run: Run) -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Tracked() for _ in range(2))
            self.head = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return self.head(x) * (1 + sum(layer.misses for layer in self.layers))

    over_lengths(run, Layers(), SIX)


@loop(ranks=True)
def sets_on_the_second_way_alone_in_layers(run: Run) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.misses = 0.0

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x).tanh()
            if not h.mean() < 0:
                self.misses = 1.5
            return h

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return x

    over_lengths(run, Layers(), SIX)


@loop(ranks=True)
def twice_in_a_call(run: Run) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = Tracked(), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layer(self.layer(x)) * self.layer.least)

    over_lengths(run, Twice(), SIX)


@loop(ranks=True)
def best_in_a_dict(run: Run) -> None:
    class Best(Two):
        def __init__(self) -> None:
            super().__init__()
            self.stats = {"best": math.inf, "calls": 0, "bad": 0}

        def forward(self, x: Tensor) -> Tensor:
            h = self.b(self.a(x))
            n = h.square().mean().item()
            self.stats["calls"] += 1
            if n < self.stats["best"]:
                self.stats["best"] = n
            else:
                self.stats["bad"] += 1
            return h * (1 + self.stats["bad"])

    over_lengths(run, Best(), SIX)


@loop(ranks=True)
def best_in_buffers(run: Run) -> None:
    """Which are bound anew where it is better, and stay where it is not."""

    class Best(Two):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("best", torch.tensor(torch.inf))
            self.register_buffer("mean", torch.zeros(8))
            self.kept = torch.zeros(8)

        def forward(self, x: Tensor) -> Tensor:
            h = self.b(self.a(x))
            loss = h.square().mean().detach()
            if loss < self.best:
                self.best = loss
                self.mean = h.detach().mean((0, 1))
                self.kept = h.detach().amax((0, 1))
            return h + self.mean + self.kept

    over_lengths(run, Best(), SIX)


@loop(ranks=True)
def of_objects(run: Run) -> None:
    """Attributes of an object, one of which the class has."""

    class Plateau:
        best = math.inf

        def __init__(self) -> None:
            self.bad, self.factor = 0, 1.0

        def step(self, n: float) -> None:
            if n < self.best - 1e-3:
                self.best, self.bad = n, 0
            else:
                self.bad += 1
            if self.bad > 1:
                self.factor, self.bad = self.factor * 0.5, 0

    class Best(Two):
        def __init__(self) -> None:
            super().__init__()
            self.plateau = Plateau()

        def forward(self, x: Tensor) -> Tensor:
            h = self.b(self.a(x))
            self.plateau.step(h.square().mean().item())
            return h * self.plateau.factor

    over_lengths(run, Best(), (6,) * 9)


@program(batch=signed, ranks=True)
class NestsWays(Two):
    def __init__(self) -> None:
        super().__init__()
        self.large, self.level, self.flag = 0, 0.5, True

    def forward(self, x: Tensor) -> tuple[Tensor, bool]:
        h = self.a(x)
        n = h.norm().item()
        if n > 3:
            self.large += 1
            if n > 4:
                self.level = n
            elif x.sum() > 0:
                self.flag = not self.flag
        return self.b(h) * self.large, self.flag and n > 2


@program(batch=signed, ranks=True)
class CountsAnswers(Two):
    def __init__(self) -> None:
        super().__init__()
        self.total, self.share = 0, 0.0

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        h = self.a(x)
        large = [row.norm().item() > 1 for row in h]
        count = sum(large)
        self.total += sum(n > 0 for n in (h.sum().item(), x.sum().item()))
        self.share = count / len(large)
        return self.b(h) * count, {"count": count, "first": large[0], "less": 3 - large[1], "half": large[2] * 0.5}


@loop(ranks=True)
def beside_accumulation(run: Run) -> None:
    class Best(Two):
        def __init__(self) -> None:
            super().__init__()
            self.best, self.calls = math.inf, 0

        def forward(self, x: Tensor) -> Tensor:
            loss = self.b(self.a(x)).square().mean()
            if loss.item() < self.best:
                self.best = loss.item()
                self.calls += 1
            return loss

    model = run.compile(Best().double())
    optimizer = sgd(model)
    for step in range(3):
        for part in range(2):
            loss = model(*signed(2 * step + part))
            run.note("loss", loss)
            (loss / 2).backward()
        run.note_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        run.note_state(model)


@program(batch=signed, ranks=True)
class SetsWhatWasNothing(Two):
    def __init__(self) -> None:
        super().__init__()
        self.last: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if h.sum() > 0:
            self.last = 1.0
        return self.b(h)


@program(batch=signed, refused="torch.where")
class AppendsOnOneWay(Two):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if h.sum() > 0:  # refused
            self.log.append(h.sum().item())
        return self.b(h)


@program(batch=signed, refused="torch.where")
class SetsATensorThatWasNothing(Two):
    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if h.sum() > 0:  # refused
            self.last = h.detach()
        return self.b(h)


@program(batch=signed)
class CountsOrSetsAFraction(Two):
    """An int on one way, a float on the other, a bool, and None."""

    def __init__(self) -> None:
        super().__init__()
        self.rate: float = 0
        self.flag: Any = 0

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        h = self.a(x)
        if h.sum() > 0:
            self.rate += 1
            return self.b(h), None
        self.rate, self.flag = 0.5, True
        return self.b(h), h.abs().max().item()


@loop(ranks=True)
def from_zero(run: Run) -> None:
    """The best begins with a whole number, in an attribute and in a dict."""

    class Best(Two):
        def __init__(self) -> None:
            super().__init__()
            self.best, self.stats = 0, {"most": 0, "calls": 0}

        def forward(self, x: Tensor) -> Tensor:
            h = self.b(self.a(x))
            n = h.square().mean().item()
            if n > self.best:
                self.best = n
            if n > self.stats["most"]:
                self.stats["most"] = n
                self.stats["calls"] += 1
            return h * (1 + self.best)

    over_lengths(run, Best(), (6,) * 5)


@program(batch=signed, ranks=True)
class SetsAFloatThatWasAnInt(Two):
    def __init__(self) -> None:
        super().__init__()
        self.best = 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        n = h.abs().mean().item()
        if n > self.best:
            self.best = n
        return self.b(h)
