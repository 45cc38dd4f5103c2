"""Gradients of microbatches inside a call: when they are sent, and when hooks on parameters see them."""

from __future__ import annotations

import copy
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

import autoparallel
from autoparallel.runtime.programs.stages import StageGradients
from tests.runtime.support import mesh_of, run_on_ranks

WIDTH, MICROBATCHES, LAYERS = 640, 2, 4


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))).double()


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, WIDTH, dtype=torch.float64), torch.randn(8, WIDTH, dtype=torch.float64)


def _train() -> tuple[list[str], list[torch.Tensor], float]:
    """What happens in the second of two backwards, what a hook saw, and how far the gradients are from those of one
    process."""
    plain, batch = _model(), _batch()
    model = autoparallel.compile(
        copy.deepcopy(plain), mesh_of(2), plan="fsdp", loss_fn=F.mse_loss, microbatches=MICROBATCHES
    )
    seen: list[torch.Tensor] = []
    next(model.parameters()).register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.full_tensor()))
    with model.no_sync():
        model(*batch).backward()
    assert not seen
    happened: list[str] = []
    start, add = StageGradients.reduce, StageGradients._add_up

    def starts(*args: object) -> object:
        happened.append("starts")
        return start(*args)  # type: ignore[arg-type]

    def adds(*args: object) -> None:
        happened.append("is added")
        add(*args)  # type: ignore[arg-type]

    with mock.patch.object(StageGradients, "reduce", starts), mock.patch.object(StageGradients, "_add_up", adds):
        loss = model(*batch)
    loss.backward()
    for _ in range(2):
        F.mse_loss(plain(batch[0]), batch[1]).backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    worst = max((a.grad.full_tensor() - b.grad).abs().max().item() for a, b in pairs)
    return happened, [x - next(plain.parameters()).grad for x in seen], worst


def test_gradients_of_a_microbatch_travel_while_those_of_others_are_made() -> None:
    for happened, seen, worst in run_on_ranks(_train, world_size=2):
        assert worst < 1e-12
        assert len(seen) == 1 and seen[0].abs().max() < 1e-12, "called once, when the gradient is complete"
        count = happened.count("starts")
        assert count == happened.count("is added") >= 3 * MICROBATCHES
        halves = [happened[i : i + 2 * count // MICROBATCHES] for i in range(0, 2 * count, 2 * count // MICROBATCHES)]
        for half in halves:
            assert half[:2] == ["starts", "starts"] and half[-1] == "is added"
            assert half.count("starts") == half.count("is added"), "a microbatch's have come when the next begins"
