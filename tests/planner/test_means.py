"""Where memory is short, the loss goes through its rows in chunks, and a call runs in microbatches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoparallel.decisions.parameters import PlanError
from autoparallel.hardware import CPU, H100
from autoparallel.planner.draft import Draft, call_of
from autoparallel.planner.request.request import Request
from tests.captures import draft, shared_captures
from tests.planner.blocks import Blocks

ROWS, WIDTH = 256, 16


class Wide(nn.Module):
    """Few activations, and a wide head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Blocks(2, WIDTH, WIDTH), nn.Linear(WIDTH, 2000)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(x)), y)


class Deep(nn.Module):
    """Activations alone, outside of layers that could run again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(8):
            x = torch.tanh(x)
        return F.mse_loss(self.last(x), y)


@pytest.fixture(scope="module", autouse=True)
def one_trace_for_all_plans() -> Iterator[None]:
    with shared_captures():
        yield


def _draft(model: nn.Module, y: Tensor, limit: float | None, **options: int) -> Draft:
    request = Request((("dp", 2),), CPU, "data_parallel", memory_limit=limit, **options)
    return draft(model, call_of((torch.empty(ROWS, WIDTH, device="meta"), y)), request)


def test_the_loss_is_cut_where_memory_is_short() -> None:
    y = torch.empty(ROWS, dtype=torch.int64, device="meta")
    free = _draft(Wide(), y, None)
    assert (free.plan.loss_chunks, free.plan.microbatches) == (1, 1)
    limit = 0.7 * free.prediction.total_memory
    found = _draft(Wide(), y, limit)
    assert (found.plan.loss_chunks, found.plan.microbatches, found.plan.recompute) == (8, 1, {})
    assert found.prediction.total_memory <= limit


class WithLogits(Wide):
    """Gives its logits beside its loss, which chunks would take away."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits = self.head(self.body(x))
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


def test_chunks_that_would_take_the_logits_are_not_taken_but_named() -> None:
    y = torch.empty(ROWS, dtype=torch.int64, device="meta")
    limit = 0.7 * _draft(WithLogits(), y, None).prediction.total_memory
    with pytest.raises(PlanError, match=r"Use loss_chunks=8 and microbatches=2 \(or more\) \(a"):
        _draft(WithLogits(), y, limit)
    assert _draft(WithLogits(), y, limit, loss_chunks=8).prediction.total_memory <= limit


def test_a_call_is_cut_where_nothing_else_helps() -> None:
    y = torch.empty(ROWS, WIDTH, device="meta")
    free = _draft(Deep(), y, None)
    limit = 0.6 * free.prediction.total_memory
    found = _draft(Deep(), y, limit)
    assert found.plan.loss_chunks == 1 and found.plan.microbatches in (2, 4)
    assert found.prediction.total_memory <= limit
    assert found.prediction.seconds() > free.prediction.seconds()
    asked = _draft(Deep(), y, None, microbatches=found.plan.microbatches)
    assert asked.prediction.total_memory == found.prediction.total_memory


class Layered(nn.Module):
    """Layers that could run again, and take longer so than more microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Blocks(6, 64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.head(self.body(x)), y)


def test_more_microbatches_with_the_same_layouts_are_another_plan() -> None:
    call = call_of((torch.empty(4096, 64, device="meta"), torch.empty(4096, 64, device="meta")))

    def found(limit: float | None, microbatches: int | None = None) -> Draft:
        request = Request((("dp", 2),), CPU, "fsdp", memory_limit=limit, microbatches=microbatches)
        return draft(Layered(), call, request)

    limit = 0.5 * found(None).prediction.total_memory
    fewer, more = found(limit, 2), found(limit, 4)
    assert fewer.plan.recompute and not more.plan.recompute
    assert more.prediction.seconds() < fewer.prediction.seconds()
    assert found(limit).plan.microbatches == 4


def test_gradients_of_microbatches_are_reduced_once_and_behind_nothing() -> None:
    slow = dataclasses.replace(H100, bandwidth=1e6)
    call = call_of((torch.empty(ROWS, WIDTH, device="meta"), torch.empty(ROWS, WIDTH, device="meta")))
    for count in (2, 4):
        request = Request((("dp", 2),), slow, "data_parallel", microbatches=count)
        prediction = draft(Deep(), call, request).prediction
        reducing = prediction.reductions["per_microbatch"].seconds
        assert prediction.gradient_seconds == pytest.approx(reducing, rel=0.01)
        assert prediction.backward_seconds < reducing / 10, "no microbatch waits for the reduction"
        assert prediction.seconds() < 2 * reducing
