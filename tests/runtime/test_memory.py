"""Loss chunks, and microbatches inside a call, take the memory that is predicted, say so, and refuse what differs."""

from __future__ import annotations

import copy
from collections.abc import Callable
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
from tests.runtime.support import gradients_off, mesh_of, run_on_ranks

ROWS, WIDTH, CLASSES = 512, 8, 1000


class Alive(TorchDispatchMode):
    """Follows the bytes that calls have made and that are still alive."""

    def __init__(self, inputs: Any) -> None:
        super().__init__()
        self.ledger = Ledger(Clock(0.0))
        self.ledger.add(inputs)  # views of them are no memory
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


def _peak(make: Callable[[], nn.Module] = Classifier, calls: int = 1, **options: Any) -> tuple[float, float, Any]:
    """The bytes at the worst moment of a call and its backward, measured and predicted, and the plan.

    Of several calls, the least: gloo's thread lets go of what it has sent a moment after the wait for it is over.
    """
    torch.manual_seed(0)
    model = autoparallel.compile(make(), loss_fn=F.cross_entropy, **{"plan": "data_parallel", **options})
    batch = torch.randn(ROWS, WIDTH), torch.arange(ROWS) % WIDTH
    model.prepare(*batch)
    peaks = []
    for _ in range(calls):
        alive = Alive(batch)
        with alive:
            model(*batch).backward()
        peaks.append(sum(alive.ledger.peak.values()))
        model.zero_grad()
    prediction = model.plan.prediction
    resting = sum(prediction.memory[what] for what in ("parameters", "optimizer states", "inputs and buffers"))
    return min(peaks), prediction.total_memory - resting, model.plan


def test_the_peak_falls_as_predicted() -> None:
    whole, expected, plain = _peak()
    assert whole > 2 * ROWS * CLASSES * 4, "logits, and their probabilities or gradient"
    assert whole == pytest.approx(expected, rel=0.1)
    peak, expected, plan = _peak(loss_chunks=16)
    assert peak < 0.2 * whole
    assert peak == pytest.approx(expected, rel=0.1)
    assert "The loss is computed in 16 chunks of rows" in plan.explain()
    assert "Chunks of the loss: 16; now 1." in plan.diff(plain)
    assert Plan.from_json(plan.to_json()).loss_chunks == 16


class Deep(nn.Sequential):
    """Activations that are much larger than the parameters."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH)) for _ in range(6)))


@pytest.mark.wide
def test_microbatches_take_the_peak_that_is_predicted() -> None:
    whole, expected, _ = _peak(Deep)
    assert whole == pytest.approx(expected, rel=0.1)
    peak, expected, plan = _peak(Deep, microbatches=8)
    assert peak < 0.4 * whole
    assert peak == pytest.approx(expected, rel=0.1)
    assert "A training call runs in 8 microbatches" in plan.explain()
    assert plan.prediction.seconds() == plan.prediction.seconds(0) + 8 * (
        plan.prediction.forward_seconds + plan.prediction.backward_seconds
    )
    again, _, loaded = _peak(Deep, plan=Plan.from_json(plan.to_json()))
    assert loaded.microbatches == 8 and again == pytest.approx(peak, rel=0.01)


class Heavy(nn.Sequential):
    """Parameters that are much larger than the activations of a microbatch."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 256), *(nn.Linear(256, 256) for _ in range(6)), nn.Linear(256, WIDTH))


def _scattered() -> tuple[float, float, float]:
    measured, predicted, plan = _peak(Heavy, calls=10, plan="fsdp", microbatches=8, mesh=mesh_of(2))
    return measured, predicted, plan.prediction.memory["gradients"]


@pytest.mark.wide
def test_gradients_that_each_microbatch_scatters_are_predicted() -> None:
    for measured, predicted, gradients in run_on_ranks(_scattered, world_size=2):
        assert gradients > 256 * 256 * 4, "whole ones, until they are scattered"
        assert measured == pytest.approx(predicted, rel=0.15)


def test_microbatches_are_for_training_calls(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    plain = Classifier().double()
    model = autoparallel.compile(copy.deepcopy(plain), loss_fn=F.cross_entropy, microbatches=4)
    x, y = torch.randn(8, WIDTH, dtype=torch.float64), torch.arange(8)
    with torch.no_grad():
        torch.testing.assert_close(model(x[:3], y[:3]), F.cross_entropy(plain(x[:3]), y[:3]))
    torch.testing.assert_close(model(x), plain(x))
    halves = [(x[some], y[some]) for some in (slice(0, 4), slice(4, 8))]
    for window in model.accumulate(2, halves):
        for args in window:
            model(*args).backward()
    F.cross_entropy(plain(x), y).backward()
    assert gradients_off(model, plain) < 1e-12
    for rows in (6, 5, 3, 1):
        model.zero_grad(), plain.zero_grad()
        model(x[:rows], y[:rows]).backward(), F.cross_entropy(plain(x[:rows]), y[:rows]).backward()
        assert gradients_off(model, plain) < 1e-12
    assert {kind.plan.microbatches for kind in model._kinds} == {1, 4}, "no batch is planned once more"
    assert not [text for text in caplog.messages if "microbatches" in text]
    for _ in range(2):  # the first of them tells
        model(torch.randn(17, WIDTH, dtype=torch.float64), torch.arange(17) % 8).backward()
    (text,) = [text for text in caplog.messages if "microbatches" in text]
    assert "runs in 17 microbatches, because 4 do not divide" in text


@pytest.mark.parametrize("rows", [ROWS - 1, 9, 1])
def test_microbatches_that_a_limit_asks_for_leave_batches_of_any_size(rows: int) -> None:
    """511 rows, which 2 does not divide, are cut into 7; a few are not cut."""
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)), nn.Linear(64, 5)).double()
    x, y = torch.randn(ROWS, 64, dtype=torch.float64), torch.arange(ROWS) % 5
    fastest = autoparallel.compile(copy.deepcopy(plain), loss_fn=F.cross_entropy)
    fastest.prepare(x, y)
    assert fastest.plan.prediction is not None
    limit = int(0.85 * sum(fastest.plan.prediction.memory.values()))
    model = autoparallel.compile(copy.deepcopy(plain), loss_fn=F.cross_entropy, memory_limit=limit)
    model.prepare(x, y)
    assert model.plan.microbatches > 1
    x, y = x[:rows], y[:rows]
    model(x, y).backward(), F.cross_entropy(plain(x), y).backward()
    assert gradients_off(model, plain) < 1e-12


@pytest.mark.wide
def test_microbatches_that_would_differ_are_refused() -> None:
    batch = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    for layer, reason in (
        (nn.BatchNorm1d(WIDTH), "change the buffer 1.running_mean"),
        (nn.Softmax(0), r"1/aten.softmax.int#0 is of the whole batch"),
    ):
        model = autoparallel.compile(nn.Sequential(nn.Linear(WIDTH, WIDTH), layer), loss_fn=F.mse_loss, microbatches=2)
        with pytest.raises(PlanError, match=f"cannot be cut into 2 microbatches with the same numbers: .*{reason}"):
            model.prepare(*batch)
    with pytest.raises(PlanError, match=r"this call makes no loss \(pass loss_fn"):
        autoparallel.compile(nn.Linear(WIDTH, WIDTH), microbatches=2).prepare(batch[0])
    with pytest.raises(PlanError, match=r"2 scalars that can be differentiated \(detach all but the loss\)"):
        autoparallel.compile(_Logged(WIDTH, WIDTH), outputs="gather", microbatches=2).prepare(batch[0])
    with pytest.raises(PlanError, match="the batch size is fixed at 8"):
        autoparallel.compile(_Summed(WIDTH, WIDTH), microbatches=2).prepare(*batch, batch[1])


class _Logged(nn.Linear):
    """Returns a number beside its loss."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        y = super().forward(x)
        return {"loss": y.square().mean(), "size": y.abs().mean()}


class _Summed(nn.Linear):
    """Fixes the number of one input's rows, not that of the others'."""

    def forward(self, x: Tensor, y: Tensor, target: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"loss": F.mse_loss(super().forward(y), target), "sums": x.mT @ x.new_ones(8, 1)}


class Labelled(Classifier):
    """Returns what models of transformers return."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits = super().forward(x)
        return {"loss": F.cross_entropy(logits.view(-1, CLASSES), labels), "logits": logits}


@pytest.mark.wide
def test_logits_beside_a_loss_in_chunks_are_not_kept() -> None:
    torch.manual_seed(0)
    plain = Labelled().double()
    model = autoparallel.compile(copy.deepcopy(plain), plan="data_parallel", loss_chunks=4)
    x, y = torch.randn(8, WIDTH, dtype=torch.float64), torch.arange(8)
    found, expected = model(x, y), plain(x, y)
    torch.testing.assert_close(found["loss"], expected["loss"], rtol=1e-12, atol=1e-12)
    with pytest.raises(RuntimeError, match="output 1 of the model is not kept: the loss is computed in chunks"):
        found["logits"].argmax(-1)
    assert "# chunk_loss" in model.plan.explain(passes=True)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x, y)["logits"], expected["logits"])


def test_what_cannot_be_chunked_is_refused() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    batch = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    with pytest.raises(PlanError, match=r"cannot be computed in 4 chunks of rows: .* nothing else reads"):
        autoparallel.compile(model, loss_fn=F.mse_loss, loss_chunks=4).prepare(*batch)
    for name in ("loss_chunks", "microbatches"):
        for wrong in (0, "all"):
            with pytest.raises(ValueError, match=f"{name} must be a positive integer"):
                autoparallel.compile(nn.Linear(2, 2), **{name: wrong})  # type: ignore[arg-type]


def _on_two_ranks() -> dict[str, Any]:
    """Counted and predicted traffic of a step, and how far gradients are from the plain model's, with a scaler."""
    found = {}
    x, y = torch.randn(16, WIDTH, dtype=torch.float64), torch.arange(16)
    options: dict[str, Any] = {"microbatches": 2, "loss_chunks": 3, "loss_fn": F.cross_entropy}
    for preset in ("data_parallel", "fsdp", "tensor_parallel"):
        torch.manual_seed(0)
        plain = Classifier().double()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        mesh = mesh_of(2)
        model = autoparallel.compile(copy.deepcopy(plain), mesh, plan=preset, grad_scaler=scaler, **options)
        model.prepare(x, y)
        with autoparallel.count_traffic(mesh) as traffic:
            scaler.scale(model(x, y)).backward()
        F.cross_entropy(plain(x), y).backward()
        scaler.unscale_(torch.optim.SGD(model.parameters(), lr=0.1))
        worst = gradients_off(model, plain)
        step = model.plan.prediction.step()
        counted, predicted = ((dict(t.collectives), dict(t.bytes)) for t in (traffic, step))
        reductions = {p.reduce for p in model.plan.parameters.values()}
        found[preset] = worst, counted, predicted, reductions
    return found


@pytest.mark.wide
def test_traffic_is_as_predicted_and_a_scaler_changes_nothing() -> None:
    for found in run_on_ranks(_on_two_ranks, world_size=2):
        for worst, counted, predicted, _ in found.values():
            assert worst < 1e-12
            assert counted == predicted
        assert found["data_parallel"][3] == {"per_step"}
        assert found["fsdp"][3] == {"across_replicas_per_step"}, "no whole gradient is kept"
