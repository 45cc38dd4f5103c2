"""Where Python goes on in two traces as in one, and what only one of the ways does until then."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn

from autoparallel.capture import exports
from autoparallel.capture.tracing.live_names import live_names
from autoparallel.operators.control_flow import inner_graphs
from tests.capture.programs.detours import SkipsExpertsWithoutRows
from tests.capture.test_ways import choices, operators
from tests.captures import captured


class _Asking:
    """Notes on what the function depends that asks whether it holds."""

    def __init__(self) -> None:
        self.live: list[frozenset[str] | None] = []

    def __bool__(self) -> bool:
        self.live.append(live_names(sys._getframe(1), asks=True))
        return True


def _loop(asking: Any, items: Any) -> Any:
    total, unused = 0, 1
    for item in items:
        mask = item + unused
        if asking:
            rows = mask
            total = total + rows
    return total


def _expression(asking: Any, items: Any) -> Any:
    left, right = items
    return left + (right if asking else 0)


def _in_a_loops_condition(asking: Any, items: Any) -> Any:
    while asking:
        return items


def _in_a_list(asking: Any, items: Any) -> Any:
    return [item for item in items if asking]


def _behind_a_call(asking: Any, items: Any) -> Any:
    return len(items) + (1 if asking else 0)


def _in_a_function_of_c(asking: Any, items: Any) -> Any:
    return any([asking, *items])


def _with_a_function(asking: Any, items: Any) -> Any:
    count = 0

    def add() -> None:
        nonlocal count
        count += 1

    if asking:
        add()
    return count


LIVE: dict[Callable[[Any, Any], Any], set[str] | None] = {
    _loop: {"asking", "item", "mask", "total", "unused"},
    _expression: {"left", "right"},
    _in_a_loops_condition: None,
    _in_a_list: None,
    _behind_a_call: None,
    _in_a_function_of_c: None,
    _with_a_function: {"add", "count"},
}


@pytest.mark.parametrize("function", LIVE, ids=lambda function: function.__name__)
def test_a_function_depends_on_its_live_variables(function: Callable[[Any, Any], Any]) -> None:
    asking = _Asking()
    function(asking, (1, 2))
    expected = LIVE[function]
    assert asking.live[0] == (None if expected is None else frozenset(expected))


def test_each_expert_is_one_call() -> None:
    with mock.patch.object(exports, "export", wraps=exports.export) as export:
        graph = captured(SkipsExpertsWithoutRows().double(), torch.randn(6, 8, dtype=torch.float64)).graph
    assert export.call_count == 6 and len(choices(graph)) == 5
    for choice in choices(graph):
        runs, skips = (operators(module.graph) for module in inner_graphs(choice.target))
        assert runs.count("linear.default") == 1 and skips == []
    assert "linear.default" not in operators(graph)[1:]  # beside that of the gate


class _Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if h.sum() > 0:
            h = h.sin()
        h = self.b(h)
        if h.sum() > 0:
            h = h.cos()
        return h.tanh()


def _text(graph: fx.Graph) -> str:
    calls = []
    for node in graph.nodes:
        if node in choices(graph):
            calls.append(" or ".join(f"[{', '.join(operators(x.graph))}]" for x in inner_graphs(node.target)))
        elif node.op == "call_function" and node.target is not operator.getitem:
            calls.append(str(node.target).removeprefix("aten."))
    return "; ".join(calls)


def test_what_is_between_is_a_call_of_its_own() -> None:
    question = "sum.default; gt.Scalar; detach.default; clone.default"
    assert _text(captured(_Chain(), torch.randn(8, 8)).graph) == (
        f"linear.default; {question}; [sin.default] or []; "
        f"linear.default; {question}; [cos.default] or []; tanh.default"
    )
