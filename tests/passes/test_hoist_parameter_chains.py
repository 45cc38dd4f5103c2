"""`hoist_parameter_chains`: chains leave the body, with the way of the gradient back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from autoparallel.graph.sizes import Sizes
from autoparallel.hardware import H100
from autoparallel.passes.hoist_parameter_chains import (
    ParameterChain,
    hoist_parameter_chains,
    join_layouts,
    require_complete,
)
from autoparallel.passes.specification import PlacementError
from autoparallel.passes.verify_placements import verify_placements
from autoparallel.placements import Replicate, format_layout, parse_layout
from autoparallel.placements.redistribution import Step
from autoparallel.planner.draft import call_of
from autoparallel.planner.request.request import Request
from tests.captures import draft
from tests.passes.support import captured, localized, placed, redistributor, show


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w(x)


def hoisted(
    model: nn.Module, modes: dict[str, list[str]], parameters: dict[str, str], axes: Any = (("dp", 2),)
) -> tuple[fx.GraphModule, tuple[ParameterChain, ...]]:
    graph = captured(model, torch.rand(8, 4))
    module = localized(graph, modes, parameters, axes=axes, outputs=[None])
    rows = redistributor(*(n for _, n in axes))
    return module, hoist_parameter_chains(module, graph.parameters, rows, Sizes(graph.actual)).chains


class TestTheExample:
    def test_before_and_after(self) -> None:
        graph = captured(Linear(), torch.rand(8, 4))
        module = localized(
            graph, {"w/aten.linear#0": ["shard:...0"]}, {"w.weight": "S0"}, axes=[("dp", 2)], outputs=[None]
        )
        assert show(module) == [
            "p_model_w_weight  S0",
            "args_0  I",
            "redistribute = collectives.redistribute(args_0, 'I', 'S0', 'mesh0/dp')  S0",
            "redistribute_1 = collectives.redistribute(p_model_w_weight, 'S0', 'R', 'mesh0/dp')  R",
            "linear = aten.linear(redistribute, redistribute_1)  S0",
            "return [linear]",
        ]
        (chain,) = hoist_parameter_chains(module, graph.parameters, redistributor(2), Sizes(graph.actual)).chains
        body = [line.replace(chain.placeholders[0], "w") for line in show(module)]
        assert body == [
            "w  R",
            "args_0  I",
            "redistribute = collectives.redistribute(args_0, 'I', 'S0', 'mesh0/dp')  S0",
            "linear = aten.linear(redistribute, w)  S0",
            "return [linear]",
        ]
        assert str(chain) == "w.weight: S0 -> R; gradient P"
        assert str(replace(chain, reduce_dtype=torch.bfloat16)).endswith("; gradient P in torch.bfloat16")
        assert [(str(s.src), str(s.dst)) for s in chain.paths[0]] == [("S0", "R")]
        assert [(str(s.src), str(s.dst)) for s in chain.sync] == [("P", "S0")]
        assert chain.trainable and chain.shape == (4, 4) and chain.at_rest == parse_layout("S0")

    def test_data_parallel_reduces_whole_gradients(self) -> None:
        _, (chain,) = hoisted(Linear(), {"w/aten.linear#0": ["shard:...0"]}, {})
        assert str(chain) == "w.weight: I -> R; gradient P"
        assert [(str(s.src), str(s.dst)) for s in chain.sync] == [("P", "I")]

    def test_tensor_parallel_needs_no_steps(self) -> None:
        _, (chain,) = hoisted(Linear(), {"w/aten.linear#0": ["shard:n"]}, {"w.weight": "S0"}, axes=[("tp", 2)])
        assert chain.paths == ((),) and chain.sync == () and format_layout(chain.accumulator) == "S0"

    def test_a_frozen_parameter_has_no_way_back(self) -> None:
        model = Linear()
        model.w.requires_grad_(False)
        _, (chain,) = hoisted(model, {"w/aten.linear#0": ["shard:...0"]}, {"w.weight": "S0"})
        assert not chain.trainable


class TestSeveralUses:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4, bias=False)
            self.b = nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    def test_two_layouts_meet_in_a_summand(self) -> None:
        modes = {"a/aten.linear#0": ["shard:n"], "b/aten.linear#0": ["shard:k"]}
        module, (chain,) = hoisted(self.Twice(), modes, {"a.weight": "S0"}, axes=[("tp", 2)])
        assert [format_layout(u) for u in chain.uses] == ["S0", "S1"] and len(chain.placeholders) == 2
        assert format_layout(chain.accumulator) == "P"
        assert [(str(s.src), str(s.dst)) for s in chain.sync] == [("P", "S0")]
        assert not any("redistribute(p_model" in line for line in show(module))

    def test_one_layout_is_one_use(self) -> None:
        modes = {"a/aten.linear#0": ["shard:...0"], "b/aten.linear#0": ["shard:...0"]}
        _, (chain,) = hoisted(self.Twice(), modes, {"a.weight": "S0"})
        assert len(chain.uses) == 1 and len(chain.paths) == 1


def chain_with(sync: tuple[Step, ...], at_rest: str, accumulator: str) -> ParameterChain:
    gather = Step((0,), parse_layout(at_rest)[0], Replicate)
    return ParameterChain(
        "w", (4, 4), torch.float32, torch.float32, torch.float32, parse_layout(at_rest), (parse_layout("R"),), ("w",),
        ((gather,),), parse_layout(accumulator), {"per_step": ((), sync)}, True,
    )  # fmt: skip


class TestAnIncompleteChain:
    def step(self, src: str, dst: str) -> Step:
        return Step((0,), parse_layout(src)[0], parse_layout(dst)[0])

    @pytest.mark.parametrize(
        ("sync", "at_rest", "accumulator", "message"),
        [
            ([], "I", "P", "the gradient of w: the way from P ends as P, not as I"),
            ([("P", "I"), ("P", "I")], "I", "P", "no step leads from I to I"),
            ([("P", "S1")], "S0", "P", "ends as S1, not as S0"),
            ([("S0", "I")], "I", "P", "no step leads from P to I"),
            ([], "P", "P", "w lies as P: its gradient would not be completed exactly once"),
        ],
    )
    def test_is_refused(self, sync: list[tuple[str, str]], at_rest: str, accumulator: str, message: str) -> None:
        with pytest.raises(PlacementError, match=message):
            require_complete(chain_with(tuple(self.step(*s) for s in sync), at_rest, accumulator))

    def test_a_way_that_does_not_reach_its_use_is_refused(self) -> None:
        chain = chain_with((self.step("P", "S0"),), "S0", "P")
        require_complete(chain)
        with pytest.raises(PlacementError, match="w: the way from S0 ends as I, not as R"):
            require_complete(replace(chain, paths=((self.step("S0", "I"),),)))
        with pytest.raises(PlacementError, match="w: no step leads from S0 to R"):
            require_complete(replace(chain, paths=((self.step("S1", "R"),),)))

    def test_is_found_in_a_program(self) -> None:
        """A parameter that lies otherwise at rest than its way begins, so that its gradient ends elsewhere."""
        graph = captured(Linear(), torch.rand(8, 4))
        modes = {"w/aten.linear#0": ["shard:...0"]}
        module, specification = placed(graph, modes, {"w.weight": "S0"}, axes=[("dp", 2)], outputs=[None])
        next(n for n in module.graph.nodes if n.name == "p_model_w_weight").meta["placements"] = parse_layout("S1")
        chains = hoist_parameter_chains(module, graph.parameters, redistributor(2), Sizes(graph.actual)).chains
        with pytest.raises(PlacementError, match=r"w\.weight lies as S0 at rest, not as S1, where its way begins"):
            verify_placements(module, specification, chains)


def test_shards_within_other_shards_are_not_added_to_shards_of_the_whole() -> None:
    """On ranks of the first axis, (S0, S0) has other rows than (P, S0) along the second."""
    cut, halves = parse_layout("S0,S0"), parse_layout("P,S0")
    assert join_layouts([cut, halves]) == parse_layout("P,P")
    assert join_layouts([parse_layout("S1,S0"), halves]) == halves
    assert join_layouts([cut, cut]) == cut


def test_a_bias_of_fewer_elements_than_ranks_is_planned_for_all_ways_of_its_gradient() -> None:
    x = torch.empty(64, 16)
    request = Request((("dp", 8), ("tp", 8)), H100, plan="fsdp_tensor_parallel", loss_fn=F.mse_loss)
    plan = draft(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), call_of((x, x), with_target=True), request).plan
    assert {"S0,I", "I,S0"} & {parameter.at_rest for name, parameter in plan.parameters.items() if "bias" in name}
