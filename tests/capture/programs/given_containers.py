"""Containers that a call is given and changes: their order, deques, and what the loss function does to its target; and
the sizes that it returns."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.capture.programs.inplace import Two
from tests.capture.registry import loop
from tests.capture.runner import STEPS, Run, numbers, sgd


def _step(run: Run, model: Any, optimizer: torch.optim.Optimizer, *args: Any) -> None:
    loss = model(*args).square().mean()
    run.finish(model, optimizer, loss)


@loop(ranks=True)
def dicts_that_are_changed_and_moved(run: Run) -> None:
    class Reverses(Two):
        def forward(self, batches: list[dict[str, Any]]) -> Tensor:
            batches[0]["h"] = self.a(batches[0]["x"])
            batches.reverse()
            return self.b(batches[-1]["h"] + batches.pop(0)["x"])

    model = run.compile(Reverses().double())
    optimizer = sgd(model)
    for step in range(STEPS):
        first, second = {"x": numbers(8, 8, seed=step)}, {"x": numbers(8, 8, seed=9), "name": "b"}
        batches = [first, second]
        _step(run, model, optimizer, batches)
        run.note("batches", (batches, first, second))


@loop(ranks=True)
def deques_are_given(run: Run) -> None:
    class Remembers(Two):
        def forward(self, x: Tensor, memory: deque[Tensor]) -> Tensor:
            h = self.a(x)
            memory.append(h.detach())
            return self.b(h + torch.stack(list(memory)).mean(0))

    model = run.compile(Remembers().double())
    optimizer, memory = sgd(model), deque[Tensor](maxlen=2)
    for step in range(STEPS + 1):
        _step(run, model, optimizer, numbers(8, 8, seed=step), memory)
        run.note("memory", list(memory))


@loop(ranks=True)
def a_deque_in_an_object_is_turned(run: Run) -> None:
    class Turns(Two):
        def forward(self, batch: Any) -> Tensor:
            batch.queue.appendleft(self.a(batch.x))
            batch.queue.rotate(1)
            batch.queue.pop()
            return self.b(batch.queue[0])

    model = run.compile(Turns().double())
    optimizer = sgd(model)
    for step in range(STEPS):
        x = numbers(8, 8, seed=step)
        batch = SimpleNamespace(x=x, queue=deque([x + 1, x + 2]))
        _step(run, model, optimizer, batch)
        run.note("queue", list(batch.queue))


@loop(ranks=True)
def entries_taken_out_and_put_back(run: Run) -> None:
    class PutsBack(Two):
        def forward(self, batch: dict[str, Any], more: Any) -> Tensor:
            x = batch.pop("x")
            batch["h"], batch["x"] = self.a(x), x
            scale = more.scale
            del more.scale
            more.done, more.scale = True, scale
            return self.b(batch["h"])

    model = run.compile(PutsBack().double())
    optimizer = sgd(model)
    for step in range(STEPS):
        x = numbers(8, 8, seed=step)
        batch, more = {"x": x, "y": x + 1, "n": 3}, SimpleNamespace(scale=2.0, y=x)
        _step(run, model, optimizer, batch, more)
        run.note("batch", (batch, list(batch), list(vars(more)), more.done, more.scale))


def pops(output: Tensor, target: dict[str, Any]) -> Tensor:
    y = target.pop("y")
    target["error"] = (output - y).abs().mean().detach()
    target["rows"] = output.shape[0]
    target["log"].append(output.mean().item())
    return F.mse_loss(output, y)


@loop(ranks=True)
def the_loss_function_changes_entries_of_its_target(run: Run) -> None:
    class Runs(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    model = run.compile(Runs().double(), pops)
    optimizer, log = sgd(model), list[float]()
    for step in range(STEPS):
        target = {"y": numbers(8, 8, seed=9), "log": log}
        _step(run, model, optimizer, numbers(8, 8, seed=step), target)
        run.note("target", target)


def sets(output: dict[str, Any], target: Any) -> Tensor:
    output["loss"], target.seen = F.mse_loss(output["h"], target.y), True
    return output["loss"] + output["h"].mean()


@loop(ranks=True)
def the_loss_function_changes_the_batch_that_is_returned(run: Run) -> None:
    class Returns(Two):
        def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
            batch["h"] = self.b(self.a(batch["x"]))
            return batch

    model = run.compile(Returns().double(), sets)
    optimizer = sgd(model)
    for step in range(STEPS):
        batch, target = {"x": numbers(8, 8, seed=step)}, SimpleNamespace(y=numbers(8, 8, seed=9))
        _step(run, model, optimizer, batch, target)
        run.note("batch", (batch, target.seen))


@loop(ranks=True)
def sizes_are_those_of_torch(run: Run) -> None:
    """In outputs, attributes and objects, also where the batch is open, and of a tensor without dims."""

    class ReturnsSizes(Two):
        def forward(self, x: Tensor) -> Any:
            h = self.b(self.a(x))
            self.last_shape = x.shape
            normal = torch.distributions.Normal(h, 1.0)
            return normal, [h.shape, h.mean().shape], SimpleNamespace(h=h, shape=h.shape, dtype=torch.float64)

    model = run.compile(ReturnsSizes().double())
    for rows in (8, 8, 4):
        normal, sizes, more = model(numbers(rows, 8, seed=rows))
        run.note("sizes", (normal.batch_shape, normal.event_shape, sizes, more.shape, model.last_shape))
        run.note("elements", more.shape.numel())
