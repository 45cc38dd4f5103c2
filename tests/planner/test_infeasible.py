"""What is said where nothing can be planned: the true cause, where it shows, and what to change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoparallel.decisions.parameters import PlanError
from autoparallel.hardware import CPU
from autoparallel.planner.draft import call_of
from autoparallel.planner.layouts import cheapest
from autoparallel.planner.planner import Planner
from autoparallel.planner.request.request import Request
from autoparallel.planner.space.permits import Permits
from autoparallel.planner.space.problem import Problem
from autoparallel.planner.space.space import SearchSpace
from autoparallel.planner.space.subject import Subject
from tests.captures import draft


class Scaled(torch.autograd.Function):
    """A product whose backward is the user's: it reads its operands whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad @ w.t(), 3 * x.t() @ grad


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.w = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return Scaled.apply(self.a(x), self.w).square().mean()  # type: ignore[no-any-return]


def _space(rows: int, ranks: int, preset: str) -> SearchSpace:
    request = Request((("dp", ranks),), CPU, preset)
    captured = Planner(Model(), request).capture(call_of((torch.randn(rows, 8),)))
    return SearchSpace(Subject(captured, request))


def test_a_function_reads_a_parameter_whole_where_a_preset_cuts_the_batch() -> None:
    for preset in ("data_parallel", "fsdp"):
        plan = draft(Model(), call_of((torch.randn(4, 8),)), Request((("dp", 2),), CPU, preset)).plan
        assert [modes for key, modes in plan.operators.items() if "Scaled" in key] == [("I",)]
        assert plan.operators["a/aten.linear#0"] == ("shard:...0",)


def test_an_operator_that_goes_with_nothing_beside_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Permits, "_is_read_whole", lambda *_: False)
    message = r"on the mesh \(dp=2\): it leaves /tests.Scaled#0 \(.*Scaled.apply.*\) to run as I, .*use plan='auto'"
    with pytest.raises(PlanError, match=message) as error:
        cheapest(Problem(_space(4, 2, "data_parallel")))
    assert "batch" not in str(error.value)


def test_an_operator_without_a_way_is_named_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Permits, "allows", lambda *_: False)
    message = r"none of the ways to run a/aten.linear#0 \(.*line \d+.*\): I or R .*plan='auto'"
    with pytest.raises(PlanError, match=message):
        _space(4, 1, "data_parallel")


def test_the_batch_is_blamed_where_it_is_the_cause() -> None:
    with pytest.raises(PlanError, match=r"at a/aten.linear#0: a batch of 3 rows must divide by 2"):
        cheapest(Problem(_space(3, 2, "data_parallel")))
    assert "batch" not in _space(3, 1, "data_parallel").conflict(None)
