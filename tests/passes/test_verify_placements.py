"""`verify_placements`: every kind of corruption is refused, and says which operator and which layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from autoparallel.comm.collectives import redistribute
from autoparallel.passes.verify_placements import Asked, PlacementError, verify_placements
from autoparallel.placements import Invariant, Replicate, Shard
from autoparallel.placements.modes import parse_mode
from tests.passes.support import MLP, PAIR_MODES, PAIR_PARAMETERS, captured, localized


def program() -> fx.GraphModule:
    return localized(captured(MLP(), torch.rand(8, 4)), PAIR_MODES, PAIR_PARAMETERS)


def node(module: fx.GraphModule, name: str) -> fx.Node:
    return next(n for n in module.graph.nodes if n.name == name)


def drop_a_collective(module: fx.GraphModule) -> None:
    first = node(module, "redistribute")
    first.replace_all_uses_with(first.args[0])


def lay_a_parameter_otherwise(module: fx.GraphModule) -> None:
    node(module, "p_model_w2_weight").meta["placements"] = (Shard(0),)


def lay_a_result_otherwise(module: fx.GraphModule) -> None:
    node(module, "linear_1").meta["placements"] = (Shard(0),)


def redistribute_from_elsewhere(module: fx.GraphModule) -> None:
    node(module, "redistribute_1").replace_input_with(node(module, "linear_2"), node(module, "linear"))


def forget_the_layouts(module: fx.GraphModule) -> None:
    for key in ("needs", "modes", "placements"):
        node(module, "linear_1").meta.pop(key)


def call_a_summand_whole(module: fx.GraphModule) -> None:
    node(module, "redistribute_1").meta["placements"] = (Replicate,)


def swap_the_operands_layouts(module: fx.GraphModule) -> None:
    node(module, "linear").meta["placements"] = (Shard(1),)


def redistribute_otherwise_than_noted(module: fx.GraphModule) -> None:
    last = node(module, "redistribute_1")
    last.args = (last.args[0], "P", "R", last.args[3])


def note_another_way_to_run(module: fx.GraphModule) -> None:
    node(module, "linear_1").meta["modes"] = (parse_mode("shard:k"),)


def forget_that_it_is_trained(module: fx.GraphModule) -> None:
    node(module, "linear_2").meta["differentiable"] = False


CORRUPTIONS: dict[Callable[[fx.GraphModule], Any], str] = {
    drop_a_collective: r"w1/aten\.linear#0 runs as shard:n and needs operand 0 as R; it lies as I",
    lay_a_parameter_otherwise: r"w2/aten\.linear#0 runs as shard:k and needs operand 1 as S1; it lies as S0",
    lay_a_result_otherwise: r"w[12]/aten\.linear#0",
    redistribute_from_elsewhere: r"w2/aten\.linear#0->I: redistributes from P, its operand lies as I",
    forget_the_layouts: r"w1/aten\.linear#0 has no layouts",
    call_a_summand_whole: r"w2/aten\.linear#0->I",
    redistribute_otherwise_than_noted: r"w2/aten\.linear#0->I: redistributes from P to R, not from P to I",
    note_another_way_to_run: r"w1/aten\.linear#0 runs as shard:k and needs operand 0 as S1; it lies as R",
    forget_that_it_is_trained: r"w2/aten\.linear#0 (is|cannot|runs)",
    swap_the_operands_layouts: r"pre/aten\.linear#0|redistributes from I, its operand lies as S1",
}


@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda c: c.__name__)
def test_a_corrupted_program_is_refused(corrupt: Callable[[fx.GraphModule], Any]) -> None:
    module = program()
    corrupt(module)
    with pytest.raises(PlacementError, match=CORRUPTIONS[corrupt]):
        verify_placements(module)


def test_a_right_program_passes_and_is_not_changed() -> None:
    module = program()
    before = str(module.graph)
    assert verify_placements(module) is module and str(module.graph) == before
    assert any(n.target is redistribute for n in module.graph.nodes)
    assert node(module, "linear").meta["placements"] == (Invariant,)


class Mean(nn.Module):
    """A mean over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w(x).mean()


def asked_for() -> tuple[fx.GraphModule, Asked]:
    """A program over two axes, and what it was to be."""
    graph = captured(Mean(), torch.rand(8, 4))
    calls = [n.meta["key"] for n in graph.graph.nodes if n.op == "call_function"]
    linear, mean = calls
    modes = {linear: ["shard:...0", "I"], mean: ["shard:d0", "I"]}
    ways = {key: tuple(map(parse_mode, texts)) for key, texts in modes.items()}
    axes = (("dp", 2), ("tp", 2))
    module = localized(graph, modes, axes=axes)
    return module, Asked(ways, {}, [(Invariant, Invariant)], axes, "mesh0")


def communicate_over_another_axis(module: fx.GraphModule) -> None:
    last = [n for n in module.graph.nodes if n.target is redistribute][-1]
    last.args = (*last.args[:3], "mesh0/tp")


def forget_to_divide(module: fx.GraphModule) -> None:
    division = next(n for n in module.graph.nodes if "scales" in n.meta)
    division.replace_all_uses_with(division.args[0])


def divide_by_another_count(module: fx.GraphModule) -> None:
    division = next(n for n in module.graph.nodes if "scales" in n.meta)
    division.args = (division.args[0], 4)


def take_a_parameter_as_it_does_not_lie(module: fx.GraphModule) -> None:
    node(module, "p_model_w_weight").meta["placements"] = (Invariant, Shard(0))


def return_a_summand(module: fx.GraphModule) -> None:
    output = module.graph.output_node()
    output.args = ((next(n for n in module.graph.nodes if "scales" in n.meta),),)


FAULTS: dict[Callable[[fx.GraphModule], Any], str] = {
    communicate_over_another_axis: r"communicates over 'mesh0/tp', not over the axes \(0,\)",
    forget_to_divide: r"aten\.mean#0 is of one of 2 parts, and is read without taking that into account",
    divide_by_another_count: r"aten\.mean#0 is of one of 2 parts",
    take_a_parameter_as_it_does_not_lie: r"w\.weight|p_model_w_weight",
    return_a_summand: r"output 0 leaves as P,I, not as I,I",
}


@pytest.mark.parametrize("corrupt", FAULTS, ids=lambda c: c.__name__)
def test_a_program_that_is_not_what_was_asked_for_is_refused(corrupt: Callable[[fx.GraphModule], Any]) -> None:
    module, asked = asked_for()
    assert verify_placements(module, asked) is module
    corrupt(module)
    with pytest.raises(PlacementError, match=FAULTS[corrupt]):
        verify_placements(module, asked)
