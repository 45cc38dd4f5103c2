"""Numbers that a forward draws one by one, of Python's ``random``, of numpy's, and with ``torch.rand([])``: LayerDrop,
stochastic depth, self-conditioning."""

from __future__ import annotations

import math
import random
from random import random as draw
from random import uniform
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.random import rand
from numpy.random import uniform as draw_by_numpy
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.capture.programs.inplace import Two
from tests.capture.programs.loops import finish
from tests.capture.registry import loop, program
from tests.capture.runner import SEED, Run, rows, sgd


def seven_steps(run: Run) -> None:
    model = run.start()
    optimizer = sgd(model)
    torch.manual_seed(SEED)
    for step in range(7):
        run.step(model, optimizer, step)


def upcoming(_: Any) -> Tensor:
    """What is drawn next."""
    states = random.getstate(), np.random.get_state()
    numbers = torch.tensor([random.random(), np.random.rand()])
    random.setstate(states[0])
    np.random.set_state(states[1])
    return numbers


class Deep(Two):
    """Layers between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.rate = 0.5


@program(ranks=True, loop=seven_steps, observe=upcoming)
class SkipsLayers(Deep):
    """LayerDrop with Python's generator: a layer that is skipped has no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        for layer in self.layers:
            if random.random() < self.rate:
                h = h + layer(h).tanh()
        return self.b(h)


@program(observe=upcoming)
class SkipsNoLayers(nn.Module):
    """Stochastic depth whose rates keep all layers, or none: what is drawn next is what is drawn next in eager."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(7))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            number = random.uniform(0, 1)
            if self.training and number < 0.0 or random.random() >= 1 or random.uniform(2, -1) > 2:
                continue
            if random.uniform(-1, -2.0) > 0.0 or np.random.rand() < 0:
                x = x + 100
            x = x + layer(x).tanh()
        return x


@program(ranks=True, loop=seven_steps, observe=upcoming)
class SkipsLayersByNumpy(Deep):
    """LayerDrop with numpy, beside Python's generator."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        for layer in self.layers:
            if not self.training or np.random.uniform() > self.rate or rand() > 0.9:
                h = h + layer(h).tanh()
        return self.b(h) if uniform(0, 1) < self.rate else self.b(h) * np.random.uniform(1, 2)


@program(ranks=True, random=True, loop=seven_steps)
class SkipsLayersByTorch(Deep):
    """LayerDrop as transformers has it, with dropout in the layers."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        for layer in self.layers:
            number = torch.rand([])
            skips = self.training and number < self.rate
            if not skips:
                h = h + F.dropout(layer(h).tanh(), 0.2, self.training)
        return self.b(h) * torch.rand(())


@program(ranks=True, random=True, loop=seven_steps)
class DecidesByASingleNumber(Two):
    """The number itself, in fewer digits, and comparisons with what it stands for."""

    def forward(self, x: Tensor) -> Tensor:
        number = torch.rand((), dtype=torch.float32, device=x.device)
        h = self.a(x) * number if number > 0.3 else self.a(x)
        return self.b(h) * torch.rand([]).item() if number.le(0.7) else self.b(h + (number >= 0.9))


@program(random=True, loop=seven_steps)
class SkipsRegions(Deep):
    """Regions that are computed again in the backward, some of which draw."""

    def _run(self, layer: nn.Module, h: Tensor) -> Tensor:
        return F.dropout(layer(h).tanh(), 0.2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        for layer in self.layers:
            if torch.rand([]) < self.rate:
                continue
            h = h + checkpoint(self._run, layer, h, use_reentrant=False)
        return self.b(h)


@program(ranks=True, loop=seven_steps, observe=upcoming)
class ConditionsOnItself(Two):
    """Self-conditioning of diffusion models: half of the calls run the model twice."""

    def forward(self, x: Tensor) -> Tensor:
        condition = torch.zeros_like(x)
        if self.training and uniform(0, 1) < 0.5:
            with torch.no_grad():
                condition = self.b(self.a(x).tanh())
        return self.b(self.a(x + condition).tanh())


@program(ranks=True, loop=seven_steps)
class DrawsForItself(Two):
    """Draws that a branch does not ask for, but the arithmetic."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * random.uniform(0.5, 1.5) + torch.full_like(x, random.uniform(-1, 1))
        return self.b(h) * math.exp(-random.random()) * max(0.5, random.random())


@program(ranks=True, loop=seven_steps)
class KeepsWhatItDraws(Two):
    """Draws that are kept, for later to be looked at, and returned."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[float] = []

    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        self.last = random.random()
        self.drawn.append(random.uniform(2, 3))
        return self.b(self.a(x)), random.random()


@program(ranks=True, loop=seven_steps, observe=upcoming)
class DrawsUntilItStops(Two):
    """As many draws as they decide themselves."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        while uniform(0, 1) < 0.6:
            h = self.a(h).tanh()
        return self.b(h)


@program(ranks=True, loop=seven_steps)
class CountsByDraws(Two):
    """A whole number that is made of a draw: one of a few, and where a crop begins."""

    def forward(self, x: Tensor) -> Tensor:
        h = (self.a, self.b)[int(random.random() * 2)](x)
        start = int(random.random() * 3)
        return self.b(h[:, start : start + 4].repeat(1, 2))


@program(ranks=True, loop=seven_steps)
class AnnealsWhatItComparesWith(Two):
    """A rate that every call changes (scheduled sampling)."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = 0.9

    def forward(self, x: Tensor) -> Tensor:
        self.rate *= 0.8
        return self.b(self.a(x)) if random.random() < self.rate else self.a(x)


def train_and_evaluate(run: Run, model: Any, optimizer: Any, x: Tensor) -> None:
    """One step, an evaluation, and what the generators draw next."""
    out = model(x)
    run.note("output", out)
    out.square().mean().backward()
    finish(run, model, optimizer)
    with torch.no_grad():
        run.note("evaluated", model.eval()(x))
    model.train()
    run.note("next", upcoming(model))


@loop(ranks=True)
def draws_at_many_lengths(run: Run) -> None:
    """Lengths and batches that change, evaluation, and draws of the loop's own in between."""
    model = run.compile(SkipsLayers().double())
    optimizer = sgd(model)
    for step, (count, length) in enumerate(((4, 6), (4, 10), (2, 8), (4, 12), (6, 6), (4, 7))):
        x = torch.cat([*rows(step)] * 3)[:count, None].expand(-1, length, -1) * random.uniform(1, 2)
        train_and_evaluate(run, model, optimizer, x)


@program(ranks=True, loop=seven_steps, observe=upcoming)
class DrawsByOtherNames(Two):
    """Functions that a module has imported under names of its own, and what is made a float once more."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * float(draw()) if float(draw()) < 0.6 else self.b(x)
        return self.b(h) * float(draw_by_numpy())


@program(refused="keep it a tensor")
class FixesDraws(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * math.gamma(random.random())  # refused


@program(refused="torch.where")
class DrawsAnArray(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * torch.as_tensor(np.random.rand(8), device=x.device)  # refused
