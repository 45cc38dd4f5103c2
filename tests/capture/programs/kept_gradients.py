"""What calls keep with its gradient, of which the loop makes a term of its loss, in every kind of call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.capture.programs.inplace import Two
from tests.capture.programs.loops import finish
from tests.capture.registry import loop
from tests.capture.runner import STEPS, Run, numbers, sgd


def _train(run: Run, plain: nn.Module, kept: Callable[[Any], Any], change: Callable[[Any, int], None]) -> None:
    """Trains on lengths that change and on what calls have kept; after every second step is evaluation."""
    model = run.compile(plain.double())
    optimizer = sgd(model)
    for step in range(2 * STEPS):
        change(model, step)
        run.changed()
        output = model(numbers(4, 3 + step % 2, 8, seed=step))
        loss = output.mean() + kept(model)
        run.note("loss", loss)
        loss.backward()
        finish(run, model, optimizer)
        if step % 2:
            with torch.no_grad():
                run.note("evaluated", model.eval()(numbers(2, 3, 8, seed=step)))
                run.note("kept", kept(model))
            model.train()


def _freeze(model: Any, step: int) -> None:
    model.a.requires_grad_(step < STEPS)


class Auxiliary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(8, 8), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        self.loss = h.square().mean()
        return x + torch.tanh(h)


@loop(ranks=True)
def losses_of_layers(run: Run) -> None:
    """As of a router; one layer is frozen midway."""

    class Stacked(Two):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Auxiliary() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            for layer in self.layers:
                x = layer(x)
            return self.b(x)

    def change(model: Any, step: int) -> None:
        _freeze(model, step)
        model.layers[1].requires_grad_(step != 3)

    _train(run, Stacked(), lambda model: sum(layer.loss for layer in model.layers), change)


@loop(ranks=True)
def loss_that_begins_as_a_number(run: Run) -> None:
    """Every call begins it anew; an evaluation leaves a number in it."""

    class Sums(Two):
        total: Any

        def __init__(self) -> None:
            super().__init__()
            self.total = 0.0

        def forward(self, x: Tensor) -> Tensor:
            self.total = 0.0
            h = self.a(x)
            if self.training:
                self.total = self.total + h.square().mean()
                self.total = self.total + h.abs().mean()
            return self.b(torch.tanh(h))

    _train(run, Sums(), lambda model: model.total, _freeze)


@loop(ranks=True)
def loss_in_a_buffer(run: Run) -> None:
    """Nothing but the loop reads it."""

    class Keeps(Two):
        last: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("last", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            self.last = h.square().mean()
            return self.b(torch.tanh(h))

    _train(run, Keeps(), lambda model: model.last, _freeze)


@loop()
def loss_that_is_there_before_compiling(run: Run) -> None:
    class Keeps(Two):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            self.last = h.square().mean()
            return self.b(torch.tanh(h))

    plain = Keeps().double()
    plain(numbers(4, 3, 8, seed=0))
    _train(run, plain, lambda model: model.last, _freeze)


@loop(ranks=True)
def average_with_a_gradient(run: Run) -> None:
    class Averages(Two):
        last: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("last", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            self.last = 0.9 * self.last.detach() + h.square().mean()
            return self.b(torch.tanh(h))

    _train(run, Averages(), lambda model: model.last, _freeze)
