"""Gradients that a model takes in its forward: in the stages of a pipeline, in microbatches, in any batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autoparallel
from tests.distributed import run_distributed
from tests.runtime.support import off


class Forces(nn.Module):
    """The force at each row of an energy that goes through all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])

    def energy(self, place: Tensor) -> Tensor:
        h = self.first(place)
        for layer in self.layers:
            h = h + layer(h)
        return self.last(h).sum()

    def forward(self, x: Tensor) -> Tensor:
        place = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.energy(place), place, create_graph=True)
        return -slope


class Transformed(Forces):
    """The same by ``torch.func``, of each row and of their sum."""

    def forward(self, x: Tensor) -> Tensor:
        slope = torch.func.grad(self.energy)
        return -(torch.func.vmap(slope)(x) + slope(x)) / 2


OPTIONS: dict[str, dict[str, Any]] = {
    "pipeline": {"pipeline": autoparallel.Pipeline("1f1b", 2)},
    "microbatches": {"plan": "fsdp", "microbatches": 2},
    "fsdp": {"plan": "fsdp"},
}


def _train(make: type[Forces], kind: str) -> tuple[float, float, int]:
    """How far losses and parameters are from those of a plain model; the number of traces."""
    torch.manual_seed(0)
    plain = make().double()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp" if kind == "pipeline" else "dp",))
    model: Any = autoparallel.compile(copy.deepcopy(plain), mesh, loss_fn=F.mse_loss, **OPTIONS[kind])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    losses = []
    for rows in (8, 4, 12):
        x, y = torch.randn(2, rows, 4, dtype=torch.float64)
        pair = model(x, y), F.mse_loss(plain(x), y)
        losses.append(off(*pair))
        for loss, optimizer in zip(pair, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    ours = dict(model.full_parameters())
    apart = max(off(ours[name], p) for name, p in plain.named_parameters())
    return max(losses), apart, len(model._kinds)


@pytest.mark.wide_where(lambda make, kind: kind == "fsdp" or make is Transformed)
@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("make", [Forces, Transformed])
def test_they_are_those_of_one_process(make: type[Forces], kind: str) -> None:
    for loss, parameters, traces in run_distributed(_train, make, kind, world_size=2):
        assert loss < 1e-9 and parameters < 1e-9
        assert traces == 1
