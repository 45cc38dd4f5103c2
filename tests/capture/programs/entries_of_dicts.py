"""Dicts that modules hold, of which calls set entries: caches for each device, statistics by their names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from autoparallel.text import LOGGER
from tests.capture.programs.inplace import Two
from tests.capture.registry import loop, program
from tests.capture.runner import STEPS, Run, numbers, rows, sgd


class Biased(nn.Module):
    """Attention's biases by position, as LeViT, TinyViT and EfficientFormer look them up: once for each device in
    evaluation, at every call in training."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.biases = nn.Linear(8, 8), nn.Parameter(torch.randn(8))
        self.register_buffer("places", torch.arange(8).flip(0), persistent=False)
        self.cache: dict[str, Tensor] = {}

    def train(self, mode: bool = True) -> Biased:
        super().train(mode)
        if mode and self.cache:
            self.cache = {}
        return self

    def biases_on(self, device: torch.device) -> Tensor:
        if self.training:
            return self.biases[self.places]
        key = str(device)
        if key not in self.cache:
            self.cache[key] = self.biases[self.places]
        return self.cache[key]

    def forward(self, x: Tensor) -> Tensor:
        return (self.a(x) + self.biases_on(x.device)).tanh()


@loop(ranks=True)
def cache_for_each_device(run: Run) -> None:
    """It is kept while the model is evaluated, whatever becomes of the parameter, and made anew after an epoch."""
    model = run.compile(nn.Sequential(Biased(), nn.Linear(8, 8), Biased()))
    optimizer = sgd(model)
    for step in range(STEPS):
        run.step(model, optimizer, step)
        model.eval()
        with torch.no_grad():
            run.note("first", model(*rows(20 + step)))
            run.note("cached", run.plains[0].get_submodule("0").cache)
            model.get_parameter("0.biases").mul_(0.5)
            run.note("second", model(*rows(30 + step)))
        model.train()


@loop()
def cache_made_again(run: Run) -> None:
    """That of a later epoch is no reason for another trace."""
    lines: list[str] = []
    listener = lambda record: not lines.append(record.getMessage())  # noqa: E731
    model = run.compile(nn.Sequential(Biased(), nn.Linear(8, 8)))
    for step in range(STEPS):
        run.backward(run.call(model, step))
        model.eval()
        with torch.no_grad():
            for batch in range(2):
                run.note("evaluation", model(*rows(20 + step + batch)))
        model.train()
        if step == 0:
            LOGGER.addFilter(listener)
    LOGGER.removeFilter(listener)
    run.note("lines", lines)


@program(ranks=True, observe=lambda model: model.found)
class Statistics(Two):
    """By their names, one of them an average over calls."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        mean = h.detach().mean(0)
        self.found["average"] = 0.9 * self.found["average"] + 0.1 * mean if "average" in self.found else mean
        self.found["largest"] = h.detach().amax()
        return self.b(h - self.found["average"])


@program(observe=lambda model: model.bands)
class BandsBySize(Two):
    """A constant for each size of the input, which is a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.bands: dict[tuple[int, int], Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if (size := (x.shape[1], 8)) not in self.bands:
            self.bands[size] = torch.ones(size, dtype=x.dtype).triu()
        return self.b(self.a(x) @ self.bands[size])


@program(ranks=True, observe=lambda model: model.found)
class ChangedInPlace(Two):
    def __init__(self) -> None:
        super().__init__()
        self.found = {"sum": torch.zeros(8), 0: torch.zeros(())}

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.found["sum"].add_(h.detach().mean(0)[:8])
        self.found[0] += 1
        return self.b(h) / self.found[0]


def bound_anew(model: nn.Module, step: int) -> None:
    model.found = {"shift": numbers(8, seed=step)}


@program(ranks=True, between=bound_anew)
class EntriesFromOutside(Two):
    """Another tensor of the same shape before each step."""

    found: dict[str, Tensor]

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) + self.found["shift"])


@program(ranks=True)
class KeepsWhatHasAGradient(Two):
    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.found["h"] = self.a(x)
        return self.b(self.found["h"])


@program(ranks=True, observe=lambda model: model.found)
class TakesEntriesOut(Two):
    """Their order is another one then."""

    def __init__(self) -> None:
        super().__init__()
        self.found = {"shift": torch.ones(8), "other": torch.ones(8)}

    def forward(self, x: Tensor) -> Tensor:
        self.found["shift"] = self.found.pop("shift")
        return self.b(self.a(x) + self.found["shift"])


@program(refused="return what is collected")
class MoreThanAFew(Two):
    """Each would be another trace."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, Any] = dict.fromkeys(range(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.found[len(self.found)] = h.detach().mean()  # refused
        return self.b(h)
