"""Tensors that a forward is given, and changes in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from autoparallel import ParallelModule
from tests.capture.programs.inplace import Two
from tests.capture.registry import loop, program
from tests.capture.runner import STEPS, Run, numbers, rows, sgd, tokens


class Masked(nn.Module):
    """As language models write: pads are replaced among the tokens, and left out among the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(8, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor, labels: Tensor, mask: Tensor) -> dict[str, Tensor]:
        ids.masked_fill_(ids == 3, 0)
        labels[labels == 2] = -100
        mask[:, 0] = False
        out = self.out(self.table(ids) * mask.unsqueeze(-1))
        return {"loss": F.cross_entropy(out.flatten(0, 1), labels.flatten()), "logits": out}


class Numbers(Two):
    """Numbers are added to, clamped, written to through views, and under no_grad; one is also returned."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        before = self.a(x)
        x = x.detach()
        y += 1
        y.view(-1)[:3].zero_()
        with torch.no_grad():
            y[:, 2:4].clamp_(max=0.5)
        return self.b(before + y), y


class OneWay(Two):
    """On one way only."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.a(x)
        if h.sum() > 0:
            y.mul_(2)
        return self.b(h + y)


class Layer(Two):
    def forward(self, x: Tensor, count: Tensor) -> Tensor:
        count += 1
        return x + self.b(self.a(x)).tanh() * count.clone()


class Layers(nn.Module):
    """Layers that are alike count in what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(4)])

    def forward(self, x: Tensor, count: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, count)
        return x


class InABatch(Two):
    """A batch's tensor is changed, and another takes the place of one that was."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        batch["x"].add_(1)
        batch["y"].mul_(3)
        batch["y"] = batch["y"] + 1
        return self.b(self.a(batch["x"]) + batch["y"])


def _train(run: Run, model: Any, made: Callable[[int], Any], target: Any = None) -> None:
    optimizer = sgd(model)
    for step in range(STEPS):
        args = made(step)
        output = model(*args)
        run.note("output", output, grad=True)
        run.note("arguments", args)
        loss = output["loss"] if isinstance(output, dict) else output[0] if isinstance(output, tuple) else output
        loss.square().mean().backward()
        run.note_gradients(model)
        optimizer.step()
        optimizer.zero_grad()


def _language(step: int) -> Any:
    (ids,) = tokens(step)
    return ids, ids.roll(1, 1), torch.ones_like(ids, dtype=torch.bool)


def _pairs(step: int) -> tuple[Tensor, Tensor]:
    return numbers(4, 8, seed=step), numbers(4, 8, seed=50 + step)


@loop(ranks=True)
def tokens_labels_and_masks_are_changed(run: Run) -> None:
    _train(run, run.compile(Masked().double()), _language)


@loop(ranks=True)
def tokens_are_changed_beside_outputs_that_flow(run: Run) -> None:
    _train(run, run.compile(Masked().double(), outputs="gather"), _language)


@loop(ranks=True)
def numbers_are_changed(run: Run) -> None:
    _train(run, run.compile(Numbers().double()), _pairs)


@loop(ranks=True)
def changed_on_one_way(run: Run) -> None:
    _train(run, run.compile(OneWay().double()), _pairs)


@loop(ranks=True)
def counted_by_layers(run: Run) -> None:
    model = run.compile(Layers().double())
    _train(run, model, lambda step: (numbers(4, 8, seed=step), torch.tensor(1.0)))


@loop(ranks=True)
def counted_by_layers_that_run_again(run: Run) -> None:
    """What the backward computes again reads what the inputs were."""
    made = lambda step: (numbers(4, 8, seed=step), torch.ones(8))  # noqa: E731
    first = run.compile(Layers().double())
    options: dict[str, Any] = {}
    if isinstance(first, ParallelModule):
        first.prepare(*made(0))
        options["plan"] = replace(first.plan, recompute={f"layers.{i}": "full" for i in range(3)})
    _train(run, run.compile(Layers().double(), **options), made)


@loop(ranks=True)
def a_batch_is_changed(run: Run) -> None:
    def made(step: int) -> Any:
        x, y = _pairs(step)
        return ({"x": x, "y": y},)

    _train(run, run.compile(InABatch().double()), made)


@loop(ranks=True)
def the_loss_function_changes_its_target(run: Run) -> None:
    def loss_fn(out: Tensor, target: Tensor) -> Tensor:
        target[target == 2] = -100
        return F.cross_entropy(out, target)

    model = run.compile(nn.Sequential(nn.Linear(8, 4)).double(), loss_fn)
    optimizer = sgd(model)
    for step in range(STEPS):
        x, target = numbers(4, 8, seed=step), tokens(step)[0][:, 0] % 4
        loss = model(x, target)
        run.note("target", target)
        loss.backward()
        run.note_gradients(model)
        optimizer.step()
        optimizer.zero_grad()


@loop(ranks=True)
def one_tensor_is_given_twice(run: Run) -> None:
    def made(step: int) -> Any:
        x = numbers(4, 8, seed=step)
        return x, x

    class Both(Two):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            y.add_(1)
            return self.b(self.a(x))

    _train(run, run.compile(Both().double()), made)


# -------------------------------------------------------------------------------------------------------- what is not


@program(refused=r"x\.clone\(\)", ranks=True)
class ByAParameter(Two):
    def forward(self, x: Tensor) -> Tensor:
        x *= self.a.bias[:1]  # refused
        return self.b(self.a(x))


@program(batch=lambda step: (numbers(4, 8, seed=step).requires_grad_(),), refused=r"x\.clone\(\)")
class ThatRequiresAGradient(Two):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x.mul_(2)  # refused
        return self.b(self.a(x))


def _overlapping(step: int) -> tuple[Tensor, Tensor]:
    x = numbers(4, 8, seed=step)
    return x, x[:, :4]


@program(batch=_overlapping, refused=r"x\.clone\(\)", line=False, ranks=True)
class ThatAnotherInputSees(Two):
    def forward(self, x: Tensor, part: Tensor) -> Tensor:
        x.mul_(2)
        return self.b(self.a(x)) * part.sum()


@loop(refused=r"x\.clone\(\)", line=False, ranks=True)
def a_dtensor(run: Run) -> None:
    model = run.compile(Numbers().double())
    for step in range(STEPS):
        x, y = _pairs(step)
        if isinstance(model, ParallelModule):
            y = DTensor.from_local(y, next(model.parameters()).device_mesh, [Replicate()])
        run.note("output", model(x, y))


@program(batch=rows, refused="leave microbatches out", options={"microbatches": 2})
class InMicrobatches(Two):
    def forward(self, x: Tensor) -> Tensor:
        x.clamp_(max=1)  # refused
        return self.b(self.a(x)).square().mean()
