"""The search on real graphs: exact, deterministic, and with the well-known strategies as points of its space."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoparallel.decisions.parameters import PlanError
from autoparallel.graph.captured import Captured
from autoparallel.hardware import H100, Profile
from autoparallel.placements import parse_layout
from autoparallel.plan import Plan
from autoparallel.planner.layouts import cheapest
from autoparallel.planner.request.request import Request
from autoparallel.planner.solve.factors import evaluate
from autoparallel.planner.solve.integer_program import solve
from autoparallel.planner.solve.layered import minimise
from autoparallel.planner.space.problem import Problem
from autoparallel.planner.space.space import SearchSpace
from autoparallel.planner.space.subject import Subject
from tests.captures import captured

Mesh = tuple[tuple[str, int], ...]
ONE: Mesh = (("dp", 2),)
TWO: Mesh = (("dp", 2), ("tp", 2))
FAST_LINKS = dataclasses.replace(H100, name="fast links", latency=1e-7, launch=1e-7)


class MLP(nn.Module):
    """Two linears; wide enough to be worth sharding on fast links."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


def _captured(width: int, hidden: int, rows: int) -> Captured:
    with torch.device("meta"):
        model = MLP(width, hidden)
        x = torch.empty(rows, width)
    return captured(model, x, x, loss_fn=F.mse_loss, least_batch=16)


def _problem(graph: Captured, mesh: Mesh, preset: str = "auto", profile: Profile = FAST_LINKS) -> Problem:
    return Problem(SearchSpace(Subject(graph, Request(mesh, profile, preset))))


def _kinds(plan: Plan, parameter: str) -> str:
    return "".join(p.kind for p in parse_layout(plan.parameters[parameter].at_rest))


@pytest.mark.parametrize("mesh", [ONE, TWO], ids=["one axis", "two axes"])
def test_the_minimum_is_that_of_an_integer_program(mesh: Mesh) -> None:
    problem = _problem(_captured(64, 256, 32), mesh)
    exact = minimise(problem.sizes, problem.factors)
    assert exact.cost == pytest.approx(solve(problem.sizes, problem.factors).cost, rel=1e-9)
    assert max(problem.sizes) > 3


def test_planning_twice_gives_the_same_plan() -> None:
    graph = _captured(64, 256, 32)
    plans = [cheapest(_problem(graph, TWO)).to_json() for _ in range(2)]
    assert plans[0] == plans[1]


class TestPresets:
    def test_data_parallel_keeps_parameters_whole_and_cuts_the_batch(self) -> None:
        plan = cheapest(_problem(_captured(64, 256, 32), TWO, "data_parallel"))
        assert {_kinds(plan, name) for name in plan.parameters} == {"II"}
        assert plan.operators["up/aten.linear#0"] == ("shard:...0", "shard:...0")

    def test_fsdp_cuts_every_parameter_at_rest_and_gathers_per_use(self) -> None:
        plan = cheapest(_problem(_captured(64, 256, 32), TWO, "fsdp"))
        assert {_kinds(plan, name) for name in plan.parameters} == {"SS"}
        assert {p.gather for p in plan.parameters.values()} == {"per_use"}

    def test_what_the_backward_does_not_read_is_gathered_once(self) -> None:
        with torch.device("meta"):
            model, ids = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256, bias=False)), torch.zeros(32).long()
        graph = captured(model, ids, ids, loss_fn=F.cross_entropy, least_batch=16)
        for chunks in (1, 2):  # a head whose loss goes through its rows in chunks is differentiated in the forward
            plan = cheapest(Problem(SearchSpace(Subject(graph, Request(ONE, H100, "fsdp"), loss_chunks=chunks))))
            assert plan.estimate is not None
            table, head = (plan.estimate.parameters[f"{i}.weight"] for i in (0, 1))
            assert head == table if chunks > 1 else head > table

    def test_tensor_parallel_pairs_columns_with_rows(self) -> None:
        plan = cheapest(_problem(_captured(1024, 4096, 32), (("tp", 4),), "tensor_parallel"))
        assert plan.parameters["up.weight"].at_rest == "S0"
        assert plan.parameters["down.weight"].at_rest == "S1"
        assert plan.operators["down/aten.linear#0"] == ("shard:k",)

    @pytest.mark.parametrize(("groups", "at_rest"), [(2, "S0"), (3, "I")])
    def test_tensor_parallel_leaves_groups_whole_that_do_not_divide(self, groups: int, at_rest: str) -> None:
        with torch.device("meta"):
            model, x = nn.Sequential(nn.Conv2d(24, 24, 3, groups=groups), nn.ReLU()), torch.empty(4, 24, 8, 8)
        plan = cheapest(_problem(captured(model, x), (("tp", 2),), "tensor_parallel"))
        assert plan.parameters["0.weight"].at_rest == at_rest

    def test_a_batch_that_does_not_divide_is_said(self) -> None:
        with pytest.raises(PlanError, match=r"batch of 3 rows must divide by 2"):
            cheapest(_problem(_captured(64, 256, 3), ONE, "data_parallel"))


class TestAuto:
    def test_a_small_layer_and_a_large_batch_cut_the_batch(self) -> None:
        plan = cheapest(_problem(_captured(256, 256, 65536), ONE))
        assert plan.operators["up/aten.linear#0"] == ("shard:...0",)

    def test_large_layers_and_a_small_batch_cut_the_weights(self) -> None:
        plan = cheapest(_problem(_captured(8192, 32768, 16), ONE))
        assert _kinds(plan, "up.weight") == "S"
        assert plan.operators["up/aten.linear#0"] == ("shard:n",)
        assert plan.operators["down/aten.linear#0"] == ("shard:k",)

    def test_a_memory_limit_gathers_per_use_what_would_be_kept(self) -> None:
        problem = _problem(_captured(1024, 1024, 65536), ONE)
        free = cheapest(problem)
        assert {p.gather for p in free.parameters.values()} == {"per_step"}
        choices = minimise(problem.sizes, problem.factors).choices
        usage = evaluate(problem.usage, choices)
        tight = cheapest(problem, memory_limit=usage - 1e6)
        assert "per_use" in {p.gather for p in tight.parameters.values()}

    def test_a_limit_that_nothing_fits_names_what_is_needed(self) -> None:
        with pytest.raises(PlanError, match=r"no plan fits in 1\.0 kB .* the smallest that a plan needs is [\d.]+ MB"):
            cheapest(_problem(_captured(256, 256, 64), ONE), memory_limit=1e3)
