"""Functions that a model holds, and that reach into it by a closure."""

from __future__ import annotations

import itertools
import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.programs.inplace import Two
from tests.capture.registry import loop, program
from tests.capture.runner import STEPS, Run, sgd


@program(ranks=True)
class FunctionsOfItsModules(Two):
    def __init__(self) -> None:
        super().__init__()
        self.steps = [lambda x: torch.tanh(self.a(x)), {"last": lambda x: self.b(x)}["last"]]

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x


@program(ranks=True)
class FunctionOfItsWeight(Two):
    """One function reaches another, which reaches a parameter."""

    def __init__(self) -> None:
        super().__init__()
        weight = lambda: self.a.weight.t()  # noqa: E731
        self.product = partial(lambda scale, x: x @ weight() * scale, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.product(x))


class Activations:
    """As a configuration has them."""


@program(ranks=True)
class FunctionsInObjects(Two):
    """Functions in an object of the user's and in a namespace reach the model's parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.config: Any = Activations()
        self.config.inner = lambda x: torch.tanh(x) * self.gain
        self.last = SimpleNamespace(scale=partial(lambda scale, x: x * self.gain.sum() * scale, 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.last.scale(self.b(self.config.inner(self.a(x))))  # type: ignore[no-any-return]


@program(ranks=True)
def forward_of_an_instance() -> nn.Module:
    """The forward of one layer is replaced by a function that calls the old one."""
    first = nn.Linear(8, 8)
    old = first.forward
    first.forward = lambda x: old(x).sin()  # type: ignore[assignment, method-assign]
    return nn.Sequential(first, nn.Linear(8, 8))


class Reaches(nn.Module):
    def __init__(self, layer: nn.Module, function: Any) -> None:
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x) + self.layer(x)  # type: ignore[no-any-return]


@program(ranks=True)
def function_of_a_layer_beside() -> nn.Module:
    layer = nn.Linear(8, 8)
    return Reaches(layer, lambda x: layer(x).relu())


class ScaledByItsParent(nn.Module):
    def __init__(self, parent: nn.Module) -> None:
        super().__init__()
        self.layer, self.parent = nn.Linear(8, 8), weakref.ref(parent)

    def forward(self, x: Tensor) -> Tensor:
        parent = self.parent()
        return self.layer(x) * parent.scale + x @ parent.b.weight  # type: ignore[union-attr, operator]


@program(between=lambda model, step: setattr(model, "scale", 1.0 + step), ranks=True)
class HasAChildThatKnowsIt(Two):
    def __init__(self) -> None:
        super().__init__()
        self.child, self.scale = ScaledByItsParent(self), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.child(x))


@loop()
def what_a_function_reaches_is_replaced(run: Run) -> None:
    first, second = nn.Linear(8, 8).double(), nn.Linear(8, 8).double()
    layer, scale = first, 1.0

    def function(x: Tensor) -> Tensor:
        return F.linear(x, layer.weight) * scale

    model = run.compile(Reaches(nn.Sequential(first, second), function).double())
    optimizer = sgd(model)
    for step in range(STEPS):
        layer, scale = (second if step == 1 else first), 1.0 + step
        run.step(model, optimizer, step)


@program()
class ReadsItsOwnIterators(Two):
    """Functions inside read them, among which Python 3.11 counts comprehensions."""

    def forward(self, x: Tensor) -> Tensor:
        columns, scales, count = iter(x.unbind(1)), iter([0.5, 2.0, 3.0]), itertools.count()

        def scale() -> float:
            return next(scales) + next(count)

        x = torch.stack([next(columns) * (i + 1) if i % 2 else next(columns).sin() for i in range(x.shape[1])], 1)
        return self.b(self.a(x) * scale()) * scale()


class Rate:
    def __init__(self) -> None:
        self.value = 1.0


class HoldsARate(Two):
    def __init__(self) -> None:
        super().__init__()
        self.rate = Rate()
        self.weak = weakref.ref(self.rate)


@program(between=lambda model, step: setattr(model.rate, "value", 1.0 + step), ranks=True)
class RefersWeaklyToAnObject(HoldsARate):
    def forward(self, x: Tensor) -> Tensor:
        rate = self.weak()
        return self.a(x) * (rate.value if rate is self.rate else 0.5)  # type: ignore[union-attr]


@program(between=lambda model, step: setattr(model.rate, "value", 1.0 + step), ranks=True)
class HasAnObjectThatKnowsIt(HoldsARate):
    def __init__(self) -> None:
        super().__init__()
        self.rate.model = weakref.ref(self)  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return self.rate.model().a(x) * self.rate.value  # type: ignore[attr-defined]


@program(refused="in a list or a dict")
class HoldsAWeakSet(HoldsARate):
    def __init__(self) -> None:
        super().__init__()
        self.rates = weakref.WeakSet([self.rate])

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * sum(rate.value for rate in self.rates)  # refused


@program(between=lambda model, step: setattr(model, "scale", 1.0 + step), ranks=True)
class DefaultsOfFunctions(Two):
    """As where a loop makes them, whose variable each is to keep."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.steps = [lambda x, layer=layer, *, model=self: layer(x) * model.scale for layer in (self.a, self.b)]

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x
