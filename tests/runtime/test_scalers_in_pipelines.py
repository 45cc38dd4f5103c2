"""Gradient scalers over a pipeline, whose ranks have unlike gradients, or none."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autoparallel
from tests.distributed import run_distributed
from tests.runtime.support import off, raised

WIDTH = 8


class Body(nn.Module):
    """Two layers, one for each stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


class _Loop:
    """Torch's loop around a model, with an optimizer for each layer, or one for both."""

    def __init__(self, model: Any, scaler: torch.amp.GradScaler, optimizers: int) -> None:
        self.model, self.scaler = model, scaler
        layers = [model.first, model.last]
        groups = [layers] if optimizers == 1 else [[layer] for layer in layers]
        self.optimizers = [torch.optim.SGD([p for m in group for p in m.parameters()], 0.1) for group in groups]

    def step(self, loss: Tensor, overflow: bool) -> float:
        self.scaler.scale(loss).backward()
        if overflow:  # of the first layer alone
            for p in self.model.first.parameters():
                if p.grad is not None:
                    p.grad.mul_(torch.inf)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
            optimizer.zero_grad()
        self.scaler.update()
        return self.scaler.get_scale()


def _compiled(plain: nn.Module) -> tuple[Any, torch.amp.GradScaler]:
    mesh, scaler = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)), _scaler()
    pipeline = autoparallel.Pipeline("1f1b", 2)
    model = autoparallel.compile(copy.deepcopy(plain), mesh, loss_fn=F.mse_loss, pipeline=pipeline, grad_scaler=scaler)
    return model, scaler


def _scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)


def _train(optimizers: int, frozen: bool) -> dict[str, Any]:
    """The scales of four steps, of which the third overflows on a rank that has gradients, and how far the parameters
    of this rank are off then."""
    torch.manual_seed(0)
    plain = Body().double()
    plain.last.requires_grad_(not frozen)
    model, scaler = _compiled(plain)
    mine, theirs = _Loop(model, scaler, optimizers), _Loop(plain, _scaler(), optimizers)
    scales = []
    for step in range(4):
        x, y = torch.randn(2, 4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        overflow = step == 2
        scales.append((mine.step(model(x, y), overflow), theirs.step(F.mse_loss(plain(x), y), overflow)))
    pairs = [(p, plain.get_parameter(name)) for name, p in model.named_parameters()]
    here = [(p.to_local(), q) for p, q in pairs if p.device_mesh.get_coordinate() is not None]
    return {"scales": scales, "off": max(off(p, q) for p, q in here)}


@pytest.mark.parametrize(("optimizers", "frozen"), [(1, False), (2, False), (1, True)])
def test_all_ranks_skip_the_steps_that_one_process_skips(optimizers: int, frozen: bool) -> None:
    for results in run_distributed(_train, optimizers, frozen, world_size=2):
        assert results["scales"] == [(16.0, 16.0), (32.0, 32.0), (16.0, 16.0), (16.0, 16.0)]
        assert results["off"] < 1e-12


def _without_gradients() -> str | None:
    model, scaler = _compiled(Body().double())
    x, y = torch.randn(2, 4, WIDTH, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler.scale(model(x, y)).backward()
    optimizer.zero_grad()
    assert pickle.loads(pickle.dumps(scaler)).state_dict() == scaler.state_dict()
    return raised(lambda: scaler.step(optimizer))


def test_torch_refuses_a_step_without_gradients_on_all_ranks() -> None:
    for error in run_distributed(_without_gradients, world_size=2):
        assert "No inf checks were recorded for this optimizer" in error
