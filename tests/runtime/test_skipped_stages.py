"""Layers that are skipped, or change places, by what a call draws: a stage of a pipeline may have nothing to do."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autoparallel
from tests.distributed import run_distributed

STEPS = 6


class Skips(nn.Module):
    """All layers are skipped by the second call, and most by others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, 4)
        self.rate = 0.0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if random.random() >= self.rate:
                x = layer(x).tanh()
        return self.head(x)


class Shuffles(Skips):
    def forward(self, x: Tensor) -> Tensor:
        layers = list(self.layers)
        random.shuffle(layers)
        for layer in layers:
            x = layer(x).tanh()
        return x


MODELS: dict[str, type[Skips]] = {"skips": Skips, "shuffles": Shuffles}


def _train(kind: str, schedule: str | None) -> tuple[list[float], list[float], float]:
    """The norms of both runs, and how far the parameters are from each other in the end."""
    torch.manual_seed(0)
    plain = MODELS[kind]().double()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    pipeline = autoparallel.Pipeline(schedule, 2)  # type: ignore[arg-type]
    model: Any = autoparallel.compile(copy.deepcopy(plain), mesh, loss_fn=F.mse_loss, pipeline=pipeline)
    norms: list[list[float]] = []
    for m in (model, plain):
        random.seed(1)
        generator = torch.Generator().manual_seed(2)
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)
        norms.append([])
        for step in range(STEPS):
            m.rate = [0.0, 1.0][step] if step < 2 else 0.7
            x, y = torch.randn(2, 8, 4, dtype=torch.float64, generator=generator)
            loss = m(x, y) if m is model else F.mse_loss(m(x), y)
            loss.backward()
            norm = m.clip_grad_norm_(0.1) if m is model else nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            norms[-1] += [loss.item(), norm.item()]
            optimizer.step()
            optimizer.zero_grad()
    ours = dict(model.full_parameters())
    return norms[0], norms[1], max((ours[name] - p).abs().max().item() for name, p in plain.named_parameters())


@pytest.mark.wide
@pytest.mark.parametrize(("kind", "schedule"), [("skips", None), ("skips", "1f1b"), ("shuffles", "interleaved_1f1b")])
def test_calls_that_skip_layers_run_in_the_stages_of_others(kind: str, schedule: str | None) -> None:
    for ours, theirs, off in run_distributed(_train, kind, schedule, world_size=2):
        assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-12)
        assert off < 1e-9


def _without_operators() -> str:
    class Doubles(Skips):
        def twice(self, x: Tensor) -> Tensor:
            return x * 2

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    pipeline = autoparallel.Pipeline(microbatches=2)
    model: Any = autoparallel.compile(Doubles(), mesh, pipeline=pipeline, forward_methods=("twice",))
    with pytest.raises(autoparallel.PlanError) as error:
        model.twice(torch.randn(8, 4))
    return str(error.value)


def test_a_call_without_operators_is_refused_with_a_cure() -> None:
    for words in run_distributed(_without_operators, world_size=2):
        assert "compute it outside of the compiled model" in words
