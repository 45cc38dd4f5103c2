"""Dicts and lists that a forward is given, and changes."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.capture.programs.inplace import Two
from tests.capture.registry import loop, program
from tests.capture.runner import STEPS, Run, numbers, sgd


class PopsAndAdds(Two):
    def forward(self, batch: dict[str, Any]) -> Tensor:
        x = batch.pop("x")
        batch["h"] = self.a(x)
        batch["parts"] = {"mean": batch["h"].mean(), "names": ["a", "b"]}
        return self.b(batch["h"])


class Logs(Two):
    def forward(self, x: Tensor, log: list[Any], *, inner: dict[str, list[Any]]) -> Tensor:
        h = self.a(x)
        log.append(h.detach())
        inner["means"].insert(0, h.mean())
        return self.b(h)


class ReturnsItsBatch(Two):
    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        batch["h"] = self.a(batch["x"])
        batch["out"] = self.b(batch["h"])
        return batch


def _train(run: Run, model: Any, step: int, optimizer: Any, *args: Any, **kwargs: Any) -> None:
    output = model(*args, **kwargs)
    run.note("output", output, grad=True)
    run.note("arguments", (args, kwargs))
    (output["out"] if isinstance(output, dict) else output).square().mean().backward()
    run.note_gradients(model)
    optimizer.step()
    optimizer.zero_grad()


@loop(ranks=True)
def a_batch_loses_and_gets_entries(run: Run) -> None:
    model = run.compile(PopsAndAdds().double())
    for step in range(STEPS):
        _train(run, model, step, sgd(model), {"x": numbers(8, 8, seed=step), "id": torch.arange(8)})


@loop(ranks=True)
def lists_grow(run: Run) -> None:
    model = run.compile(Logs().double())
    log: list[Any] = []
    for step in range(STEPS):
        _train(run, model, step, sgd(model), numbers(8, 8, seed=step), log[:1], inner={"means": [0.0, 1.0]})


@loop(ranks=True)
def a_batch_is_returned(run: Run) -> None:
    model = run.compile(ReturnsItsBatch().double())
    for step in range(STEPS):
        _train(run, model, step, sgd(model), {"x": numbers(8, 8, seed=step)})


@program(batch=lambda step: ({(1, 2): numbers(8, 8, seed=step)},), refused="work on a copy", line=False)
class AddsUnderATuple(Two):
    def forward(self, batch: dict[Any, Tensor]) -> Tensor:
        batch[2, 3] = self.a(batch[1, 2])
        return self.b(batch[2, 3])


@loop(ranks=True)
def numbers_beside_lengths_that_are_fixed(run: Run) -> None:
    """The number is another one at the second call of a length."""

    class Weighs(Two):
        def forward(self, x: Tensor, weight: float) -> Tensor:
            return self.b(sum(self.a(x[:, t]) * (t + 1) for t in range(x.shape[1]))) * weight

    model = run.compile(Weighs().double())
    for step, (length, weight) in enumerate([(6, 0.5), (6, 0.7), (5, 0.7), (5, 0.9), (4, 3.0), (4, 5.0), (6, 2.0)]):
        run.note("output", model(numbers(8, length, 8, seed=step), weight))


class Kind(enum.Enum):
    WIDE = 1
    NARROW = 2


class Size(enum.IntEnum):
    TWO = 2


class TakesAny(Two):
    """A forward that is told by an object what to do."""

    def forward(self, x: Tensor, what: Any) -> Tensor:
        h = self.a(x)
        h = h.to(what) if isinstance(what, torch.dtype) else what(h) if callable(what) else h
        return self.b(h)


@program(batch=lambda step: (numbers(8, 8, seed=step), torch.tanh), refused=r"attribute of the model", line=False)
def a_function_is_passed_in() -> nn.Module:
    return TakesAny()


@program(batch=lambda step: (numbers(8, 8, seed=step), nn.Tanh()), refused=r"attribute of the model", line=False)
def a_module_is_passed_in() -> nn.Module:
    return TakesAny()


def constants(step: int) -> tuple[Any, ...]:
    """A member of an enum that changes, a dtype, a device and a slice, also in a dict."""
    x, kind = numbers(8, 8, seed=step), (Kind.WIDE, Kind.NARROW)[step % 2]
    return x, kind, torch.float64, {"device": x.device, "part": slice(0, 4), "sizes": x.shape[1:], "size": Size.TWO}


@program(batch=constants, ranks=True)
class TakesConstants(Two):
    def forward(self, x: Tensor, kind: Kind, dtype: torch.dtype, options: dict[str, Any]) -> Tensor:
        h = self.a(x).to(dtype)[:, options["part"]] * options["size"]
        ones = torch.ones(options["sizes"], device=options["device"], dtype=dtype)
        return self.b(ones * h.mean(-1, keepdim=True)) * (2.0 if kind is Kind.WIDE else 1.0)


@program(batch=lambda step: (numbers(8, 8, seed=step), np.float64(0.1 * step), np.int64(step + 3)), ranks=True)
class TakesNumbersOfNumpy(Two):
    """As of ``np.linspace``."""

    def forward(self, x: Tensor, scale: Any, power: Any) -> Tensor:
        return self.b(self.a(x).abs() ** power) * scale


@program(batch=lambda step: (), ranks=True)
class IsGivenNothing(Two):
    """As what fits a picture, or solves an equation at points of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("points", torch.linspace(-1, 1, 32).view(4, 8))
        self.level = nn.Parameter(torch.ones(4, 1))

    def forward(self) -> Tensor:
        return self.b(torch.tanh(self.a(self.points))) * self.level
