"""Where Python goes on in two traces as in one, and what only one of the ways does until then."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from contextlib import closing, nullcontext, suppress
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


def _over_what_nobody_sees(asking: Any, items: Any) -> Any:
    for item in iter(items):
        if asking:
            return item


def _over_equal_items(asking: Any, items: Any) -> Any:
    for item in (1, 1, 2):
        if asking:
            return item


def _over_a_rebound_number(asking: Any, items: Any) -> Any:
    number = len(items)
    for i in range(number):
        number = 0
        if asking:
            return i, number


def _over_a_number(asking: Any, items: Any) -> Any:
    number = len(items)
    for i in range(number):
        if asking:
            return i


def _in_a_target(asking: Any, items: Any) -> Any:
    numbers = {}
    numbers[1 if asking else 2] = len(items)
    return numbers


def _in_a_default(asking: Any, items: Any) -> Any:
    def function(first: Any = len(items), second: Any = 1 if asking else 2) -> Any:  # noqa: B008
        return first, second

    return function


def _in_a_guard(asking: Any, items: Any) -> Any:
    match items:
        case (first, _) if asking:
            return first


def _at_the_end(asking: Any, items: Any) -> Any:
    try:
        return len(items)
    finally:
        if asking:
            print()


def _where_an_error_is_handled(asking: Any, items: Any) -> Any:
    try:
        raise ValueError(items)
    except ValueError:
        if asking:
            raise


def _with_a_manager(asking: Any, items: Any) -> Any:
    with nullcontext(items):
        if asking:
            return items


def _with_an_unknown_manager(asking: Any, items: Any) -> Any:
    with closing(items):
        if asking:
            return items


def _in_a_class(asking: Any, items: Any) -> Any:
    class Made:
        first = len(items)
        second = 1 if asking else 2

    return Made


def _behind_an_assignment(asking: Any, items: Any) -> Any:
    number = 1
    return number + (number := 2) + (1 if asking else number)


def _behind_an_entry(asking: Any, items: Any) -> Any:
    return items[0] + (1 if asking else 2)


LIVE: dict[Callable[[Any, Any], Any], set[str] | None] = {
    _loop: {"asking", "item", "items", "mask", "total", "unused"},
    _expression: {"left", "right"},
    _in_a_loops_condition: None,
    _in_a_list: None,
    _behind_a_call: None,
    _in_a_function_of_c: None,
    _with_a_function: {"add", "count"},
    _over_what_nobody_sees: None,
    _over_equal_items: None,
    _over_a_rebound_number: None,
    _over_a_number: {"asking", "i", "number", "range"},
    _in_a_target: None,
    _in_a_default: None,
    _in_a_guard: None,
    _at_the_end: None,
    _where_an_error_is_handled: None,
    _with_a_manager: {"items"},
    _with_an_unknown_manager: None,
    _in_a_class: None,
    _behind_an_assignment: None,
    _behind_an_entry: None,
}


@pytest.mark.parametrize("function", LIVE, ids=lambda function: function.__name__)
def test_a_function_depends_on_its_live_variables(function: Callable[[Any, Any], Any]) -> None:
    asking = _Asking()
    with suppress(ValueError, AttributeError):
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
