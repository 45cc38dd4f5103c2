"""Stages cut from a graph: what crosses, what is computed again, and that together they compute the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoparallel.passes.cut_stages import Crossing, CutError, StageGraph, cut_stages, staged_nodes
from tests.passes.support import Masked, captured, show


def keys(model: nn.Module, *args: Tensor) -> list[str]:
    return [node.meta["key"] for node in staged_nodes(captured(model, *args))]


CUTS = ("b/aten.linear#0", "c/aten.linear#0")


def stages() -> list[StageGraph]:
    return cut_stages(captured(Masked(), torch.randn(8, 4)), CUTS, [0])


def test_what_crosses_is_what_later_stages_read() -> None:
    first, second, third = stages()
    assert [show(s.captured.module) for s in (first, second, third)] == [
        ["p_model_a_weight", "args_0", "linear = aten.linear(args_0, p_model_a_weight)", "return [linear]"],
        [
            "p_model_b_weight", "args_0", "linear",
            "sym_size_int_2 = aten.sym_size.int(args_0, 0)",
            "gt = aten.gt.Scalar(args_0, 0)",
            "_to_copy = aten._to_copy(gt, dtype=torch.float32)",
            "linear_1 = aten.linear(linear, p_model_b_weight)",
            "mul = aten.mul.Tensor(linear_1, _to_copy)",
            "reshape_default = aten.reshape(mul, [sym_size_int_2, 4])",
            "return [reshape_default]",
        ],
        [
            "p_model_a_weight", "linear", "reshape_default",
            "linear_2 = aten.linear(reshape_default, p_model_a_weight)",
            "add = aten.add.Tensor(linear_2, linear)",
            "return [add]",
        ],
    ]  # fmt: skip
    skip = first.outgoing[0]
    assert (skip.source, skip.targets, skip.flows) == (0, (1, 2), (1, 2))


def test_a_value_that_skips_stages_comes_from_where_it_is_cheapest() -> None:
    def passed(price: Any) -> list[tuple[int, ...]]:
        graphs = cut_stages(captured(Masked(), torch.randn(8, 4)), CUTS, [0], price)
        return [c.givers for graph in graphs for c in graph.outgoing if c.name == "linear"]

    assert passed(lambda giver, taker: 1.0) == [(0, 0)], "among equals straight from the stage that makes it"
    assert passed(lambda giver, taker: float(taker - giver)) == [(0, 1)], "stage 1 has it, and is nearer to stage 2"
    handed = Crossing(0, "x", 0, (1, 2, 3), (3,), (0, 1, 0))
    assert [handed.takers(stage) for stage in range(4)] == [(1, 3), (2,), (), ()]
    assert [handed.returns(stage) for stage in (1, 2, 3)] == [False, False, True]
    handed = replace(handed, flows=(2,))
    assert [handed.returns(stage) for stage in (1, 2, 3)] == [True, True, False], "through the stage that hands it on"


def test_a_tied_weight_is_a_parameter_of_both_its_stages() -> None:
    first, second, third = stages()
    assert list(first.captured.parameters.values()) == list(third.captured.parameters.values()) == ["a.weight"]
    assert list(second.captured.parameters.values()) == ["b.weight"]


def test_together_they_compute_the_model() -> None:
    model, x = Masked(), torch.randn(6, 4)
    values: dict[str, Tensor] = {"args_0": x}
    for stage in cut_stages(captured(model, torch.randn(8, 4)), CUTS, [0]):
        graph = stage.captured
        parameters = {n: model.get_parameter(p) for n, p in graph.parameters.items()}
        inputs = [(parameters | values)[n.name] for n in graph.graph.nodes if n.op == "placeholder"]
        results = graph.module(*inputs)
        values |= dict(zip((c.name for c in stage.outgoing), results[len(stage.results) :], strict=True))
    torch.testing.assert_close(results[0], model(x))


class Counting(nn.Module):
    """Reads a buffer in the middle and changes it at the end."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x) * self.scale)
        self.scale.copy_(self.scale * 0.9)
        return self.c(y)


def test_those_that_use_a_changing_buffer_are_not_parted() -> None:
    graph = captured(Counting(), torch.randn(8, 4))
    with pytest.raises(CutError, match="scale changes in every call"):
        cut_stages(graph, ["b/aten.linear#0"], [1])
    first, second = cut_stages(graph, ["c/aten.linear#0"], [1])
    assert first.captured.mutated == ["scale"] and not second.captured.mutated


def test_a_cut_must_be_where_a_stage_can_begin() -> None:
    graph = captured(Masked(), torch.randn(8, 4))
    with pytest.raises(CutError, match="nothing to cut at"):
        cut_stages(graph, ["/aten.gt.Scalar#0"], [0])
    with pytest.raises(CutError, match="order"):
        cut_stages(graph, list(reversed(CUTS)), [0])
