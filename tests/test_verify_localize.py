"""The first node at which the ranks part from the captured graph: faults in rules and redistributions, by name.

The ranks are threads of this process, as everywhere in ``localize_program``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from autoparallel.comm import collectives
from autoparallel.graph.captured import Captured
from autoparallel.operators import RandomState
from autoparallel.plan import Plan
from autoparallel.program import passes
from autoparallel.rules.core import Rule
from autoparallel.rules.localize import LocalCall
from autoparallel.rules.table import RULES
from autoparallel.tools.parity.localize_program import call_of_task, planner_of, program_deviation
from autoparallel.tools.parity.report import Deviation
from autoparallel.tools.parity.task import Task, make_task
from tests.models import GPT, GPTConfig, ragged_tokens, token_loss

aten = torch.ops.aten
MODEL = GPT(GPTConfig(dropout=0.1, layers=1))
TOKENS = ragged_tokens(torch.Generator().manual_seed(0), 8, 16, 64)


def deviation(plan: str, mesh: tuple[int, ...]) -> Deviation | None:
    """Of a GPT with dropout."""
    task = make_task(MODEL, mesh, TOKENS, token_loss, plan=plan, dtype=torch.float64)
    captured, searched = _plan(task, plan)
    return program_deviation(task, captured, searched, task.batch(1), RandomState(3, 1), 1e-9)


def _plan(task: Task, plan: str) -> tuple[Captured, Plan]:
    """What is captured for a task, and the plan that is searched for it."""
    planner, call = planner_of(task, plan), call_of_task(task, task.batch(1))
    captured = planner.capture(call)
    return captured, planner.search(captured, call)


@pytest.mark.wide
@pytest.mark.parametrize("plan", ["tensor_parallel", "fsdp"])
def test_right_programs_have_no_deviation(plan: str) -> None:
    assert deviation(plan, (2, 2)) is None


class Scale(nn.Module):
    """A product with a parameter of three rows in its last dim."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def test_a_parameter_that_is_gathered_in_place_has_even_shards_on_the_way() -> None:
    """From S0,S0 to S1,S0 the cheapest way leads through an uneven S2, which nothing in the body can make."""
    x, target = torch.randn(8, 4, 3), torch.randn(8, 4, 3)
    task = make_task(Scale(), (2, 2), (x, target), torch.nn.functional.mse_loss, dtype=torch.float64)
    captured, plan = _plan(task, "auto")
    operators = {**plan.operators, "/aten.mul.Tensor#0": ("shard:...1", "shard:...0")}
    plan = replace(
        plan, operators=operators, parameters={"weight": replace(plan.parameters["weight"], at_rest="S0,S0")}
    )
    assert program_deviation(task, captured, plan, task.batch(1), RandomState(0, 0), 1e-9) is None


class KernelPerRow(nn.Module):
    """A convolution that has as many groups as the batch has rows."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.bias = nn.Linear(4, 12), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        kernel, bias = self.kernel(x[:, 0]).view(-1, 4, 1), self.bias(x[:, 0]).flatten()
        return torch.conv1d(x.mT.reshape(1, -1, 4), kernel, bias, groups=len(x)).view(len(x), 3, 4)


def test_groups_that_are_the_rows_of_the_batch_are_cut_with_them() -> None:
    x, target = torch.randn(8, 4, 4), torch.randn(8, 3, 4)
    task = make_task(KernelPerRow(), (2, 2), (x, target), torch.nn.functional.mse_loss, dtype=torch.float64)
    captured, plan = _plan(task, "fsdp")
    assert plan.operators["/aten.conv1d#0"] == ("shard:g", "shard:g")
    assert program_deviation(task, captured, plan, task.batch(1), RandomState(0, 0), 1e-9) is None


def test_a_vocabulary_that_does_not_divide_is_padded() -> None:
    model = nn.Sequential(nn.Embedding(99, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 99))
    ids, target = torch.randint(0, 99, (2, 8)), torch.randint(0, 99, (8,))
    task = make_task(model, (2, 2), (ids[0], target), torch.nn.functional.cross_entropy, dtype=torch.float64)
    captured, plan = _plan(task, "tensor_parallel")
    assert any("pad_rows" in key and "shard:...0" in modes for key, modes in plan.operators.items())
    assert program_deviation(task, captured, plan, task.batch(1), RandomState(0, 0), 1e-9) is None


@pytest.fixture
def unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs whose operators are wrong are run: the verifier, which refuses them, is off."""
    monkeypatch.setattr(passes, "verify_placements", lambda *_, **__: None)


@pytest.mark.wide
@pytest.mark.usefixtures("unverified")
def test_a_local_call_that_is_off_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rule_of = RULES[aten.linear.default]

    def doubled(call: LocalCall) -> None:
        if call.node.meta["key"].startswith("blocks.0.attention.v/"):
            with call.graph.inserting_before(call.node):
                x = call.graph.call_function(aten.mul.Tensor, (call.args[0], 2.0))
            call.args = (x, *call.args[1:])

    def wrong(node: fx.Node) -> Rule:
        rule = rule_of(node)
        assert rule is not None
        return replace(rule, localize=doubled)

    monkeypatch.setitem(RULES, aten.linear.default, wrong)
    found = deviation("tensor_parallel", (2, 2))
    assert found is not None and (found.stage, found.direction) == ("program", "forward")
    assert found.operator == "blocks.0.attention.v/aten.linear#0" and found.module == "blocks.0.attention.v"
    assert "gpt.py" in found.line and "shard:n" in found.rule and found.layouts.endswith("-> S0,S2")


@pytest.mark.wide
def test_an_argument_that_is_off_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rule_of = RULES[aten.layer_norm.default]

    def scaled(call: LocalCall) -> None:
        call.args = (*call.args[:4], 0.1) if len(call.args) > 4 else call.args
        call.kwargs = {**call.kwargs, "eps": 0.1} if len(call.args) <= 4 else call.kwargs

    monkeypatch.setitem(RULES, aten.layer_norm.default, lambda node: replace(rule_of(node), localize=scaled))
    found = deviation("data_parallel", (2,))
    assert found is not None and found.operator == "blocks.0.norm1/aten.layer_norm#0" and "shard:" in found.rule


def test_a_gradient_that_is_not_reduced_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(collectives.DUALS, "R")  # the gradient of what is replicated is no sum
    found = deviation("tensor_parallel", (2,))
    assert found is not None and (found.stage, found.direction) == ("program", "backward")
    assert found.operator.startswith("the redistribution ") and " I to R over " in found.operator
    assert "gpt.py" in found.line


@pytest.mark.wide
def test_a_sum_that_is_not_reduced_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    apply = collectives.apply

    def wrong(x: Tensor, src: str, dst: str, group: str) -> Tensor:
        return x.view_as(x) if (src, dst) == ("P", "I") and x.ndim == 3 else apply(x, src, dst, group)

    monkeypatch.setattr(collectives, "apply", wrong)
    found = deviation("tensor_parallel", (2,))
    assert found is not None and (found.stage, found.direction) == ("program", "forward")
    assert found.operator.startswith("the redistribution ") and " P to I over " in found.operator


class Backward(torch.autograd.Function):
    """The identity with a gradient that is off by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * 1.5


def skewed(x: Tensor) -> Tensor:
    return Backward.apply(x)


@pytest.mark.usefixtures("unverified")
def test_a_local_backward_that_is_off_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rule_of = RULES[aten.linear.default]

    def wrong(call: LocalCall) -> None:
        if call.node.meta["key"].startswith("blocks.0.attention.k/"):
            with call.graph.inserting_before(call.node):
                x = call.graph.call_function(skewed, (call.args[0],))
            call.args = (x, *call.args[1:])

    monkeypatch.setitem(RULES, aten.linear.default, lambda node: replace(rule_of(node), localize=wrong))
    found = deviation("tensor_parallel", (2,))
    assert found is not None and (found.stage, found.direction) == ("program", "backward")
    # q, k and v read the same tensor: which of them gives back a wrong gradient cannot be told from their sum.
    assert "blocks.0.attention.k/aten.linear#0" in f"{found.operator} {found.detail}"
