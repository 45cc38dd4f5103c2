"""Modules that are no part of the model, which its functions know: teachers, frozen networks in losses, heads."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.programs.loops import finish
from tests.capture.registry import loop
from tests.capture.runner import STEPS, Run, numbers, sgd


class Teacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout, self.scale = nn.Linear(8, 8), nn.Dropout(1.0), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.layer(x)) * self.scale


def student(teach: Any) -> nn.Module:
    class Student(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                target = teach(x)
            return self.layer(x) - target

    return Student().double()


def _train(run: Run, model: Any, between: Any = lambda step: None) -> None:
    optimizer = sgd(model)
    for step in range(STEPS + 2):
        between(step)
        output = model(numbers(4, 8, seed=step))
        run.note("output", output)
        output.square().mean().backward()
        finish(run, model, optimizer)


@loop(ranks=True)
def teacher_that_the_loop_changes(run: Run) -> None:
    """Its mode, a number, the values of a parameter, and another parameter."""
    teacher = Teacher().double()

    def change(step: int) -> None:
        teacher.train(step == 1)
        teacher.scale = 1.0 + step // 2
        with torch.no_grad():
            teacher.layer.bias.add_(1.0)
        if step == 2:
            teacher.layer.weight = nn.Parameter(numbers(8, 8, seed=7))

    _train(run, run.compile(student(lambda x: teacher(x))), change)


@loop()
def teacher_of_an_object(run: Run) -> None:
    trainer = SimpleNamespace(teacher=Teacher().double())
    _train(run, run.compile(student(lambda x: trainer.teacher(x))), lambda step: trainer.teacher.train(step % 2 == 0))


class Ways(Teacher):
    """Is called in other ways than as a variable's value."""

    def features(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


@loop(ranks=True)
def teachers_that_are_reached_otherwise(run: Run) -> None:
    """In a list, as a bound method, as an argument of a ``partial``, as a default."""
    teachers = [Ways().double().eval() for _ in range(4)]
    features, partly = teachers[1].features, functools.partial(Ways.features, teachers[2])

    def by_default(x: Tensor, known: list[Ways] = [teachers[3]]) -> Tensor:  # noqa: B006
        return known[0](x)  # type: ignore[no-any-return]

    def change(step: int) -> None:
        teachers[step % 4].scale = 2.0 + step

    model = student(lambda x: teachers[0](x) + features(x) + partly(x) + by_default(x))
    _train(run, run.compile(model), change)


@loop(ranks=True)
def teachers_that_the_model_hides(run: Run) -> None:
    """In a list, a method in a tuple, and an attribute that nobody registers: they are no part of its state."""
    teachers = [Ways().double().eval().requires_grad_(False) for _ in range(3)]

    class Student(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.teachers, self.ways = nn.Linear(8, 8), [teachers[0]], (teachers[1].features,)
            object.__setattr__(self, "teacher", teachers[2])

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.teachers[0](x)) - self.ways[0](x) + self.teacher(x)

    def change(step: int) -> None:
        teachers[step % 3].scale = 2.0 + step
        teachers[step % 3].layer.weight.data *= 0.5

    _train(run, run.compile(Student().double()), change)


@loop()
def modules_that_the_call_makes(run: Run) -> None:
    class Makes(Teacher):
        def forward(self, x: Tensor) -> Tensor:
            return nn.Softmax(-1)(self.layer(x)) * nn.Dropout(0.0)(x)

    _train(run, run.compile(Makes().double()))


@loop(ranks=True)
def frozen_network_in_a_loss(run: Run) -> None:
    """Nothing trains it, and what it is given has a gradient."""
    network = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).double().requires_grad_(False)
    model = run.compile(nn.Linear(8, 8).double(), lambda output, target: F.mse_loss(network(output), network(target)))
    optimizer = sgd(model)
    for step in range(STEPS):
        model(numbers(4, 8, seed=step), numbers(4, 8, seed=step + 9)).backward()
        finish(run, model, optimizer)


@loop(refused="make it one")
def teacher_that_counts(run: Run) -> None:
    class Counts(Teacher):
        def forward(self, x: Tensor) -> Tensor:
            self.scale += 1  # refused
            return super().forward(x)

    teacher = Counts().double()
    _train(run, run.compile(student(lambda x: teacher(x))))


@loop(refused="make it one")
def teacher_that_keeps_a_tensor(run: Run) -> None:
    class Keeps(Teacher):
        def forward(self, x: Tensor) -> Tensor:
            self.features = super().forward(x)  # refused
            return self.features

    teacher = Keeps().double()
    _train(run, run.compile(student(lambda x: teacher(x))))


@loop(refused="register it")
def head_that_is_trained_apart(run: Run) -> None:
    head = nn.Linear(8, 8, bias=False).double()
    model = run.compile(
        nn.Linear(8, 8).double(),
        lambda output, target: F.mse_loss(head(output), target),  # refused
    )
    model(numbers(4, 8, seed=0), numbers(4, 8, seed=1)).backward()
    run.note("gradient", head.weight.grad)


@loop(refused="register it")
def head_that_is_trained_on_one_way(run: Run) -> None:
    head = nn.Linear(8, 8).double()

    class Chooses(Teacher):
        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            if x.sum() > 1000:
                return h
            return head(h)  # refused

    run.compile(Chooses().double())(numbers(4, 8, seed=0)).sum().backward()
    run.note("gradient", head.weight.grad)


@loop(refused="register it")
def parameter_of_a_closure(run: Run) -> None:
    scale = nn.Parameter(numbers(8, seed=2))

    class Scaled(Teacher):
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * scale  # refused

    run.compile(Scaled().double())(numbers(4, 8, seed=0)).sum().backward()
    run.note("gradient", scale.grad)


@loop(refused="return it beside the output")
def loss_of_a_part(run: Run) -> None:
    """A loss function that calls a layer of the model by itself, whose parameters lie over the mesh by then."""
    plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, plain[0](target).detach())  # refused

    model = run.compile(plain, loss_fn)
    optimizer = sgd(model)
    for step in range(STEPS):
        model(numbers(4, 8, seed=step), numbers(4, 8, seed=step + 9)).backward()
        finish(run, model, optimizer)
