"""Parts of a model that are cast, tied, exchanged or added after it was compiled."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tests.capture.programs.loops import finish, net
from tests.capture.registry import loop
from tests.capture.runner import STEPS, Run, rows, sgd


@loop(line=False, refused="then compile it")
def cast_after_compile(run: Run) -> None:
    """The model becomes single precision midway."""
    model = run.compile(net().double())
    for step in range(STEPS):
        if step == 1:
            model.to(torch.float32)
        optimizer = sgd(model, momentum=0.0)
        x = rows(step)[0].to(next(model.parameters()).dtype)
        out = model(x)
        run.note("output", out)
        out.square().mean().backward()
        finish(run, model, optimizer)


@loop(line=False, refused="then compile it")
def cast_plain_after_compile(run: Run) -> None:
    """The plain model, which the user still holds, is cast before the first call."""
    plain = net()
    model = run.compile(plain)
    plain.float()
    optimizer = sgd(model)
    for step in range(STEPS):
        out = model(rows(step)[0].float())
        run.note("output", out)
        out.square().mean().backward()
        finish(run, model, optimizer)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(x)))


@loop(line=False, refused="make its optimizer")
def tied_before_the_first_call(run: Run) -> None:
    model = run.compile(Tied())
    model.head.weight = model.embed.weight
    optimizer = sgd(model)
    for step in range(STEPS):
        run.step(model, optimizer, step)


@loop(line=False, refused="make its optimizer")
def tied_midway(run: Run) -> None:
    model = run.compile(Tied())
    for step in range(STEPS):
        if step == 1:
            model.head.weight = model.embed.weight
        optimizer = sgd(model, momentum=0.0)
        run.step(model, optimizer, step)


@loop(line=False, refused="make its optimizer")
def untied_midway(run: Run) -> None:
    plain = Tied()
    plain.head.weight = plain.embed.weight
    model = run.compile(plain)
    for step in range(STEPS):
        if step == 1:
            model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
        optimizer = sgd(model, momentum=0.0)
        run.step(model, optimizer, step)


@loop(line=False, refused="make its optimizer")
def head_exchanged_midway(run: Run) -> None:
    """Transfer: another number of classes from the second step on."""
    model = run.compile(net())
    for step in range(STEPS):
        if step == 1:
            torch.manual_seed(3)
            model[2] = nn.Linear(8, 3)
            run.changed()
        optimizer = sgd(model, momentum=0.0)
        run.step(model, optimizer, step)


@loop()
def layer_removed_midway(run: Run) -> None:
    model = run.compile(net())
    for step in range(STEPS):
        if step == 1:
            model[1] = nn.Identity()
        optimizer = sgd(model, momentum=0.0)
        run.step(model, optimizer, step)


@loop(line=False, refused="make its optimizer")
def grows_midway(run: Run) -> None:
    """A layer is appended to a list, as progressive growing does."""
    model = run.compile(net())
    for step in range(STEPS):
        if step == 1:
            torch.manual_seed(3)
            model.append(nn.Linear(8, 8))
            run.changed()
        optimizer = sgd(model, momentum=0.0)
        run.step(model, optimizer, step)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


@loop(ranks=True, line=False, refused="make its optimizer")
def layers_swapped_midway(run: Run) -> None:
    """The same parameters under each other's names."""
    plain = Chain()
    model = run.compile(plain)
    optimizer = sgd(model)
    for step in range(STEPS):
        if step == 1:
            plain.a, plain.b = plain.b, plain.a
            run.changed()
        run.step(model, optimizer, step)


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


@loop(line=False, refused="make its optimizer")
def parametrized_midway(run: Run) -> None:
    """The parameter stays, under another name."""
    plain = Chain()
    model = run.compile(plain)
    optimizer = sgd(model)
    for step in range(STEPS):
        if step == 1:
            parametrize.register_parametrization(plain.a, "weight", Halved(), unsafe=True)
            run.changed()
        run.step(model, optimizer, step)
