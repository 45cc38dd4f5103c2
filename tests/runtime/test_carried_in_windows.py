"""What calls carry, and what the loop sets, in windows of ``accumulate()``, in microbatches and in pipelines."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autoparallel
from tests.devices import DEVICE
from tests.distributed import run_distributed
from tests.runtime.support import Net, batch, make, mesh_of, off

STEPS = 4


class Loss(Net):
    """Returns its loss, whose weight the loop anneals."""

    weight = 0.5

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        return self.loss(self.down(self.norm(h)), y, h)

    def loss(self, output: Tensor, y: Tensor, h: Tensor) -> Tensor:
        return self.weight * F.mse_loss(output, y)


class Sum(Loss):
    def loss(self, output: Tensor, y: Tensor, h: Tensor) -> Tensor:
        return F.mse_loss(output, y) + self.weight * h.square().mean(-1, keepdim=True).expand_as(output).mean()


class Penalty(Loss):
    def loss(self, output: Tensor, y: Tensor, h: Tensor) -> Tensor:
        return F.mse_loss(output, y) / self.weight + self.weight * self.up.weight.square().sum() + self.weight


class Smoothed(Loss):
    def loss(self, output: Tensor, y: Tensor, h: Tensor) -> Tensor:
        return F.cross_entropy(output, y.argmax(-1), label_smoothing=self.weight / 4)


class Counting(Loss):
    """Counts its calls, and goes by what it has counted."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.scale, self.stats, self.is_even = 0, 1.0, {"calls": 0}, True

    def loss(self, output: Tensor, y: Tensor, h: Tensor) -> Tensor:
        self.calls += 1
        self.scale = max(0.5, 0.9 * self.scale)
        self.stats["calls"] += 1
        self.is_even = not self.is_even
        output = output * self.scale if self.is_even else output
        return F.mse_loss(output, y) / self.calls

    def kept(self) -> list[Any]:
        return [self.calls, self.scale, dict(self.stats), self.is_even]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "factor": Loss, "sum": Sum, "penalty": Penalty, "smoothed": Smoothed, "counting": Counting
}  # fmt: skip
PIPELINE = autoparallel.Pipeline(schedule="1f1b", microbatches=4, stages_per_rank=1)
OPTIONS: dict[str, dict[str, Any]] = {
    "fsdp": {"plan": "fsdp"}, "microbatches": {"plan": "fsdp", "microbatches": 2}, "pipeline": {"pipeline": PIPELINE},
}  # fmt: skip


def _annealed(model: Any, step: int) -> Any:
    if hasattr(model, "weight"):
        model.weight = 0.1 + 0.1 * step
    return model


def _off(name: str, how: str, window: int) -> list[float]:
    """How far losses and parameters are off, and whether what is kept differs, in windows of so many microbatches."""
    plain = make(MODELS[name])
    mesh = init_device_mesh(DEVICE, (2,), mesh_dim_names=("pp",)) if how == "pipeline" else mesh_of(2)
    model = autoparallel.compile(copy.deepcopy(plain), mesh, **OPTIONS[how])
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, plain)]
    worst: list[float] = []
    batches = [batch(number, 8 if number % 2 else 16) for number in range(STEPS * window)]
    for step, microbatches in enumerate(model.accumulate(window, batches)):
        seen = batches[step * window : (step + 1) * window]
        rows = sum(len(x) for x, _ in seen)
        for i, (x, y) in enumerate(microbatches):
            loss, expected = (_annealed(m, step * window + i)(x, y) for m in (model, plain))
            loss.backward()
            (expected * len(x) / rows).backward()
            worst.append(off(loss, expected))
            if isinstance(plain, Counting):
                worst.append(float(plain.kept() != [model.calls, model.scale, model.stats, model.is_even]))
        worst.append(
            off(model.grad_norm(), nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None]))
        )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        whole = dict(model.full_parameters())
        worst += [off(whole[parameter], value) for parameter, value in plain.named_parameters()]
    return worst


@pytest.mark.wide_where(lambda how, name: ([*OPTIONS].index(how) + [*MODELS].index(name)) % 7 > 0)
@pytest.mark.slow_where(lambda how, name: ([*OPTIONS].index(how) + [*MODELS].index(name)) % 2 > 0)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("how", OPTIONS)
def test_windows_equal_one_process(how: str, name: str) -> None:
    for worst in run_distributed(_off, name, how, 2, world_size=2):
        assert max(worst) < 1e-9, worst
