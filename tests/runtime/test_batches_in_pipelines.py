"""Batches of any size train in a pipeline: those that its microbatches do not divide are cut into others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autoparallel
from autoparallel.pipeline.schedules import cut_rows
from autoparallel.plan import Plan
from tests.distributed import run_distributed
from tests.runtime.support import off

WIDTH = 8


class Classifiers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(5)))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(x)


def _loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target)


def _batch(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x, y = torch.randn(rows, WIDTH, dtype=torch.float64, generator=generator), torch.arange(rows) % 5
    return x, torch.where(torch.rand(rows, generator=generator) < 0.3, -100, y).index_fill(0, torch.tensor([0]), 1)


def _train(schedule: str, sharing: int) -> dict[str, float]:
    """How far losses and gradients of this rank's stages are from those of one process, for several first batches."""
    shape, names = ((2,), ("pp",)) if sharing == 1 else ((sharing, 2), ("dp", "pp"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    torch.manual_seed(0)
    plain, results = Classifiers().double(), {}
    options: dict[str, Any] = {"pipeline": autoparallel.Pipeline(schedule, 4)}
    for first in (8, 7, 1):
        model = autoparallel.compile(copy.deepcopy(plain), mesh, loss_fn=_loss, **options)
        worst = max(_off(model, plain, [rows]) for rows in (first, 8, 6, 3, 1, 5))
        results[f"first of {first} rows"] = max(worst, _off(model, plain, [8, 5, 7]))
        assert model.plan.pipeline.microbatches == 4
        options = {"plan": Plan.from_json(model.plan.to_json())}  # from the second on, as one loads it
    return results


def _off(model: Any, plain: nn.Module, sizes: list[int]) -> float:
    """The same of a window of some batches."""
    model.zero_grad(), plain.zero_grad()
    batches = [_batch(rows) for rows in sizes]
    losses = []
    for window in model.accumulate(len(batches), batches):
        for batch in window:
            losses.append(model(*batch))
            losses[-1].backward()
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    loss = _loss(plain(x), y)
    loss.backward()
    mine = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert mine
    worst = max(off(grad, plain.get_parameter(name).grad) for name, grad in mine.items())
    return max(worst, off(losses[0], loss) if len(sizes) == 1 else 0.0)


@pytest.mark.parametrize(
    "schedule",
    ["1f1b", *(pytest.param(x, marks=pytest.mark.wide) for x in ("gpipe", "interleaved_1f1b", "zero_bubble"))],
)
def test_batches_of_any_size_train_in_a_pipeline(schedule: str) -> None:
    for results in run_distributed(_train, schedule, 1, world_size=2):
        assert len(results) == 3 and max(results.values()) < 1e-12, results


@pytest.mark.wide
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_they_do_on_several_ranks_for_each_stage(schedule: str) -> None:
    for results in run_distributed(_train, schedule, 2, world_size=4):
        assert len(results) == 3 and max(results.values()) < 1e-12, results


@pytest.mark.parametrize(
    ("microbatches", "rows", "expected"), [(4, 8, 4), (4, 6, 6), (4, 7, 7), (4, 3, 3), (4, 1, 1), (2, 9, 3), (1, 9, 1)]
)
def test_rows_are_cut_into_the_next_more_microbatches(microbatches: int, rows: int, expected: int) -> None:
    assert cut_rows(microbatches, rows) == expected


def test_rows_are_cut_into_fewer_microbatches_where_a_schedule_runs_no_more() -> None:
    assert cut_rows(4, 9, lambda count: count % 2 == 1 and count < 9) == 3
    assert cut_rows(4, 9, lambda count: False) == 4
