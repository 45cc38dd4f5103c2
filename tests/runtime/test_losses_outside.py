"""Losses that the loop computes of outputs that lie as they are made, which torch divides by what a rank has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.runtime.support import Net, batch, compiled_pair, gradients_off, off, run_on_ranks

LOSSES: dict[str, Callable[..., Tensor]] = {
    "squares": F.mse_loss,
    "sum of squares": lambda x, y: F.mse_loss(x, y, reduction="sum"),
    "each square": lambda x, y: F.mse_loss(x, y, reduction="none").mean(),
    "smooth": lambda x, y: F.smooth_l1_loss(x, y, beta=0.5),
    "Huber": F.huber_loss,
    "absolute": F.l1_loss,
    "probabilities": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    "weighed": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), weight=y.exp()),
    "logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid(), pos_weight=y[0].exp()),
    "margins": lambda x, y: F.soft_margin_loss(x, y.sign()),
    "labels": lambda x, y: F.cross_entropy(x, y.argmax(1)),
    "labels of which some are ignored": lambda x, y: F.cross_entropy(x, _labels(y)),
    "sum over labels": lambda x, y: F.cross_entropy(x, _labels(y), reduction="sum"),
    "smoothed": lambda x, y: F.cross_entropy(x, _labels(y), label_smoothing=0.1),
    "weighed labels": lambda x, y: F.nll_loss(x.log_softmax(-1), _labels(y), weight=torch.arange(1.0, 5).to(x.dtype)),
    "a label for each pixel": lambda x, y: F.cross_entropy(
        x.view(len(x), 2, 2), torch.stack([_labels(y)] * 2, 1).clamp(max=1)
    ),
}
if torch.__version__ < "2.13":
    del LOSSES["logits"]  # which a DTensor cannot do there


def _labels(y: Tensor) -> Tensor:
    """The class of each row; that of the first rows is ignored, so that ranks have unlike many."""
    rows = torch.arange(len(y))
    return torch.where(rows < 3, -100, y.argmax(1))


def _pixels(y: Tensor) -> Tensor:
    return torch.stack([_labels(y)] * 2, 1).clamp(max=1)


def _trained(plan: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    model, plain = compiled_pair(Net, plan=plan, loss_fn=None, outputs="sharded")
    for name, loss_fn in LOSSES.items():
        model.zero_grad()
        plain.zero_grad()
        x, y = batch()
        outputs = model(x)
        loss, expected = loss_fn(outputs, y), loss_fn(plain(x), y)
        loss.backward()
        expected.backward()
        assert isinstance(outputs, DTensor) and any(p.is_shard() for p in outputs.placements)
        results[name] = max(off(loss, expected), gradients_off(model, plain))
        for rows in (7, 5):  # which leaves ranks parts of other sizes
            x, y = batch(rows=rows)
            whole, target = plain(x).detach().requires_grad_(), distribute_tensor(y, *_where(outputs))
            parts = distribute_tensor(whole.detach(), *_where(outputs)).requires_grad_()
            loss, expected = loss_fn(parts, target if name != "logits" else y), loss_fn(whole, y)
            loss.backward()
            expected.backward()
            assert parts.grad is not None and whole.grad is not None
            results[f"{name} of {rows} rows"] = max(off(loss, expected), off(parts.grad, whole.grad))
    return results


def _where(outputs: DTensor) -> tuple[Any, Any]:
    return outputs.device_mesh, outputs.placements


@pytest.mark.parametrize("plan", ["fsdp", "tensor_parallel"])
def test_means_of_losses_are_those_of_one_process(plan: str) -> None:
    for results in run_on_ranks(_trained, plan, world_size=2):
        assert max(results.values()) < 1e-12, results


def _picked(plan: str) -> float:
    model, plain = compiled_pair(Net, plan=plan, loss_fn=None, outputs="sharded")
    (x, y), index = batch(), torch.arange(10).view(5, 2) % 4
    for m in (model, plain):
        outputs = m(x)
        (outputs.gather(1, index).square().sum() + outputs.scatter_add(1, index, y).exp().sum()).backward()
    return gradients_off(model, plain)


@pytest.mark.parametrize("plan", ["fsdp", "tensor_parallel"])
def test_fewer_rows_are_picked_from_those_of_the_whole(plan: str) -> None:
    assert max(run_on_ranks(_picked, plan, world_size=2)) < 1e-12
