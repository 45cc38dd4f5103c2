"""Plans as files: there and back, fingerprints that stay, and refusals that say what is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from autoparallel.decisions.parameters import ParameterPlan, PlanError
from autoparallel.graph.captured import Captured
from autoparallel.graph.fingerprint import fingerprint
from autoparallel.hardware import profile_for
from autoparallel.plan import Plan
from autoparallel.planner.fits import require_fits
from autoparallel.planner.layouts import cheapest
from autoparallel.planner.request.request import Request
from autoparallel.planner.space.problem import Problem
from autoparallel.planner.space.space import SearchSpace
from autoparallel.planner.space.subject import Subject
from tests.captures import captured
from tests.models import MLP, build

MESH = (("dp", 2), ("tp", 2))


def planned(graph: Captured, mesh: tuple[tuple[str, int], ...] = MESH, preset: str = "fsdp") -> Plan:
    return cheapest(Problem(SearchSpace(Subject(graph, Request(mesh, profile_for("cpu"), preset)))))


@pytest.fixture(scope="module")
def graph() -> Captured:
    case = build("mlp")
    return captured(case.model, *case.make_batch(0, 8)[0], loss_fn=case.loss_fn)


@pytest.fixture(scope="module")
def plan(graph: Captured) -> Plan:
    return planned(graph)


class TestFiles:
    def test_there_and_back(self, plan: Plan) -> None:
        again = Plan.from_json(plan.to_json())
        assert (again.mesh, again.origin, again.fingerprint) == (plan.mesh, plan.origin, plan.fingerprint)
        assert again.operators == dict(plan.operators) and again.parameters == dict(plan.parameters)
        assert again.shared == dict(plan.shared) and again.unruled == dict(plan.unruled)
        assert again.to_json() == plan.to_json(), "and it is the same text"

    def test_as_a_file(self, plan: Plan, tmp_path) -> None:
        plan.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json").to_json() == plan.to_json()

    def test_it_is_readable(self, plan: Plan) -> None:
        data = json.loads(plan.to_json())
        assert data["mesh"] == [["dp", 2], ["tp", 2]] and data["origin"] == "fsdp"
        assert data["parameters"]["up.weight"]["at_rest"].count(",") == 1
        assert any(key.startswith("up/aten.linear#") for key in data["operators"])
        assert len(plan.to_json().splitlines()) > 20, "one decision a line, for reviews"

    def test_it_fits_the_graph_that_it_was_made_for(self, plan: Plan, graph: Captured) -> None:
        require_fits(Plan.from_json(plan.to_json()), graph, MESH)

    @pytest.mark.parametrize("preset", ["auto", "data_parallel", "tensor_parallel"])
    def test_every_plan_fits_its_own_graph(self, preset: str, graph: Captured) -> None:
        require_fits(planned(graph, preset=preset), graph, MESH)

    @pytest.mark.wide
    @pytest.mark.parametrize("name", ["gpt", "resnet"])
    def test_plans_of_larger_models_fit(self, name: str) -> None:
        case = build(name)
        large = captured(case.model, *case.make_batch(0, 8)[0], loss_fn=case.loss_fn)
        for mesh in ((("dp", 2),), (("tp", 2),)):
            require_fits(Plan.from_json(planned(large, mesh, "auto").to_json()), large, mesh)


class TestMalformed:
    @pytest.mark.parametrize(
        "text", ["", "{", "[]", "3", "null", "{}", '{"format": 1}', '"plan"'], ids=lambda text: text or "nothing"
    )
    def test_what_is_no_plan(self, text: str) -> None:
        with pytest.raises(PlanError, match="not a plan"):
            Plan.from_json(text)

    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("format", 99, "format 99, this version reads 1"),
            ("mesh", 3, "not a plan"),
            ("mesh", [["dp"]], "not a plan"),
            ("mesh", [["dp", "two"]], "not a plan"),
            ("parameters", [], "not a plan"),
            ("parameters", {"w": "S0"}, "not a plan"),
            ("parameters", {"w": {"at_rest": "S0"}}, "w cannot lie as 'S0' at rest.* 2 mesh axes"),
            ("parameters", {"w": {"at_rest": "S0,P"}}, "w cannot lie as 'S0,P' at rest: expected I or S<dim>"),
            ("parameters", {"w": {"at_rest": "S0,R"}}, "w cannot lie as 'S0,R' at rest"),
            ("parameters", {"w": {"at_rest": "S0,X"}}, "not a placement: 'X'"),
            ("parameters", {"w": {"at_rest": "S0,S-1"}}, "not a placement"),
            ("parameters", {"w": {"at_rest": "I,I", "gather": "x"}}, "w cannot be gathered 'x': expected one of"),
            ("parameters", {"w": {"at_rest": "I,I", "when": 3}}, "not a plan"),
            ("operators", {"a/b#0": ["Q", "I"]}, "not a way to run an operator: 'Q'"),
            ("operators", {"a/b#0": 3}, "not a plan"),
            ("shared", {"a/b#0": "Z"}, "not a placement"),
        ],
    )  # fmt: skip
    def test_a_field_that_is_wrong(self, plan: Plan, field: str, value: Any, message: str) -> None:
        data = {**json.loads(plan.to_json()), field: value}
        with pytest.raises(PlanError, match=message):
            Plan.from_json(json.dumps(data))

    @pytest.mark.parametrize("field", ["format", "mesh", "origin", "fingerprint", "operators", "parameters", "shared"])
    def test_a_field_that_is_missing(self, plan: Plan, field: str) -> None:
        data = json.loads(plan.to_json())
        del data[field]
        with pytest.raises(PlanError, match=f"not a plan.*{field}"):
            Plan.from_json(json.dumps(data))


class TestFitting:
    def edited(self, plan: Plan, **changes: Any) -> Plan:
        return Plan.from_json(json.dumps({**json.loads(plan.to_json()), **changes}))

    @pytest.mark.parametrize(
        "mesh", [(("dp", 2),), (("dp", 4), ("tp", 2)), (("tp", 2), ("dp", 2)), (("data", 2), ("tp", 2))], ids=str
    )
    def test_another_mesh(self, plan: Plan, graph: Captured, mesh: tuple[tuple[str, int], ...]) -> None:
        with pytest.raises(PlanError, match=r"for the mesh \(dp=2, tp=2\), not for \(.*plan again"):
            require_fits(plan, graph, mesh)

    def test_another_model(self, plan: Plan) -> None:
        other = captured(nn.Linear(12, 8), torch.rand(8, 12))
        with pytest.raises(PlanError, match=r"the plan is for another model.*the plan has .*plan again"):
            require_fits(plan, other, MESH)

    def test_the_same_operators_in_other_sizes(self, plan: Plan) -> None:
        case = build("mlp")
        args = case.make_batch(0, 8)[0]
        other = captured(MLP(hidden=24).double(), *args, loss_fn=case.loss_fn)
        with pytest.raises(PlanError, match="shapes differ"):
            require_fits(plan, other, MESH)

    def test_a_layer_that_does_not_divide(self, plan: Plan, graph: Captured) -> None:
        parameters = json.loads(plan.to_json())["parameters"]
        parameters["up.bias"]["at_rest"] = "S1,I"
        with pytest.raises(PlanError, match=r"up\.bias: a tensor of shape \[16\] cannot lie as S1,I on \(dp=2, tp=2\)"):
            require_fits(self.edited(plan, parameters=parameters), graph, MESH)

    def test_parameters_must_be_those_of_the_model(self, plan: Plan, graph: Captured) -> None:
        parameters = json.loads(plan.to_json())["parameters"]
        more = self.edited(plan, parameters={**parameters, "upp.bias": parameters["up.bias"]})
        with pytest.raises(PlanError, match=r"has upp\.bias, which the model does not use"):
            require_fits(more, graph, MESH)
        del parameters["up.bias"]
        with pytest.raises(PlanError, match=r"has no parameter up\.bias"):
            require_fits(self.edited(plan, parameters=parameters), graph, MESH)

    def test_operators_must_be_able(self, plan: Plan, graph: Captured) -> None:
        operators = json.loads(plan.to_json())["operators"]
        key = next(k for k in operators if k.startswith("up/aten.linear"))
        cannot = self.edited(plan, operators={**operators, key: ["shard:zz", "I"]})
        with pytest.raises(PlanError, match=rf"{key} cannot run as shard:zz; it can run as I, R, .*shard:n"):
            require_fits(cannot, graph, MESH)
        one = self.edited(plan, operators={**operators, key: ["I"]})
        with pytest.raises(PlanError, match=rf"for 1 mesh axes how {key} runs, the mesh has 2"):
            require_fits(one, graph, MESH)


class TestFingerprints:
    def of(self, model: nn.Module, *args: Any, **options: Any) -> str:
        return fingerprint(captured(model, *args, **options))

    def test_they_follow_from_the_model_alone(self) -> None:
        case = build("gpt")
        args = case.make_batch(0, 8)[0]
        first = self.of(case.model, *args, loss_fn=case.loss_fn)
        second = self.of(build("gpt", seed=5).model, *case.make_batch(3, 24)[0], loss_fn=case.loss_fn)
        assert first == second, "other weights, other data and another batch size are the same graph"

    def test_names_that_passes_have_used_up_do_not_count(self) -> None:
        whole = captured(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.GELU()), torch.rand(8, 4))
        graph, before = whole.graph, fingerprint(whole)
        call = next(node for node in graph.nodes if node.op == "call_function")
        with graph.inserting_before(call):
            again = graph.call_function(call.target, call.args, call.kwargs)
        again.meta = dict(call.meta)
        call.replace_all_uses_with(again)
        graph.erase_node(call)
        assert again.name != call.name and fingerprint(whole) == before

    @pytest.mark.slow
    def test_they_are_the_same_in_another_process(self, tmp_path) -> None:
        """Hashes of strings differ from process to process; a fingerprint must not."""
        import os
        import subprocess
        import sys

        code = (
            "import torch; from torch import nn; from autoparallel.graph.fingerprint import fingerprint\n"
            "from tests.test_plan import captured\n"
            "print(fingerprint(captured(nn.Sequential(nn.Linear(4, 4), nn.GELU()), torch.rand(8, 4))))"
        )
        mine = self.of(nn.Sequential(nn.Linear(4, 4), nn.GELU()), torch.rand(8, 4))
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
            env={**os.environ, "PYTHONHASHSEED": "77"},
        )  # fmt: skip
        assert done.stdout.strip() == mine, done.stderr

    @pytest.mark.parametrize(
        "other",
        [
            nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
            nn.Sequential(nn.Linear(4, 4, bias=False), nn.GELU()),
            nn.Sequential(nn.Linear(4, 6), nn.GELU()),
            nn.Sequential(nn.GELU(), nn.Linear(4, 4)),
            nn.Sequential(nn.Linear(4, 4), nn.GELU()).double(),
            nn.Sequential(nn.Linear(4, 4), nn.GELU()).requires_grad_(False),
        ],
        ids=["operator", "bias", "shape", "order", "dtype", "frozen"],
    )
    def test_they_tell_graphs_apart(self, other: nn.Module) -> None:
        x = torch.rand(8, 4)
        first = self.of(nn.Sequential(nn.Linear(4, 4), nn.GELU()), x)
        dtype = next(other.parameters()).dtype
        assert self.of(other, x.to(dtype)) != first


def test_a_parameter_plan_says_what_it_cannot_be() -> None:
    ParameterPlan("S0,I").require_valid("w", 2)
    with pytest.raises(PlanError, match="w cannot lie as 'S0'"):
        ParameterPlan("S0").require_valid("w", 2)
