"""What goes wrong on one rank: a training loop in which a rank does one thing that the others do not."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from tests.runtime.support import Net, batch, compiled_pair, mesh_of

BEFORE, FORWARD, BACKWARD, STEP = "before the call", "forward", "backward", "step"


@dataclass(frozen=True)
class Fault:
    """One thing that one rank does at one step.

    Attributes:
        at: the part of the step: it is done in its place.
        instead: what is done: "skip", "skip the batch", "raise", "another model", "read a number" of a parameter,
            "another rate" of learning from then on, "keep gradients" after the step, or seconds to stall before the
            part.
        rank, step: where and when.
    """

    at: str
    instead: str | float
    rank: int = 1
    step: int = 5


def number_of(parameter: Tensor) -> float:
    """A number that is a sum over the ranks, where the parameter is sharded."""
    return parameter.norm().item()


def step_with(optimizer: torch.optim.Optimizer, instead: str | float | None) -> None:
    """A step, and the end of its gradients, with what is done instead."""
    if instead == "another rate":
        optimizer.param_groups[0]["lr"] *= 2
    optimizer.step()
    if instead != "keep gradients":
        optimizer.zero_grad()


class FaultError(Exception):
    """What a rank raises that goes wrong."""


@dataclass
class Loop:
    """A training loop with two models, in which a fault happens.

    Attributes:
        caught: the messages of the errors that were caught, by step.
        seconds: how long the last step took.
    """

    fault: Fault | None
    plan: str = "fsdp"
    options: dict[str, Any] = field(default_factory=dict)
    caught: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0

    def run(self, steps: int = 8, stop: bool = True) -> dict[int, str]:
        """Runs the loop, to its end or to the first error."""
        first, second = (compiled_pair(plan=self.plan, **self.options)[0] for _ in range(2))
        self.models: list[Any] = [first, second]
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in self.models]
        for step in range(steps):
            started = time.monotonic()
            try:
                self._step(step)
            except FaultError:
                for optimizer in self.optimizers:
                    optimizer.zero_grad()
            except Exception as error:  # noqa: BLE001 - it is what the test asks about
                self.caught[step] = f"{type(error).__name__}: {error}"
                if stop:
                    break
            finally:
                self.seconds = time.monotonic() - started
        return self.caught

    def _step(self, step: int) -> None:
        fault = self.fault
        here = fault is not None and fault.rank == dist.get_rank() and fault.step == step
        instead = fault.instead if here and fault is not None else None
        x, y = batch(step + (instead == "skip the batch"))
        for number in (1, 0) if instead == "another model" else (0, 1):
            model, optimizer = self.models[number], self.optimizers[number]
            loss: list[Tensor] = []
            parts: dict[str, Callable[[], Any]] = {
                BEFORE: lambda model=model: number_of(model.up.weight) if instead == "read a number" else None,
                FORWARD: lambda model=model, loss=loss: loss.append(model(x, y)),
                BACKWARD: lambda loss=loss: loss[0].backward(),
                STEP: lambda optimizer=optimizer, number=number: step_with(optimizer, None if number else instead),
            }
            for name, part in parts.items():
                self._do(part, instead if fault is not None and name == fault.at and not number else None)

    @staticmethod
    def _do(part: Callable[[], Any], instead: str | float | None) -> None:
        if instead == "raise":
            raise FaultError
        if isinstance(instead, float):
            time.sleep(instead)
        if instead != "skip":
            part()


class Rows(nn.Module):
    """An embedding in front of a layer, for rows that some rank cannot look up."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.net = Net()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.net(self.table(tokens))


def look_up_badly(index: int) -> str:
    """What a rank raises when the last rank's own rows hold an index that may be out of range; and then, again."""
    model, _ = compiled_pair(Rows, plan="data_parallel", loss_fn=F.mse_loss)
    mesh, last = mesh_of(2), dist.get_rank() == dist.get_world_size() - 1
    messages = []
    for step in range(3):
        tokens = torch.arange(4) + (index if last and step else 0)
        x, y = (DTensor.from_local(t, mesh, [Shard(0)], run_check=False) for t in (tokens, batch(0, 4)[1]))
        try:
            model(x, y).backward()
        except Exception as error:  # noqa: BLE001 - it is what the test asks about
            messages.append(f"{type(error).__name__}: {error}")
    return "\n---\n".join(messages)
