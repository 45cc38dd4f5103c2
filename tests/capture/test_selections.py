"""What is made of as many rows as values select is one call, and the rest is sharded as ever."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from autoparallel.capture.attempt import ON_SELECTED
from autoparallel.graph.captured import Captured
from autoparallel.operators.control_flow import inner_graphs, is_selection
from tests.captures import captured


class Selects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Any:
        h = self.down(self.up(x).relu())
        return self.select(h)

    def select(self, h: Tensor) -> Any:
        raise NotImplementedError


def selections(of: Captured) -> list[fx.Node]:
    return [node for node in of.graph.nodes if is_selection(node.target)]


def calls(graph: fx.Graph) -> list[str]:
    names = (getattr(n.target, "__name__", "").removesuffix(".default") for n in graph.nodes if n.op == "call_function")
    return [name for name in names if name not in ("getitem", "ge", "sym_size.int", "_assert_scalar")]


def test_what_has_a_size_again_is_outside() -> None:
    class Sums(Selects):
        def select(self, h: Tensor) -> Any:
            return h[h > 0].exp().sum().log() * h.mean()

    graph = captured(Sums(), torch.randn(8, 8))
    (selection,) = selections(graph)
    (inside,) = inner_graphs(selection.target)
    assert calls(inside.graph) == ["index.Tensor", "exp", "sum"]
    assert {"linear", "relu", "gt.Scalar", "log", "mean", "mul.Tensor"} <= {*calls(graph.graph)}


def test_two_selections_are_two_calls_unless_one_reads_of_both() -> None:
    class Apart(Selects):
        def select(self, h: Tensor) -> Any:
            return h[h > 0].sum() * h[h < 0].sum()

    class Together(Selects):
        def select(self, h: Tensor) -> Any:
            return torch.cat([h[h > 0], h[h < 0]]).sum()

    assert len(selections(captured(Apart(), torch.randn(8, 8)))) == 2
    assert len(selections(captured(Together(), torch.randn(8, 8)))) == 1


def test_what_lies_between_two_parts_of_a_selection_is_inside() -> None:
    class Centres(Selects):
        def select(self, h: Tensor) -> Any:
            rows = h[h > 0]
            centre = rows.mean().tanh()  # has a size, and rows are read again with it
            beside = h.sin().sum()
            return (rows - centre).square().sum() + beside

    graph = captured(Centres(), torch.randn(8, 8))
    (selection,) = selections(graph)
    (inside,) = inner_graphs(selection.target)
    assert "tanh" in calls(inside.graph) and "sin" not in calls(inside.graph)


def test_what_reads_a_selection_early_comes_after_it() -> None:
    class Early(Selects):
        def select(self, h: Tensor) -> Any:
            rows = h[h > 0]
            early = rows.sum() * h.mean()
            late = h.cos().mean()  # an operand of the selection, computed after what reads of it
            return early, (rows * late).sum()

    model, x = Early().double(), torch.randn(8, 8, dtype=torch.float64)
    graph = captured(model, x)
    names = [node.name for node in graph.graph.nodes]
    (selection,) = selections(graph)
    assert all(names.index(operand.name) < names.index(selection.name) for operand in selection.all_input_nodes)
    graph.graph.lint()


def test_parameters_that_selected_rows_read_are_named(caplog: pytest.LogCaptureFixture) -> None:
    class Heads(Selects):
        def select(self, h: Tensor) -> Any:
            return F.linear(h[h[:, 0] > 0], self.up.weight, self.up.bias).sum()

    captured(Heads(), torch.randn(8, 8))
    assert ON_SELECTED.partition(",")[0].replace("%d", "2") in caplog.text
