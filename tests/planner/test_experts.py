"""Which parameters are experts, and what presets make of an axis for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoparallel.decisions.parameters import PlanError
from autoparallel.graph.captured import Captured
from autoparallel.hardware import CPU
from autoparallel.plan import Plan
from autoparallel.planner.layouts import cheapest
from autoparallel.planner.request.presets import constraints_for
from autoparallel.planner.request.request import Request
from autoparallel.planner.space.experts import find_experts
from autoparallel.planner.space.problem import Problem
from autoparallel.planner.space.space import SearchSpace
from autoparallel.planner.space.subject import Subject
from tests.passes.support import captured

EP = (("ep", 2),)


class Stack(nn.Module):
    """Rows that all go to all experts; a matrix per expert, in one of several forms, and one that is no stack."""

    def __init__(self, form: str, experts: int = 4) -> None:
        super().__init__()
        self.form = form
        self.before = nn.Linear(8, 8)
        self.w = nn.Parameter(torch.randn(experts, 8, 8))
        self.b = nn.Parameter(torch.randn(experts, 8))
        self.kernel = nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x) @ self.kernel.sum(0)
        rows = x.unsqueeze(0).expand(self.w.shape[0], *x.shape)
        if self.form == "bmm":
            return (torch.bmm(rows, self.w) + self.b.unsqueeze(1)).relu().sum(0)
        if self.form == "baddbmm":
            return torch.baddbmm(self.b.unsqueeze(1), rows, self.w.transpose(1, 2)).relu().sum(0)
        if self.form == "einsum":
            return (torch.einsum("ebi,eoi->beo", rows, self.w.to(x.dtype)) + self.b).relu().sum(1)
        return (rows @ self.w + self.b[:, None]).relu().sum(0)


def _search(graph: Captured, preset: str, mesh: tuple[tuple[str, int], ...]) -> Plan:
    return cheapest(Problem(SearchSpace(Subject(graph, Request(mesh, CPU, preset)))))


def _captured(model: nn.Module) -> Captured:
    return captured(model, torch.randn(8, 8), torch.randn(8, 8), loss_fn=F.mse_loss)


@pytest.mark.parametrize("form", ["bmm", "baddbmm", "einsum", "matmul"])
def test_a_batched_product_makes_a_parameter_a_stack_of_experts(form: str) -> None:
    graph = _captured(Stack(form))
    found = find_experts(graph.graph, graph.parameters)
    assert {graph.parameters[n.name]: dim for n, dim in found.parameters.items()} == {"w": 0, "b": 0}
    plan = _search(graph, "expert_parallel", EP)
    rest = {name: p.at_rest for name, p in plan.parameters.items()}
    assert rest == {"w": "S0", "b": "S0", "before.weight": "I", "before.bias": "I", "kernel": "I"}
    product = {"einsum": "shard:e", "matmul": "shard:...0"}.get(form, "shard:b")
    assert [modes for key, modes in plan.operators.items() if f"aten.{form}#" in key][-1] == (product,)


def test_sharded_at_rest_over_the_data_axes_too() -> None:
    plan = _search(_captured(Stack("bmm")), "fsdp", (("dp", 2), ("ep", 2)))
    first, second = plan.parameters["w"].at_rest.split(",")
    assert first.startswith("S") and second == "S0"
    assert all(part.startswith("S") for part in plan.parameters["before.weight"].at_rest.split(","))


def test_without_the_axis_experts_are_parameters_like_all_others() -> None:
    plan = _search(_captured(Stack("bmm")), "data_parallel", (("dp", 2),))
    assert {p.at_rest for p in plan.parameters.values()} == {"I"}


class TestRefusals:
    def test_no_axis(self) -> None:
        with pytest.raises(ValueError, match=r"needs a mesh axis named 'ep', the mesh has \('dp', 'tp'\)"):
            constraints_for("expert_parallel", ["dp", "tp"])

    def test_no_other_axis_for_tensors(self) -> None:
        with pytest.raises(ValueError, match="needs a mesh axis other than 'ep'"):
            constraints_for("tensor_parallel", ["ep"])
        assert constraints_for("tensor_parallel", ["dp", "ep"]).tensor == {0}

    def test_no_experts(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        with pytest.raises(PlanError, match=r"found no experts in the model.*data_parallel"):
            _search(_captured(model), "expert_parallel", EP)
        plan = _search(_captured(model), "data_parallel", EP)
        assert {p.at_rest for p in plan.parameters.values()} == {"I"}

    def test_experts_that_do_not_divide(self) -> None:
        with pytest.raises(PlanError, match="w stacks 3 experts, which do not divide by the 2 ranks"):
            _search(_captured(Stack("bmm", experts=3)), "expert_parallel", EP)


def test_modes_of_the_exchange_are_written_and_read_in_plans(tmp_path: Any) -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return torch.bmm(x.unsqueeze(1), self.w[x.argmax(-1) // 2]).squeeze(1)

    class Best(Rows):
        def forward(self, x: Tensor) -> Tensor:
            return torch.bmm(x.unsqueeze(1), self.w[x[:, :4].argmax(-1)]).squeeze(1)

    plan = _search(_captured(Best()), "expert_parallel", EP)
    (modes,) = [m for key, m in plan.operators.items() if "grouped_linear" in key]
    assert modes == ("shard:s@e",)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").operators == plan.operators
    with pytest.raises(PlanError, match="found no experts"):
        _search(_captured(Rows()), "expert_parallel", EP)
