"""The loss in chunks of rows takes the memory that is predicted, says so, and refuses what it cannot do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import autoparallel
from autoparallel.decisions.parameters import PlanError
from autoparallel.plan import Plan
from autoparallel.predict.meter import Clock, Ledger

ROWS, WIDTH, CLASSES = 512, 8, 1000


class _Alive(TorchDispatchMode):
    """Follows the bytes that calls have made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(Clock(0.0))
        self.ledger.kind = "all"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.ledger.add(result)
        return result


class Classifier(nn.Module):
    """A head that is much wider than what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


def _peak(**options: Any) -> tuple[float, float, Any]:
    """The bytes at the worst moment of a call and its backward, measured and predicted, and the plan."""
    torch.manual_seed(0)
    model = autoparallel.compile(Classifier(), loss_fn=F.cross_entropy, **options)
    batch = torch.randn(ROWS, WIDTH), torch.arange(ROWS)
    model.prepare(*batch)
    alive = _Alive()
    with alive:
        model(*batch).backward()
    prediction = model.plan.prediction
    resting = sum(prediction.memory[what] for what in ("parameters", "optimizer states", "inputs and buffers"))
    return sum(alive.ledger.peak.values()), prediction.total_memory - resting, model.plan


def test_the_peak_falls_as_predicted() -> None:
    whole, expected, _ = _peak()
    assert whole > 2 * ROWS * CLASSES * 4, "logits, and their probabilities or gradient"
    assert whole == pytest.approx(expected, rel=0.1)
    peak, expected, plan = _peak(loss_chunks=16)
    assert peak < 0.2 * whole
    assert peak == pytest.approx(expected, rel=0.1)
    assert "The loss is computed in 16 chunks of rows" in plan.explain()
    assert "Chunks of the loss: 16; now 1." in plan.diff(_peak()[2])
    again, _, loaded = _peak(plan=Plan.from_json(plan.to_json()))
    assert loaded.loss_chunks == 16 and again == peak


def test_what_cannot_be_chunked_is_refused() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    batch = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    with pytest.raises(PlanError, match=r"cannot be computed in 4 chunks of rows: .* Return the loss alone"):
        autoparallel.compile(model, loss_fn=F.mse_loss, loss_chunks=4).prepare(*batch)
    for wrong in (0, "all"):
        with pytest.raises(ValueError, match="loss_chunks must be a positive integer"):
            autoparallel.compile(nn.Linear(2, 2), loss_chunks=wrong)  # type: ignore[arg-type]
