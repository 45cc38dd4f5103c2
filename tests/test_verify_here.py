"""What verify() compares, and that it objects to what a capture drops: on a mesh of one rank, in this process."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoparallel.capture.python.recorder import Recorder
from autoparallel.operators import RandomState
from autoparallel.passes import canonicalize_operators
from autoparallel.passes.replace_random_operators import _Numbering
from autoparallel.runtime.norms.clipping import Clipper
from autoparallel.runtime.ranks.randomness import Stream
from autoparallel.tools.parity.comparison import Record, compare
from autoparallel.tools.parity.localize import localized
from autoparallel.tools.parity.noise import RUNS, noisy_records, tolerances_of
from autoparallel.tools.parity.report import VerifyReport
from autoparallel.tools.parity.task import Task, make_task
from autoparallel.tools.parity.training import observe
from autoparallel.tools.verify import make_report, run_rank, run_reference
from tests.faults import FAULTS, LINES, Net, dropping

X, Y = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 4


def check(model: nn.Module, inputs: Any = (X, Y), loss_fn: Any = F.cross_entropy, **options: Any) -> VerifyReport:
    """What ``verify()`` does for a mesh of one rank, one after the other in this process."""
    localize, tolerance = options.pop("localize", False), options.pop("tolerance", "auto")
    options = {"dtype": torch.float64, "plan": "data_parallel", **options}
    task = make_task(model, 1, inputs, loss_fn, **options)
    limits: dict[int, float] = {}
    with torch.random.fork_rng(devices=[]):
        reference = run_reference(task.copy(), limits.__setitem__)
        measures = tolerance == "auto" and task.is_open_ended
        measured = _measure(task, reference.records, limits) if measures else None
        seen, plan = run_rank(task.copy(), lambda step, _: limits[step])
        report = make_report(task, plan, [seen], reference, measured, tolerance, 0.0)
        return replace(report, deviation=localized(task, report)) if localize and not report.ok else report


def _measure(task: Task, records: Sequence[Record], limits: Mapping[int, float]) -> dict[tuple[int, str, str], float]:
    runs = [noisy_records(task, run, lambda step, _: limits[step]) for run in range(RUNS)]
    return tolerances_of(records, runs)


def names(report: VerifyReport, kind: str) -> set[str]:
    return {d.name for d in report.differences if d.kind == kind}


def line_of(function: Callable[..., Any]) -> str:
    """The line of a function that says that the fault is there."""
    lines, first = inspect.getsourcelines(function)
    return f"line {first + next(i for i, text in enumerate(lines) if '# the fault' in text)}, in {function.__name__}"


# ------------------------------------------------------------------------------------------------ what a trace drops


@pytest.mark.wide_where(lambda fault, dropout: dropout > 0 or fault not in list(FAULTS)[::4])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("fault", FAULTS)
def test_what_the_trace_drops_is_found_and_named(fault: str, dropout: float) -> None:
    torch.manual_seed(0)
    model = FAULTS[fault](dropout)
    with dropping("in the trace"):
        report = check(model, localize=True)
    assert not report.ok and report.reference == "the plain model, in eager torch"
    deviation = report.deviation
    assert deviation is not None and deviation.stage == "capture"
    assert line_of(LINES[fault]) in deviation.line, str(deviation)
    assert str(deviation) in str(report).replace("\n", " ") or deviation.operator in str(report)
    if dropout:  # nothing else is wrong
        with dropping("everywhere"):
            assert check(model).ok


def test_an_operator_that_is_rewritten_wrongly_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(emit: Any, node: Any) -> Any:
        return emit(torch.ops.aten.sigmoid.default, node.args[0])

    monkeypatch.setitem(canonicalize_operators._REWRITES, torch.ops.aten.tanh.default, wrong)
    report = check(Net(0.3), localize=True)
    deviation = report.deviation
    assert not report.ok and deviation is not None
    assert (deviation.stage, deviation.direction) == ("capture", "forward")
    assert deviation.operator == "/aten.sigmoid#0" and "in hidden: return self.drop(torch.tanh" in deviation.line


def _next_call(stream: Stream, place: Any) -> RandomState:
    return RandomState(place[0], place[1] + 1)


def _next_number(numbering: _Numbering) -> int:
    numbering.count += 1
    return numbering.count


@pytest.mark.wide
@pytest.mark.parametrize(
    ("owner", "method", "wrong"), [(Stream, "draw", _next_call), (_Numbering, "take", _next_number)]
)
def test_a_mask_that_is_off_by_one_is_found(
    owner: type, method: str, wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net(0.5)
    assert check(model).ok
    monkeypatch.setattr(owner, method, wrong)
    report = check(model, localize=True)
    assert not report.ok and report.deviation is not None
    if owner is _Numbering:  # in the graph; the call's number is not
        assert report.deviation.module == "drop" and "self.drop(" in report.deviation.line


def test_what_is_wrong_behind_the_operators_is_said_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    clip = Clipper.clip_norm

    def wrong(self: Clipper, max_norm: Any, *others: Any) -> Any:
        return clip(self, max_norm * 1.01, *others)

    monkeypatch.setattr(Clipper, "clip_norm", wrong)
    report = check(Net(0.3), localize=True)
    assert not report.ok and {d.kind for d in report.failed} == {"clipped gradient", "parameter", "output"}
    assert report.deviation is not None and report.deviation.stage == ""
    assert "the synchronisation of gradients, the clipping or the step" in str(report)


# -------------------------------------------------------------------------------------------------- what is compared


class Several(nn.Module):
    """Without a loss: a tensor, a scalar, a complex one, a parameter that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.idle = nn.Linear(6, 4), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, scale: float) -> dict[str, Tensor]:
        h = self.up(x) * scale
        return {"hidden": h}


def test_gradients_of_inputs_and_their_absence_are_compared() -> None:
    model = Several()
    report = check(model, (X.clone().requires_grad_(), 2.0), None)
    report.raise_if_failed()
    assert names(report, "input gradient") == {"0"} and names(report, "gradient") == {"up.weight", "up.bias"}
    assert any("weighted sum of all outputs" in note for note in report.notes)


def test_a_gradient_that_should_be_none_fails() -> None:
    records = _records(Several(), (X, 2.0), None)
    zeros: list[Record] = [(s, k, n, torch.zeros(2) if (k, n) == ("gradient", "idle") else x) for s, k, n, x in records]
    off = [d for d in compare(zeros, records, {}) if d.value > 0]
    assert [(d.kind, d.name, d.detail) for d in off] == [("gradient", "idle", "a value, expected None")]


def _records(model: nn.Module, inputs: Any, loss_fn: Any) -> list[Record]:
    task = make_task(model, 1, inputs, loss_fn)
    return list(observe(task.model, task, lambda *_: 1.0))


def test_steps_take_their_batches_and_the_optimizer_is_the_users() -> None:
    batches = [(X + i, Y) for i in range(3)]
    report = check(Net(0.3), batches, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.1))
    report.raise_if_failed()
    losses = {d.step: d.detail for d in report.differences if d.kind == "loss"}
    assert set(losses) == {1, 2, 3} and len(set(losses.values())) == 3
    assert check(Net(0.0), {"x": X}, None, steps=2).ok


def test_a_loss_of_a_sum_and_a_count_is_their_quotient() -> None:
    report = check(Net(0.0), loss_fn=lambda o, t: (F.cross_entropy(o, t, reduction="sum"), (t > 0).sum()))
    report.raise_if_failed()


class Counts(Net):
    """A plain attribute that a call changes."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return super().forward(x)


@pytest.mark.wide
def test_an_attribute_that_only_the_plain_model_changes_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorder, "_take", lambda *arguments: None)  # what refuses the model, or carries the value
    report = check(Counts(0.0), localize=True)
    assert {(d.kind, d.name) for d in report.failed} == {("attribute", "calls")}
    assert report.deviation is not None and "the attribute calls" in str(report.deviation)


class SkipsLayers(nn.Module):
    """LayerDrop, by Python's generator and by torch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) if random.random() < 0.5 else x
        x = self.b(x) if torch.rand([]) < 0.5 else x
        return self.c(F.dropout(x, 0.2)) * random.uniform(1, 2)


@pytest.mark.wide
def test_what_is_drawn_one_by_one_is_the_same_in_both_runs() -> None:
    report = check(SkipsLayers(), steps=4)
    assert report.ok, report


def test_hooks_of_parameters_are_copied() -> None:
    model, seen = Net(0.0), []
    model.up.weight.register_hook(lambda grad: seen.append(1))
    model.up.bias.register_post_accumulate_grad_hook(lambda p: seen.append(2))
    _records(model, (X, Y), F.cross_entropy)
    assert seen == [1, 2] or seen == [2, 1]


# ------------------------------------------------------------------------------------------------ the model's own dtype


@pytest.mark.wide
def test_a_bfloat16_model_passes_and_its_faults_do_not() -> None:
    model = FAULTS["Attribute"](0.3).to(torch.bfloat16)
    inputs = X.to(torch.bfloat16), Y
    with dropping("everywhere"):
        report = check(model, inputs, dtype=None)
    report.raise_if_failed()
    assert report.measured and report.dtype is None and "its own dtypes" in str(report)
    assert all(d.tolerance is not None and d.tolerance < 0.5 for d in report.differences)
    with dropping("in the trace"):
        report = check(model, inputs, dtype=None, localize=True)
    assert not report.ok and report.deviation is not None
    assert line_of(LINES["Attribute"]) in report.deviation.line


def test_a_tolerance_is_what_rounding_moves() -> None:
    limits = {}
    for dtype in (torch.float32, torch.bfloat16):
        task = make_task(Net(0.0).to(dtype), 1, (X.to(dtype), Y), F.cross_entropy)
        records = list(observe(task.copy().model, task, lambda *_: 1.0))
        limits[dtype] = _measure(task, records, {1: 1.0})
        assert set(limits[dtype]) == {r[:3] for r in records}
    ratios = [limits[torch.bfloat16][key] / limits[torch.float32][key] for key in limits[torch.float32]]
    assert all(2**12 < ratio < 2**20 for ratio in ratios), "as the roundings of the dtypes, whose ratio is 2 ** 16"


@pytest.mark.wide
def test_mixed_precision_is_compared_with_casts_by_hand() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    report = check(Net(0.0), dtype=None, precision=policy, plan="fsdp")
    report.raise_if_failed()
    assert report.measured and all(d.value < 1e-6 for d in report.differences), "on one rank they round alike"
    plain = check(Net(0.0), dtype=None, plan="fsdp")
    assert max(d.tolerance or 0.0 for d in plain.differences) < 1e-3 < report.tolerance
