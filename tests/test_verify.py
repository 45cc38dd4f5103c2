"""verify(): it passes where a plan is right, names what is wrong where it is not, and leaves no process behind.

What it compares, and that it objects to what a capture drops, is tested without processes in ``test_verify_here.py``.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoparallel
from autoparallel.comm.world import axes_of
from autoparallel.tools import processes
from autoparallel.tools.parity.comparison import difference
from autoparallel.tools.parity.report import Difference
from autoparallel.tools.processes import Place, Process, ProcessError, run_processes
from tests.models import GPT, GPTConfig, ragged_tokens, token_loss

needs_fork = pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="lambdas need fork")


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    before = set(multiprocessing.active_children())
    yield
    assert not [p for p in multiprocessing.active_children() if p not in before]


def kinds(report: autoparallel.VerifyReport) -> set[str]:
    return {d.kind for d in report.differences}


# ------------------------------------------------------------------------------------------------- plans that are right


@dataclass
class Pair:
    x: Tensor
    loss: Tensor


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, batch: Pair) -> Pair:
        h = self.down(self.up(batch.x).tanh())
        return Pair(h, F.mse_loss(h, batch.loss))


def loss_of(output: Pair, target: SimpleNamespace) -> Tensor:
    return F.mse_loss(output.x, target.y)


def test_objects_are_cast_and_compared_by_the_names_of_what_they_hold() -> None:
    report = autoparallel.verify(Halves(), 2, Pair(torch.randn(8, 6), torch.randn(8, 4)))
    assert report.ok, str(report)
    assert {d.name for d in report.differences if d.kind in ("loss", "output")} == {"x", "loss"}


@pytest.mark.wide
def test_the_stages_of_a_pipeline_tell_of_their_own_parameters() -> None:
    inputs = Pair(torch.randn(8, 6), torch.randn(8, 4)), SimpleNamespace(y=torch.randn(8, 4))
    report = autoparallel.verify(Halves(), {"pp": 2}, inputs, loss_of)
    assert report.ok, str(report)
    assert {*report.layouts} == {"up.weight", "up.bias", "down.weight", "down.bias"}


@pytest.mark.wide
@needs_fork
def test_unpicklable_model_and_loss_are_verified_and_left_alone() -> None:
    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)
            self.act = lambda x: x.tanh()

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.act(self.up(x)))

    model = Local()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    inputs = torch.randn(8, 6), torch.randint(0, 4, (8,))
    report = autoparallel.verify(model, {"dp": 2}, inputs, lambda o, t: F.cross_entropy(o, t), plan="fsdp")
    assert report.raise_if_failed() is report
    assert report.ok and report.tolerance == 1e-9 and report.worst.value < 1e-12 and report.mesh == (("dp", 2),)
    assert kinds(report) == {"loss", "output", "gradient", "norm", "clipped gradient", "parameter", "replicas"}
    assert {d.name for d in report.differences if d.kind == "gradient"} == set(before)
    assert set(report.sharded_parameters) == set(before) and report.sharded_operators
    for name, parameter in model.named_parameters():
        assert type(parameter) is nn.Parameter and parameter.dtype == torch.float32 and parameter.grad is None
        assert torch.equal(parameter, before[name])
    text = str(report)
    assert "Local on the mesh (dp=2), plan fsdp, float64" in text and "PASSED" in text and "\x1b" not in text
    assert text == repr(report)


class Grows:
    """A loss whose weight grows from call to call."""

    weight = 1.0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.weight *= 2.0
        return self.weight * F.cross_entropy(output, target)


@pytest.mark.wide
@needs_fork
def test_a_tolerance_is_measured_where_the_reference_began() -> None:
    """What the loss has counted in one run is not where the next one begins."""
    loss_fn = Grows()
    inputs = torch.randn(8, 6), torch.randint(0, 4, (8,))
    report = autoparallel.verify(nn.Linear(6, 4), 1, inputs, loss_fn, plan="fsdp", dtype=None, steps=2)
    assert report.raise_if_failed() is report and report.measured
    assert max(d.tolerance or 0.0 for d in report.differences) < 1e-4 and loss_fn.weight == 1.0


@pytest.mark.wide
@needs_fork
def test_a_module_that_the_model_hides_is_cast_with_it() -> None:
    teacher = nn.Linear(6, 6).requires_grad_(False)

    class Student(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 6)
            self.teachers = [teacher]

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) - self.teachers[0](x)

    autoparallel.verify(Student(), 1, torch.randn(4, 6), plan="fsdp").raise_if_failed()
    assert teacher.weight.dtype == torch.float32

    class Around(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) - teacher(x)

    with pytest.raises(ProcessError, match="What to change: pass dtype=None"):
        autoparallel.verify(Around(6, 6), 1, torch.randn(4, 6), plan="fsdp")


@pytest.mark.slow
@needs_fork
@pytest.mark.parametrize("dtype", [torch.float64, None], ids=["float64", "bfloat16"])
def test_gpt_with_dropout_is_compared_with_eager(dtype: torch.dtype | None) -> None:
    model = GPT(GPTConfig(dropout=0.1, layers=1)).to(torch.bfloat16)
    inputs = ragged_tokens(torch.Generator().manual_seed(0), 4, 16, 64)
    report = autoparallel.verify(
        model, (2, 2), inputs, lambda o, t: token_loss(o, t), plan="tensor_parallel", dtype=dtype
    )
    report.raise_if_failed()
    assert report.mesh == (("dp", 2), ("tp", 2)) and report.measured == (dtype is None)
    assert report.reference == "the plain model, in eager torch"
    assert report.sharded_operators and "tok.weight" in report.sharded_parameters


class OwnLoss(nn.Module):
    """As models of transformers do: computes its loss itself, in float32, and returns a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.down(self.norm(self.up(x)).relu())
        return {"loss": F.cross_entropy(logits.float(), labels), "logits": logits}


@pytest.mark.wide
def test_own_loss_buffers_and_casts() -> None:
    inputs = {"x": torch.randn(8, 6), "labels": torch.randint(0, 4, (8,))}
    report = autoparallel.verify(OwnLoss(), 2, inputs, plan="data_parallel", steps=2)
    report.raise_if_failed()
    assert report.tolerance == 1e-6 and "float32" in report.casts[0]
    assert {d.name for d in report.differences if d.kind == "loss"} == {"loss"}
    assert {d.name for d in report.differences if d.kind == "output"} == {"logits"}
    buffers = {d.name for d in report.differences if d.kind == "buffer"}
    assert buffers == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert {d.step for d in report.differences if d.kind == "gradient"} == {1, 2}
    assert "casts to a narrower dtype" in str(report)


def test_without_a_loss_outputs_are_weighted() -> None:
    report = autoparallel.verify(nn.Linear(6, 4), 1, torch.randn(8, 6))
    report.raise_if_failed()
    assert any("no scalar loss" in note for note in report.notes)
    assert {d.name for d in report.differences if d.kind == "gradient"} == {"weight", "bias"}


# ------------------------------------------------------------------------------------------------- plans that are wrong


@torch.library.custom_op("autoparallel_test_verify::centre", mutates_args=())
def centre(x: Tensor, w: Tensor) -> Tensor:
    return (x - x.mean(0)) * w


@centre.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return torch.empty_like(x)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, w = ctx.saved_tensors
    return (grad - grad.mean(0)) * w, (grad * (x - x.mean(0))).sum(0)


centre.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale = nn.Linear(6, 8), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return centre(self.up(x).tanh(), self.scale)


@needs_fork
def test_false_rule_is_found_and_named() -> None:
    # The operator subtracts the mean over the whole batch; the rule says that rows do not depend on one another.
    autoparallel.register_rule("autoparallel_test_verify::centre", "b f, f -> b f")
    inputs = torch.randn(8, 6), torch.randn(8, 8)
    report = autoparallel.verify(Centred(), 2, inputs, F.mse_loss, plan="data_parallel", localize=True)
    assert not report.ok
    wrong = {(d.kind, d.name) for d in report.failed}
    assert ("gradient", "scale") in wrong and ("loss", "") in wrong and ("norm", "") in wrong
    assert not [d for d in report.failed if d.kind == "replicas"]
    with pytest.raises(autoparallel.VerifyError, match="FAILED") as caught:
        report.raise_if_failed()
    assert "gradient scale" in str(caught.value)
    deviation = report.deviation
    assert deviation is not None and (deviation.stage, deviation.direction) == ("program", "forward")
    assert (
        deviation.operator == "/autoparallel_test_verify.centre#0"
        and deviation.rule == "b f, f -> b f, runs as shard:b"
    )
    assert "return centre(self.up(x).tanh(), self.scale)" in deviation.line and deviation.layouts == "S0, R -> S0"
    assert deviation.operator in str(report)
    values = [d.value for d in report.differences]
    assert values == sorted(values, reverse=True)


def test_difference_is_relative_for_large_and_absolute_for_small_values() -> None:
    assert difference(torch.tensor([100.0, 1.0]), torch.tensor([100.0, 2.0])) == pytest.approx(0.01)
    assert difference(torch.tensor([0.01]), torch.tensor([0.02])) == pytest.approx(0.01)
    nan, inf = torch.tensor([math.nan, 1.0]), torch.tensor([math.inf, 1.0])
    assert difference(nan, nan) == 0 and difference(inf, inf) == 0
    assert difference(nan, torch.ones(2)) == math.inf and difference(torch.ones(2), nan) == math.inf
    assert difference(torch.ones(2), inf) == math.inf and difference(-inf, inf) == math.inf
    assert difference(torch.ones(2), torch.ones(3)) == math.inf
    assert difference(torch.ones(2), torch.ones(2).double()) == math.inf
    assert difference(torch.tensor([True]), torch.tensor([False])) == 1
    assert difference(torch.empty(0), torch.empty(0)) == 0


def test_a_nan_difference_fails() -> None:
    plan = autoparallel.Plan((("dp", 2),), "auto", "", {}, {"/a#0": ("R",)}, {})
    found = (Difference("norm", "", math.nan), Difference("loss", "", 0.0))
    report = autoparallel.VerifyReport(
        "M", (("dp", 2),), plan, torch.float64, 1e-9, found, "x", {"w": ("R",)}, (), (), 1.0
    )
    assert report.failed == found[:1] and not report.ok
    assert "nothing is sharded" in str(report)


# --------------------------------------------------------------------------------------------------------- arguments


def test_meshes() -> None:
    assert axes_of(2) == (("dp", 2),)
    assert axes_of((2, 3, 1)) == (("pod", 2), ("dp", 3), ("tp", 1))
    assert axes_of({"a": 2}) == (("a", 2),)
    for bad in ((), (1, 1, 1, 1), {"dp": 0}, -1):
        with pytest.raises(ValueError, match="one to three axes"):
            axes_of(bad)


def test_bad_arguments_start_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Linear(2, 2), torch.randn(4, 2)
    for message, arguments, options in [
        ("unknown plan", (model, 2, x), {"plan": "best"}),
        ("float64 or torch.float32, or None", (model, 2, x), {"dtype": torch.bfloat16}),
        ("at least 1", (model, 2, x), {"steps": 0}),
        ("or 'auto'", (model, 2, x), {"tolerance": "small"}),
        ("meta device", (nn.Linear(2, 2, device="meta"), 2, x), {}),
        ("not an nn.Module", (F.relu, 2, x), {}),
        ("target", (model, 2, (), F.mse_loss), {}),
    ]:
        with pytest.raises(ValueError, match=message):
            autoparallel.verify(*arguments, **options)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)  # whatever ran in this process before
    with pytest.raises(RuntimeError, match=r"starts its own processes.*one of 2 already"):
        autoparallel.verify(model, 2, x)


# --------------------------------------------------------------------------------------------------------- processes


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) @ torch.ones(3, 3, dtype=x.dtype)


def test_a_model_that_fails_by_itself_is_told_so() -> None:
    with pytest.raises(ProcessError, match="the plain model fails by itself") as caught:
        autoparallel.verify(Fails(), 2, torch.randn(4, 2))
    assert "torch.ones(3, 3" in str(caught.value), "the traceback shows the model's line"


def _do(process: Process, task: str) -> Any:
    if task == "raise" and process.rank == 1:
        raise ValueError("boom")
    if task.startswith("SIG") and process.rank == 1:
        os.kill(os.getpid(), getattr(signal, task))
    if task == "hang" and process.rank == 1:
        time.sleep(600)
    total = torch.ones(2)
    torch.distributed.all_reduce(total)
    return total.tolist()


PAIR = [Place("rank 0", "g", 0, 2), Place("rank 1", "g", 1, 2)]


def test_processes_talk() -> None:
    assert run_processes(PAIR, _do, "work", timeout=120) == [[2.0, 2.0]] * 2


def test_the_process_that_raises_is_blamed() -> None:
    with pytest.raises(ProcessError, match="rank 1 failed: ValueError: boom") as caught:
        run_processes(PAIR, _do, "raise", timeout=120)
    assert caught.value.failures[0].label == "rank 1" and 'raise ValueError("boom")' in str(caught.value)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs signals")
@pytest.mark.parametrize("death", ["SIGKILL", "SIGSEGV"])
def test_a_process_that_dies_is_noticed(death: str) -> None:
    started = time.monotonic()
    with pytest.raises(ProcessError, match=f"rank 1 failed: Died: .*{death}") as caught:
        run_processes(PAIR, _do, death, timeout=200)
    assert time.monotonic() - started < 150
    assert ("in _do" in str(caught.value)) == (death == "SIGSEGV"), "a fault leaves the place where it happened"


@pytest.mark.wide
def test_a_process_that_hangs_is_stopped_and_shown() -> None:
    with pytest.raises(ProcessError, match="no answer within 8 s") as caught:
        run_processes(PAIR, _do, "hang", timeout=8)
    assert "rank 1:" in str(caught.value) and "in _do" in str(caught.value)


@pytest.mark.wide
def test_spawning_needs_what_can_be_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_start_method", lambda: "spawn")
    with pytest.raises(RuntimeError, match="must be picklable"):
        run_processes(PAIR[:1], _do, lambda: None, timeout=60)
    single = [Place("rank 0", "g", 0, 1)]
    assert run_processes(single, _do, "work", timeout=120) == [[1.0, 1.0]]
