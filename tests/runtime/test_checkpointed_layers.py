"""The model's own ``torch.utils.checkpoint``: its layers run again under every plan, and the plan says so."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import autoparallel
from autoparallel.decisions.pipeline import Pipeline
from autoparallel.plan import Plan
from tests.runtime.support import gradients_off, off, run_on_ranks
from tests.runtime.test_memory import Alive

WIDTH, ROWS = 16, 1024


class Block(nn.Module):
    """A layer that saves more than what enters it; ``how`` says what it has computed again by itself."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(torch.tanh(self.up(x)), 0.1, self.training))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "inside":
            return x + checkpoint(self.mlp, x, use_reentrant=False)
        return x + self.mlp(x)


class Deep(nn.Module):
    """Layers of which all, or every other one, are computed again."""

    def __init__(self, how: str, count: int = 6) -> None:
        super().__init__()
        self.how = how
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(how) for _ in range(count))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            if self.how in ("", "inside", "head") or self.how == "every other" and i % 2:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.how == "reentrant")
        return checkpoint(self.head, x.exp(), use_reentrant=False) if self.how == "head" else self.head(x)


def _peak(how: str) -> tuple[float, float, Plan]:
    """The bytes at the worst moment of a call and its backward, measured and predicted, and the plan."""
    torch.manual_seed(0)
    model = autoparallel.compile(Deep(how), loss_fn=F.mse_loss, plan="data_parallel")
    batch = torch.randn(ROWS, WIDTH), torch.randn(ROWS, 4)
    model.prepare(*batch)
    alive = Alive(batch)
    with alive:
        model(*batch).backward()
    prediction = model.plan.prediction
    assert prediction is not None
    resting = sum(prediction.memory[what] for what in ("parameters", "optimizer states", "inputs and buffers"))
    return sum(alive.ledger.peak.values()), prediction.total_memory - resting, model.plan


@pytest.mark.wide
def test_layers_that_the_model_checkpoints_keep_only_what_enters_them(caplog: pytest.LogCaptureFixture) -> None:
    whole, _, plan = _peak("")
    assert not plan.recompute and not plan.checkpointed
    for how in ("reentrant", "inside", "every other"):
        peak, expected, plan = _peak(how)
        again = [f"blocks.{i}" for i in range(0, 6, 2 if how == "every other" else 1)]
        assert plan.recompute == dict.fromkeys(again, "full"), how
        assert plan.checkpointed == tuple(again)
        assert peak < (0.65 if how == "every other" else 0.35) * whole, how
        assert peak == pytest.approx(expected, rel=0.1), how
        assert "the model itself calls torch.utils.checkpoint in blocks." in " ".join(plan.explain().split())
        assert Plan.from_json(plan.to_json()).checkpointed == plan.checkpointed
    assert "belongs to no layer" not in caplog.text
    with caplog.at_level(logging.WARNING):
        assert not _peak("head")[2].recompute
    assert "is kept for the backward, because it belongs to no layer" in caplog.text and __file__ in caplog.text


def _parity(shape: tuple[int, ...], names: tuple[str, ...], options: dict[str, Any]) -> tuple[float, list[str]]:
    """How far loss and gradients are off one process's, and the layers that run again, on any rank's stages."""
    torch.manual_seed(0)
    plain = Deep("every other", 4).double()
    for block in plain.blocks:
        block.eval()  # masks are ours; they are compared elsewhere
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = autoparallel.compile(copy.deepcopy(plain), mesh, loss_fn=F.mse_loss, **options)
    x, y = torch.randn(8, WIDTH, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    loss, expected = model(x, y), F.mse_loss(plain(x), y)
    loss.backward(), expected.backward()
    return max(off(loss, expected), gradients_off(model, plain)), [*model.plan.recompute]


@pytest.mark.parametrize(
    ("shape", "names", "options"),
    [
        ((2,), ("dp",), {"plan": "fsdp"}),
        pytest.param((2,), ("dp",), {"backend": "aot_eager"}, marks=pytest.mark.wide),
        ((2,), ("pp",), {"pipeline": Pipeline(microbatches=4)}),
    ],
    ids=["fsdp", "compiled", "pipeline"],
)
def test_they_do_so_under_every_plan_with_the_same_numbers(
    shape: tuple[int, ...], names: tuple[str, ...], options: dict[str, Any]
) -> None:
    for far, layers in run_on_ranks(_parity, shape, names, options, world_size=2):
        assert far < 1e-9
        assert layers == ["blocks.0", "blocks.2"]
