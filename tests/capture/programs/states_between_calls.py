"""States that one call keeps with their gradients and the next one reads, as recurrent and spiking models have them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.programs.inplace import Two
from tests.capture.programs.loops import finish
from tests.capture.registry import loop, program
from tests.capture.runner import STEPS, Run, numbers, sgd


@program(ranks=True)
class DetachesWhatItReads(Two):
    def __init__(self) -> None:
        super().__init__()
        self.state = torch.zeros(1, 8, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x) + self.state.detach().mean(0, keepdim=True))
        self.state = h
        return self.b(h)


@program()
class DetachesABuffer(Two):
    state: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.state = torch.tanh(self.a(x).mean(0) + self.state.detach())
        return self.b(x) + self.state


@program(ranks=True)
class BeginsWithoutAState(Two):
    def __init__(self) -> None:
        super().__init__()
        self.state: Any = None

    def forward(self, x: Tensor) -> Tensor:
        before = torch.zeros_like(x) if self.state is None else self.state.detach()
        self.state = torch.tanh(self.a(x) + before)
        return self.b(self.state)


@program(ranks=True)
class StartsAgainInEachCall(Two):
    """Voltages of neurons in a dict, numbers until there is an input, as spikingjelly has them."""

    def __init__(self) -> None:
        super().__init__()
        self.memories: dict[str, Any] = {"v": 0.0, "w": 0.0}

    def forward(self, x: Tensor) -> Tensor:
        for key in self.memories:
            if isinstance(self.memories[key], Tensor):
                self.memories[key] = 0.0
        for _ in range(2):
            self.memories["v"] = torch.tanh(self.a(x) + self.memories["v"])
            self.memories["w"] = 0.5 * self.memories["w"] + self.memories["v"]
        return self.b(self.memories["w"])


@program()
class DetachesEntriesOfAList(Two):
    def __init__(self) -> None:
        super().__init__()
        self.states = [torch.zeros(1, 8, dtype=torch.float64)] * 2

    def forward(self, x: Tensor) -> Tensor:
        for i in range(2):
            self.states[i] = self.states[i].detach().mean(0, keepdim=True)
        self.states[0] = torch.tanh(self.a(x) + self.states[0])
        self.states[1] = torch.tanh(self.states[0] + self.states[1])
        return self.b(self.states[1])


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 3)
        self.reset()

    def reset(self) -> None:
        self.state = torch.zeros(1, 4, 8, dtype=torch.float64), torch.zeros(1, 4, 8, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        h, self.state = self.cells(x, self.state)
        return self.head(h)


@loop(ranks=True)
def states_that_the_loop_resets(run: Run) -> None:
    """Or detaches, every other time, as in truncated backpropagation through time."""
    model: Any = run.compile(Lstm().double())
    optimizer = sgd(model)
    for step in range(2 * STEPS):
        if step % 2:
            model.state = tuple(x.detach() for x in model.state)
        else:
            model.reset()
        loss = model(numbers(4, 5, 8, seed=step)).square().mean()
        run.note("loss", loss)
        loss.backward()
        finish(run, model, optimizer)
        run.note("states", [x.detach() for x in model.state])


@loop(ranks=True)
def gradients_through_several_calls(run: Run) -> None:
    """One backward behind three calls: what a call reads is what the last one has computed."""
    model: Any = run.compile(Lstm().double())
    optimizer = sgd(model)
    for step in range(STEPS):
        model.reset()
        losses = [model(numbers(4, 5, 8, seed=3 * step + i)).square().mean() for i in range(3)]
        loss = torch.stack(losses).sum()
        run.note("loss", loss)
        loss.backward()
        finish(run, model, optimizer)


@loop()
def a_condition_that_the_loop_computes(run: Run) -> None:
    """A tensor with a gradient that the loop sets: the gradient goes to what it has been computed of."""

    class Conditioned(Two):
        def __init__(self) -> None:
            super().__init__()
            self.condition = torch.zeros(8, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x) + self.condition))

    model: Any = run.compile(Conditioned().double())
    weight = torch.ones(8, dtype=torch.float64, requires_grad=True)
    optimizer = sgd(model)
    for step in range(STEPS):
        if step:
            model.condition = F.softplus(weight)
        loss = model(numbers(4, 8, seed=step)).square().mean()
        run.note("loss", loss)
        loss.backward()
        finish(run, model, optimizer)
        if step:
            run.note("of the condition", weight.grad)
