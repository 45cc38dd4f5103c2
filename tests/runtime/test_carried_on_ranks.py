"""What calls are given beside their inputs, where ranks have others of it, and windows that one rank leaves: the same
error on all ranks, soon."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import autoparallel
from tests.distributed import run_distributed
from tests.runtime.support import Net, batch, make, mesh_of, raised

STEPS = 4


class Annealed(Net):
    """Multiplied by a number that the loop sets."""

    rate = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.rate


class Averaged(Net):
    """Keeps an average in a dict, and the last numbers in a deque."""

    def __init__(self) -> None:
        super().__init__()
        self.averages, self.last = {"mean": torch.zeros(())}, deque[Tensor](maxlen=3)

    def forward(self, x: Tensor) -> Tensor:
        self.averages["mean"] = 0.9 * self.averages["mean"] + 0.1 * x.mean()
        self.last.append(x.std())
        return super().forward(x) + self.averages["mean"] + sum(self.last)


class Shifted(Net):
    """Adds a tensor that the loop may set."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.zeros(4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shift


class Scaled(Net):
    """Is given a number beside the batch."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x) * scale


def _rank_in_last(step: int) -> int:
    return dist.get_rank() * (step == STEPS - 1)


def _number_set(model: Any) -> None:
    for step in range(STEPS):
        model.rate = 0.1 * step + 0.01 * _rank_in_last(step)
        model(*batch(step)).backward()


def _argument(model: Any) -> None:
    for step in range(STEPS):
        x, y = batch(step)
        model(x, 0.1 * step + 0.01 * _rank_in_last(step), y).backward()


def _entry_gone(model: Any) -> None:
    for step in range(STEPS):
        if _rank_in_last(step):
            del model.averages["mean"]
        model(*batch(step)).backward()


def _other_window(model: Any) -> None:
    for window in model.accumulate(2, [batch(0), batch(1)]):
        for x, y in window:
            model(x, y).backward()
            if dist.get_rank():
                break


def _window_left(model: Any) -> None:
    for window in model.accumulate(2, [batch(0), batch(1)]):
        for x, y in window:
            model(x, y).backward()
            if dist.get_rank():
                break
        break
    model.clip_grad_norm_(1.0)


def _trained_attribute(model: Any) -> None:
    for step in range(STEPS):
        if step == STEPS - 1:
            model.shift = torch.ones(4, dtype=torch.float64, requires_grad=True)
        model(*batch(step)).backward()


CASES: dict[str, tuple[type[Net], Callable[[Any], None], str]] = {
    "a number that the loop sets": (Annealed, _number_set, r"rank 0: .* rate 0.3.*rank 1: .* rate 0.31"),
    "a number among the arguments": (Scaled, _argument, r"rank 0: .* 0.3.*rank 1: .* 0.31"),
    "an entry that is gone": (Averaged, _entry_gone, r"rank 0: .* last, a deque.*rank 1: .*KeyError: 'mean'"),
    "a window that is left": (Net, _window_left, r"rank 0: train, .*rank 1: a reduction of what was accumulated"),
    "an attribute that is trained": (Shifted, _trained_attribute, "shift, which is no parameter, requires a gradient"),
    "another window": (Net, _other_window, r"rank 0: train, .*rank 1: a window of accumulate"),
}


def _message(name: str) -> str:
    kind, loop, _ = CASES[name]
    model = autoparallel.compile(make(kind), mesh_of(2), loss_fn=F.mse_loss, plan="fsdp")
    return raised(lambda: loop(model))


@pytest.mark.parametrize("name", CASES)
def test_ranks_that_differ_are_the_same_error_everywhere(name: str) -> None:
    for message in run_distributed(_message, name, world_size=2):
        assert re.search(CASES[name][2], message, re.DOTALL), message
