"""Dicts and lists that a forward is given, and changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.capture.programs.inplace import Two
from tests.capture.registry import loop, program
from tests.capture.runner import STEPS, Run, numbers, sgd


class PopsAndAdds(Two):
    def forward(self, batch: dict[str, Any]) -> Tensor:
        x = batch.pop("x")
        batch["h"] = self.a(x)
        batch["parts"] = {"mean": batch["h"].mean(), "names": ["a", "b"]}
        return self.b(batch["h"])


class Logs(Two):
    def forward(self, x: Tensor, log: list[Any], *, inner: dict[str, list[Any]]) -> Tensor:
        h = self.a(x)
        log.append(h.detach())
        inner["means"].insert(0, h.mean())
        return self.b(h)


class ReturnsItsBatch(Two):
    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        batch["h"] = self.a(batch["x"])
        batch["out"] = self.b(batch["h"])
        return batch


def _train(run: Run, model: Any, step: int, optimizer: Any, *args: Any, **kwargs: Any) -> None:
    output = model(*args, **kwargs)
    run.note("output", output, grad=True)
    run.note("arguments", (args, kwargs))
    (output["out"] if isinstance(output, dict) else output).square().mean().backward()
    run.note_gradients(model)
    optimizer.step()
    optimizer.zero_grad()


@loop(ranks=True)
def a_batch_loses_and_gets_entries(run: Run) -> None:
    model = run.compile(PopsAndAdds().double())
    for step in range(STEPS):
        _train(run, model, step, sgd(model), {"x": numbers(8, 8, seed=step), "id": torch.arange(8)})


@loop(ranks=True)
def lists_grow(run: Run) -> None:
    model = run.compile(Logs().double())
    log: list[Any] = []
    for step in range(STEPS):
        _train(run, model, step, sgd(model), numbers(8, 8, seed=step), log[:1], inner={"means": [0.0, 1.0]})


@loop(ranks=True)
def a_batch_is_returned(run: Run) -> None:
    model = run.compile(ReturnsItsBatch().double())
    for step in range(STEPS):
        _train(run, model, step, sgd(model), {"x": numbers(8, 8, seed=step)})


@program(batch=lambda step: ({(1, 2): numbers(8, 8, seed=step)},), refused="work on a copy", line=False)
class AddsUnderATuple(Two):
    def forward(self, batch: dict[Any, Tensor]) -> Tensor:
        batch[2, 3] = self.a(batch[1, 2])
        return self.b(batch[2, 3])
