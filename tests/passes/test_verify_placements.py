"""`verify_placements`: every kind of corruption is refused, and says which operator and which layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from autoparallel.collectives import redistribute
from autoparallel.passes.verify_placements import PlacementError, verify_placements
from autoparallel.placements import Invariant, Replicate, Shard
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


CORRUPTIONS: dict[Callable[[fx.GraphModule], Any], str] = {
    drop_a_collective: r"w1/aten\.linear#0 runs as shard:n and needs operand 0 as R; it lies as I",
    lay_a_parameter_otherwise: r"w2/aten\.linear#0 runs as shard:k and needs operand 1 as S1; it lies as S0",
    lay_a_result_otherwise: r"w[12]/aten\.linear#0",
    redistribute_from_elsewhere: r"w2/aten\.linear#0->I: redistributes from P, its operand lies as I",
    forget_the_layouts: r"w1/aten\.linear#0 has no layouts",
    call_a_summand_whole: r"w2/aten\.linear#0->I",
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
