"""The runner of passes: a wrong order is refused when the list is made; every pass is checked, verified and timed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from torch import fx, nn

from autoparallel.decisions.parameters import ParameterPlan
from autoparallel.passes.adapt_captured import leaving_passes, padding_passes
from autoparallel.passes.runner import CAPTURED, Fact, Pass, PassList, PassOrderError, run_passes
from autoparallel.placements.redistribution import Redistributor
from autoparallel.plan import Plan
from autoparallel.program.passes import program_passes
from autoparallel.program.program import Target
from tests.passes.support import captured


@dataclass(frozen=True)
class Counted:
    """How many calls a graph has."""

    calls: int


def module() -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.neg, (x,)))
    return fx.GraphModule(nn.Module(), graph)


def name_nodes(module: fx.GraphModule) -> None:
    for node in module.graph.nodes:
        if node.op == "call_function":
            node.target = torch.abs


def insert_collectives(module: fx.GraphModule) -> None:
    name_nodes(module)


def pad_vocabulary(module: fx.GraphModule) -> None:
    name_nodes(module)


def count(module: fx.GraphModule) -> Counted:
    return Counted(sum(node.op == "call_function" for node in module.graph.nodes))


NAME = Pass(name_nodes, provides={Fact.NAMED})
PLACE = Pass(insert_collectives, {Fact.NAMED, Fact.GLOBAL}, {Fact.PLACED}, {Fact.GLOBAL})


class TestTheOrder:
    def test_a_pass_before_what_it_requires(self) -> None:
        message = r"insert_collectives requires NAMED \(.*\), which is not true .*: put it after name_nodes"
        with pytest.raises(PassOrderError, match=message):
            PassList([PLACE, NAME], premises={Fact.GLOBAL})
        PassList([NAME, PLACE], premises={Fact.GLOBAL})

    def test_a_pass_after_what_takes_it_away(self) -> None:
        late = Pass(pad_vocabulary, {Fact.GLOBAL})
        with pytest.raises(PassOrderError, match=r"pad_vocabulary requires GLOBAL .* put it before insert_collectives"):
            PassList([NAME, PLACE, late], premises={Fact.GLOBAL})

    def test_what_nobody_makes(self) -> None:
        with pytest.raises(PassOrderError, match="no pass of the list makes it so"):
            PassList([NAME, PLACE])

    def test_what_a_list_promises(self) -> None:
        with pytest.raises(PassOrderError, match="what comes after the list requires PLACED"):
            PassList([NAME], premises={Fact.GLOBAL}, promised={Fact.PLACED})


class TestRunning:
    def test_findings_come_by_their_kind(self) -> None:
        told: list[Counted] = []

        def tell(module: fx.GraphModule, counted: Counted) -> None:
            told.append(counted)

        reading = Pass(tell, reads=lambda findings: {"counted": findings[Counted]})
        findings = run_passes(PassList([NAME, Pass(count), reading]), module())
        assert told == [findings[Counted]] == [Counted(1)] and findings.get(Fact) is None

    def test_the_module_runs_as_rewritten(self) -> None:
        rewritten = module()
        run_passes(PassList([NAME]), rewritten)
        assert rewritten(torch.tensor(-2.0)) == 2.0

    def test_a_graph_that_is_no_graph_any_more_is_found_after_its_pass(self) -> None:
        def turn(module: fx.GraphModule) -> None:
            nodes = list(module.graph.nodes)
            nodes[0].prepend(nodes[1])

        with pytest.raises(RuntimeError, match="used before it has been defined"):
            run_passes(PassList([Pass(turn)]), module())

    def test_what_a_pass_makes_is_verified_as_it_says(self) -> None:
        verified: list[object] = []
        place = dataclasses.replace(PLACE, verify=lambda module, findings: verified.append(module.graph))
        passes = PassList([NAME, place, Pass(count)], premises={Fact.GLOBAL})
        rewritten = module()
        run_passes(passes, rewritten)
        assert verified == [rewritten.graph]

    def test_every_pass_is_watched_with_its_time(self) -> None:
        seen: list[tuple[str, bool]] = []
        run_passes(PassList([NAME, Pass(count)]), module(), lambda n, s, m: seen.append((n, s >= 0)))
        assert seen == [("name_nodes", True), ("count", True)]


class TestTheListOfAProgram:
    @staticmethod
    def passes() -> PassList:
        graph = captured(nn.Linear(4, 4), torch.rand(8, 4))
        parameters = {name: ParameterPlan("I", "per_step") for name in graph.parameters.values()}
        plan = Plan((("dp", 2),), "auto", "", parameters, {}, {})
        sizes = Redistributor((2,), lambda kind, axes, size: 1.0)
        return program_passes(graph, plan, Target("mesh0", sizes), inputs={}, outputs=[None])

    def test_two_neighbours_in_the_other_order_are_refused_or_independent(self) -> None:
        passes = self.passes()
        refused = []
        for i in range(len(passes.passes) - 1):
            first, second = passes.passes[i : i + 2]
            swapped = [*passes.passes[:i], second, first, *passes.passes[i + 2 :]]
            try:
                dataclasses.replace(passes, passes=swapped)
            except PassOrderError:
                refused.append(first.name)
        assert refused == [
            "settle_interleaving", "specify_program", "insert_collectives", "hoist_parameter_chains", "chunk_linears",
            "recompute_layers", "chunk_loss",
        ]  # fmt: skip

    def test_every_pass_is_missed(self) -> None:
        passes = self.passes()
        for each in passes.passes:
            rest = [other for other in passes.passes if other is not each]
            if each.name not in ("set_device", "find_divisors", "chunk_linears", "overlap_collectives"):
                with pytest.raises(PassOrderError):
                    dataclasses.replace(passes, passes=rest)

    def test_what_comes_before_leaves_a_captured_graph(self) -> None:
        for passes in (padding_passes({}, {}), leaving_passes(0, 0)):
            assert passes.premises == passes.promised == CAPTURED
