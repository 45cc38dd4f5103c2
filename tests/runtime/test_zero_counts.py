"""Losses that are divided by a count of zero: of a call, of one microbatch, of one rank's rows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import autoparallel
from tests.devices import DEVICE
from tests.runtime.support import Net, batch, make, run_on_ranks, whole

Loss = Callable[[Tensor, Tensor], Any]


def _rows(out: Tensor) -> Tensor:
    return out.square().mean(-1)


def masked(out: Tensor, y: Tensor) -> Tensor:
    """Its gradient is NaN where there is nothing to count."""
    return (_rows(out) * (y >= 0)).sum() / (y >= 0).sum()


def ignored(out: Tensor, y: Tensor) -> Tensor:
    """Its gradient is zero there."""
    return F.cross_entropy(out, y)


def smoothed(out: Tensor, y: Tensor) -> Tensor:
    """Its gradient is zero, or NaN, by why nothing counts."""
    return F.cross_entropy(out, y, torch.tensor([0.0, 1, 2, 1]).to(out), label_smoothing=0.1)


def by_positives(out: Tensor, y: Tensor) -> Tensor:
    """Adds up all rows, whatever is counted, as losses of detectors do."""
    return _rows(out).sum() / (y >= 0).sum()


def clamped(out: Tensor, y: Tensor) -> Tensor:
    """The same, with a gradient that is finite where nothing counts."""
    return _rows(out).sum() / (y >= 0).sum().clamp(min=1)


def counted(out: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The sum and the count of the former."""
    return _rows(out).sum(), (y >= 0).sum()


def added(out: Tensor, y: Tensor) -> Tensor:
    """Two sums by one count, one of which is taken off."""
    return 0.5 * by_positives(out, y) - masked(out, y)


NONE = [-100] * 4
TARGETS = {
    "all": [1, 2, 3, 0] * 2,
    "one half": [1, 2, 1, 2, *NONE],
    "no weight": [0] * 8,
    "half without weight": [1] * 4 + [0] * 4,
    "none": NONE * 2,
}


def _plain_loss(loss: Loss, out: Tensor, y: Tensor) -> Tensor:
    value = loss(out, y)
    return value[0] / value[1] if isinstance(value, tuple) else value


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal, and finite in the same places."""
    a, b = (torch.where(x.isfinite(), x, torch.nan) for x in (whole(a), b.detach()))
    return torch.allclose(a, b, 1e-9, 1e-9, equal_nan=True)


def _differing(losses: list[Loss], names: list[str], window: bool, options: dict[str, Any]) -> list[str]:
    """What is not as in one process, by loss and targets."""
    differing = []
    axis = "pp" if "pipeline" in options else "dp"
    for loss in losses:
        plain = make(Net, torch.float64)
        mesh = init_device_mesh(DEVICE, (2,), mesh_dim_names=(axis,))
        model = autoparallel.compile(copy.deepcopy(plain), mesh, loss_fn=loss, **options)
        for name in names:
            x, y = batch()[0].to(DEVICE), torch.tensor(TARGETS[name], device=DEVICE)
            expected = _plain_loss(loss, plain(x), y)
            expected.backward()
            pairs = [] if window else [(model(x, y), expected)]
            for microbatches in model.accumulate(2, zip(x.chunk(2), y.chunk(2), strict=True)) if window else ():
                for rows, targets in microbatches:
                    pairs.append((model(rows, targets), _plain_loss(loss, plain(rows), targets)))
                    pairs[-1][0].backward()
            if not window:
                pairs[0][0].backward()
            held = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            pairs += [(held[n], p.grad) for n, p in plain.named_parameters() if n in held]
            differing += [f"{loss.__name__}: {name}"] * (not held or not all(_alike(a, b) for a, b in pairs))
            model.zero_grad(), plain.zero_grad()
    return differing


LOSSES: list[Loss] = [masked, ignored, smoothed, by_positives, clamped, counted, added]


@pytest.mark.parametrize(
    ("losses", "options"),
    [(LOSSES, {"plan": "fsdp"}), ([ignored, by_positives], {"plan": "tensor_parallel", "backend": "aot_eager"})],
    ids=["fsdp", "compiled"],
)
def test_a_call_that_counts_nothing_has_the_gradients_of_one_process(
    losses: list[Loss], options: dict[str, Any]
) -> None:
    for found in run_on_ranks(_differing, losses, [*TARGETS], False, options, world_size=2):
        assert not found


IN_PARTS = {
    "window": (True, {"plan": "fsdp"}),
    "microbatches": (False, {"plan": "fsdp", "microbatches": 2}),
    "pipeline": (False, {"pipeline": autoparallel.Pipeline(schedule="gpipe", microbatches=2)}),
}


@pytest.mark.parametrize("way", IN_PARTS)
def test_a_microbatch_that_counts_nothing_adds_its_sum(way: str) -> None:
    """To those of the others, by the count of all."""
    for found in run_on_ranks(
        _differing, LOSSES, ["all", "one half", "half without weight"], *IN_PARTS[way], world_size=2
    ):
        assert not found


@pytest.mark.parametrize("way", IN_PARTS)
def test_microbatches_that_count_nothing_at_all(way: str) -> None:
    for found in run_on_ranks(_differing, [masked, ignored, clamped], ["none"], *IN_PARTS[way], world_size=2):
        assert not found


def test_a_loss_in_chunks_of_rows_that_counts_nothing() -> None:
    options = {"plan": "fsdp", "loss_chunks": 2}
    for found in run_on_ranks(_differing, [ignored, smoothed], [*TARGETS], False, options, world_size=2):
        assert not found
