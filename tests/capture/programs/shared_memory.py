"""Tensors of which one lies in another's memory: in the plain model a step, or a call, changes both."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from tests.capture.programs.inplace import Two
from tests.capture.programs.loops import net
from tests.capture.registry import loop, program
from tests.capture.runner import STEPS, Run, numbers, sgd


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


class Memory(nn.Module):
    mem: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.register_buffer("mem", torch.arange(24.0).reshape(3, 8) / 10)


def train_from_outside(run: Run, plain: nn.Module) -> None:
    """Between the steps the loop changes what the model has registered and kept, and the inputs of before."""
    model = run.compile(plain.double())
    optimizer = sgd(model)
    outputs, inputs = [], [numbers(4 + step % 2 * 2, 8, seed=step) for step in range(5)]
    for step, x in enumerate(inputs):
        with torch.no_grad():
            for buffer in run.plain.buffers():
                buffer.mul_(0.9)
            for before in inputs[:step]:
                before.add_(1)
        run.changed()
        output = model(x)
        outputs.append(output)
        loss = output["loss"] if isinstance(output, dict) else output[0].square().mean()
        run.finish(model, optimizer, loss)
        run.note_state(model)
    run.note("outputs", outputs)


@loop(ranks=True)
def parts_of_a_buffer_returned(run: Run) -> None:
    """The call changes it; what earlier calls have returned changes with it."""

    class Returns(Memory):
        def forward(self, x: Tensor) -> Any:
            self.mem.mul_(0.8)
            h = self.a(x)
            return h, self.mem, self.mem[0], self.mem.t()[1:3], self.mem[:, None].expand(3, 2, 8)[1:], x[1:, 2:]

    train_from_outside(run, Returns())


@loop(ranks=True)
def parts_of_a_buffer_beside_a_loss(run: Run) -> None:
    class Returns(Memory):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            self.mem.mul_(0.8)
            return {"loss": self.a(x).square().mean(), "mem": self.mem, "part": self.mem[:, 2:4], "x": x[:, 1:]}

    train_from_outside(run, Returns())


@loop(ranks=True)
def parts_of_a_buffer_kept(run: Run) -> None:
    """In an attribute, a dict, a list, and another buffer; read by the loop alone."""

    class Keeps(Memory):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("last", torch.zeros(4, 8))
            self.stats: dict[str, Tensor] = {}
            self.log: list[Tensor] = []

        def forward(self, x: Tensor) -> tuple[Tensor]:
            self.log.append(self.mem[0])
            self.stats["row"] = self.mem[1]
            self.top = self.mem[:2]
            self.last = x
            self.mem.mul_(0.8)
            return (self.a(x) * self.mem.mean(),)

    train_from_outside(run, Keeps())


@loop(ranks=True)
def part_of_a_buffer_that_the_loop_changes(run: Run) -> None:
    """What a call has kept is read by the next one; the buffer is changed between them."""

    class Reads(Memory):
        top: Tensor | None = None

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("first", torch.zeros(8))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.a(x) + self.first
            if self.top is not None:
                h = h + self.top.sum()
            self.top, self.first = self.mem[1:], self.mem[0]
            return h, self.top

    train_from_outside(run, Reads())


@loop(ranks=True)
def buffer_bound_anew_and_returned(run: Run) -> None:
    class Averages(Memory):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            h = self.a(x)
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
            return h * self.mean, self.mean, self.mean[:4]

    train_from_outside(run, Averages())


@loop(ranks=True)
def argument_changed_and_returned(run: Run) -> None:
    """It is given to the next call, too."""

    class Counts(Memory):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            h = self.a(x)
            x.add_(1)
            return h, x, x[0]

    model = run.compile(Counts().double())
    x = numbers(4, 8, seed=0)
    run.note("outputs", [model(x)[1:] for _ in range(STEPS)])


@loop(refused="clone")
def part_of_a_buffer_read_and_changed(run: Run) -> None:
    class Reads(Memory):
        top: Tensor | None = None

        def forward(self, x: Tensor) -> tuple[Tensor]:
            self.mem.mul_(0.9)
            h = self.a(x)
            if self.top is not None:
                h = h + self.top.sum()  # refused
            self.top = self.mem[1:]
            return (h,)

    train_from_outside(run, Reads())


@loop(refused="clone")
def entry_in_a_buffer_read_and_changed(run: Run) -> None:
    class Reads(Memory):
        def __init__(self) -> None:
            super().__init__()
            self.queue = deque([torch.zeros(8, dtype=torch.float64)] * 2, maxlen=2)

        def forward(self, x: Tensor) -> tuple[Tensor]:
            h = self.a(x)
            for row in self.queue:
                h = h + row  # refused
            self.queue.append(self.mem[0])
            self.mem.mul_(0.9)
            return (h,)

    train_from_outside(run, Reads())


@loop(refused="clone")
def part_set_by_another_kind_of_call(run: Run) -> None:
    class Reads(Memory):
        def __init__(self) -> None:
            super().__init__()
            self.top = torch.zeros(8, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.top = self.mem[0]
                return self.a(x)
            self.mem.mul_(0.9)
            return self.a(x) + self.top.sum()  # refused

    model = run.compile(Reads().double())
    for step in range(STEPS):
        for is_training in (False, True):
            model.train(is_training)
            run.changed()
            run.note("output", model(numbers(4, 8, seed=step)))


@loop(ranks=True)
def weight_copied_into_an_attribute(run: Run) -> None:
    class Remembers(Memory):
        old: Tensor | None = None

        def forward(self, x: Tensor) -> tuple[Tensor]:
            h = self.a(x) + (0 if self.old is None else x @ self.old)
            self.old = self.a.weight.detach().clone()
            return (h,)

    train_from_outside(run, Remembers())
