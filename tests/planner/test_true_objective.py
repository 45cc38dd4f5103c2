"""The search against brute force on the true objective: every plan of a small graph, priced as its program would be.

The referee never looks at the search's tables. It prices each plan by the redistributions that `insert_collectives`
would write for it, each of them once, however many consumers share it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, fx, nn

from autoparallel.hardware import H100, Profile
from autoparallel.placements import Invariant, Layout
from autoparallel.placements.redistribution import LayoutTable
from autoparallel.planner.calls.options import Option
from autoparallel.planner.draft import call_of
from autoparallel.planner.layouts import cheapest
from autoparallel.planner.planner import Planner
from autoparallel.planner.request.request import Request
from autoparallel.planner.space.problem import Problem
from autoparallel.planner.space.space import SearchSpace
from autoparallel.planner.space.subject import Subject
from autoparallel.rules.calls import tensor_operands

FAST = dataclasses.replace(H100, name="fast", latency=1e-8, launch=1e-8, overlap=0.0)
SLOW = dataclasses.replace(FAST, name="slow", flops={dtype: rate / 1e4 for dtype, rate in H100.flops.items()})


class Shared(nn.Module):
    """One tensor that two products read."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(width))
        self.a, self.b = nn.Parameter(torch.empty(width, hidden)), nn.Parameter(torch.empty(width, hidden))

    def forward(self, x: Tensor) -> Tensor:
        h = x * self.scale
        return ((h @ self.a) * (h @ self.b)).sum()


class Referee:
    """The cheapest of all plans of a graph.

    Attributes:
        least: its cost.
        plans: how many were compared.
    """

    def __init__(self, space: SearchSpace) -> None:
        self.space, self.plans = space, 0
        graph = space.captured.graph
        calls = [node for node in graph.nodes if node.op == "call_function" and space.options[node] is not None]
        numbers = {node: i for i, node in enumerate(calls)}
        # What a plan costs falls into parts that few calls decide: themselves, and what each tensor goes through.
        parts: list[tuple[tuple[int, ...], Callable[..., float]]]
        parts = [((i,), lambda option: option.seconds) for i in range(len(calls))]
        result = graph.output_node().args[0]
        for node in graph.nodes:
            readers = [(user, i) for user in calls for i, x in enumerate(tensor_operands(user)) if x is node]
            leaves = node in result  # type: ignore[operator]
            if not readers and not leaves:
                continue
            own = (numbers[node],) if node in numbers else ()
            scope = (*own, *(numbers[user] for user, _ in readers))
            parts.append((scope, cache(self._carried(node, bool(own), [i for _, i in readers], leaves))))
        self.least = float("inf")
        for plan in itertools.product(*(space.options[node] or () for node in calls)):
            self.plans += 1
            cost = 0.0
            for scope, price in parts:
                cost += price(*(plan[i] for i in scope))
            self.least = min(self.least, cost)

    def _carried(self, node: fx.Node, made: bool, positions: list[int], leaves: bool) -> Callable[..., float]:
        """The cost of bringing a tensor to its readers, by how it is made and how they run."""
        parameter = node.name in self.space.captured.parameters

        def price(*options: Option) -> float:
            readers = options[1:] if made else options
            wanted = [option.needs[i] for option, i in zip(readers, positions, strict=True)]
            if leaves:
                wanted.append((Invariant,) * len(self.space.axis_sizes))
            if parameter:
                rest = self.space.options[node] or []
                return min(o.seconds + self._gathered(node, o, wanted[0]) for o in rest)
            source = options[0].result if made else (self.space.options[node] or [])[0].result
            if len(wanted) == 1:
                return self._written(node, source, source, wanted)
            return min(self._written(node, source, middle, wanted) for middle in self._table(node).layouts)

        return price

    def _table(self, node: fx.Node, backward: bool | None = None, parameter: bool = False) -> LayoutTable:
        space = self.space
        flows = node.meta["backward"] if backward is None else backward
        itemsize, differentiable = node.meta["val"].element_size(), bool(node.meta["differentiable"])
        shape = space.size.shape(node)
        return space.subject.redistributor.table(shape, itemsize, differentiable, bool(flows), parameter)

    def _gathered(self, node: fx.Node, option: Option, need: Layout) -> float:
        """A parameter's way from rest, forward and back, and once more where it is gathered per use."""
        tables = [self._table(node, parameter=True)]
        if option.gather == "per_use":
            tables.append(self._table(node, backward=False, parameter=True))
        return sum(float(table.seconds[table.index[option.result], table.index[need]]) for table in tables)

    def _written(self, node: fx.Node, source: Layout, middle: Layout, wanted: list[Layout]) -> float:
        """The steps that a program takes from one layout by a shared one to the wanted ones, each step once."""
        space, table = self.space, self._table(node)
        versions, total = {source}, 0.0
        for start, goal in [(source, middle), *((middle, want) for want in wanted)]:
            here = start
            steps = space.subject.redistributor.path(
                start, goal, space.size.shape(node), node.meta["val"].element_size(),
                bool(node.meta["differentiable"]), bool(node.meta["backward"]),
            )  # fmt: skip
            for step in steps:
                after = step.apply(here)
                if after not in versions:
                    versions.add(after)
                    total += float(table.direct[table.index[here], table.index[after]])
                here = after
        return total


def _space(profile: Profile, ranks: int, rows: int, width: int, hidden: int) -> SearchSpace:
    with torch.device("meta"):
        model, x = Shared(width, hidden), torch.empty(rows, width)
    request = Request((("x", ranks),), profile)
    captured = Planner(model, request).capture(call_of((x,)))
    return SearchSpace(Subject(captured, request))


@pytest.mark.parametrize(
    ("profile", "ranks", "rows", "width", "hidden"),
    [
        (FAST, 2, 64, 64, 256),
        (SLOW, 2, 4096, 64, 64),
        (SLOW, 2, 3, 512, 4096),
        (SLOW, 4, 3, 64, 4096),
        (H100, 2, 4, 8, 8),
    ],
    ids=["fast links", "many rows", "large weights", "four ranks", "tiny"],
)
def test_no_plan_of_a_small_graph_is_cheaper_than_the_one_found(
    profile: Profile, ranks: int, rows: int, width: int, hidden: int
) -> None:
    space = _space(profile, ranks, rows, width, hidden)
    plan, referee = cheapest(Problem(space)), Referee(space)
    assert referee.plans > 1000
    assert plan.cost == pytest.approx(referee.least, rel=1e-9)


def test_the_graphs_have_different_answers() -> None:
    """Else brute force would have confirmed one plan several times."""
    sizes = [(SLOW, 2, 4096, 64, 64), (SLOW, 2, 3, 512, 4096), (H100, 2, 4, 8, 8)]
    found = {tuple(sorted(cheapest(Problem(_space(*size))).operators.items())) for size in sizes}
    assert len(found) == 3
