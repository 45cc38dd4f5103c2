"""Tensors of which one lies in another's memory: in the plain model a step, or a call, changes both."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.capture.programs.inplace import Two
from tests.capture.programs.loops import net
from tests.capture.registry import loop, program
from tests.capture.runner import STEPS, Run, sgd


class ReadsTop(Two):
    """Reads a part of a weight by another name."""

    top: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) + (x @ self.top.t()).sum(-1, keepdim=True)  # refused


@program(refused="detach")
def view_of_a_weight_as_attribute() -> nn.Module:
    model = ReadsTop().double()
    model.top = model.a.weight.detach()[:4]
    return model


@program(refused="clone", device="cpu")
def weight_as_buffer() -> nn.Module:
    model = ReadsTop().double()
    model.register_buffer("top", model.a.weight.data)
    return model


@program(refused="b.weight = a.weight", device="cpu")
def tied_through_data() -> nn.Module:
    model = UsesBoth().double()
    model.b.weight = nn.Parameter(model.a.weight.data)
    return model


class UsesBoth(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))  # refused


@program(refused="clone", device="cpu")  # to() makes memory for each
class BufferInABuffer(Two):
    one: Tensor
    other: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("one", torch.ones(8, dtype=torch.float64))
        self.register_buffer("other", self.one.view(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.one.mul_(0.9)
        return self.a(x) * self.other.reshape(8) + self.b(x) * self.one  # refused


@program()
def frozen_weight_in_a_buffer() -> nn.Module:
    """Nobody changes either."""
    model = ReadsTop().double()
    model.a.weight.requires_grad_(False)
    model.register_buffer("top", model.a.weight.data)
    return model


@loop()
def spectral_norm_by_hooks_in_double(run: Run) -> None:
    """The hook leaves a view of the weight as an attribute, and sets it anew before it is read."""
    plain = nn.Sequential(nn.Linear(8, 8).double(), nn.Tanh(), nn.Linear(8, 8))
    nn.utils.spectral_norm(plain[0])
    model = run.compile(plain)
    optimizer = sgd(model)
    for step in range(STEPS):
        run.step(model, optimizer, step)


@loop(ranks=True)
def gradients_and_outputs_kept(run: Run) -> None:
    """What a loop keeps of earlier steps is not written over by later ones."""
    model = run.compile(net())
    optimizer = sgd(model)
    kept: list[Tensor | None] = []
    for step in range(STEPS):
        out = run.call(model, step)
        out.square().mean().backward()
        kept += [out, *(p.grad for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    run.note("kept", kept)
