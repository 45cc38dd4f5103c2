"""A search over two mesh axes at a time, for graphs whose tables grow too large (see [Note: wide graphs]).

Elimination minimises over two axes with the others held, each pair in turn, until none improves: every round can only
lower the cost.  What is found so is no proof; the bound comes from the whole problem (see ``solve.hubs``).
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Hashable, Sequence

import numpy as np
from torch import fx

from autoparallel.placements import Layout
from autoparallel.planner.calls.options import Option
from autoparallel.planner.solve.elimination import Solution, TooWide
from autoparallel.planner.solve.factors import Allowance, Factors, States, evaluate
from autoparallel.planner.space.problem import Problem

Solve = Callable[[Sequence[int], Factors, Allowance | None], Solution]
"""Minimises costs, within a budget where there is one."""

_ROUNDING = 1e-9  # relative difference of costs below which they count as equal


def minimise_by_pairs(problem: Problem, objective: Factors, solve: Solve, budget: Allowance | None = None) -> list[int]:
    """The best assignment found by minimising over two mesh axes at a time (see [Note: wide graphs]), or one at a time
    where two are too wide, too.

    The largest axes come first.  A first round without the budget says where to start within it.
    """
    if len(problem.space.axis_sizes) > 2:
        with contextlib.suppress(TooWide):
            return _minimise_in_turn(problem, objective, solve, budget, 2)
    return _minimise_in_turn(problem, objective, solve, budget, 1)


def _minimise_in_turn(
    problem: Problem, objective: Factors, solve: Solve, budget: Allowance | None, together: int
) -> list[int]:
    axis_sizes = problem.space.axis_sizes
    axes = range(len(axis_sizes))
    groups = list(itertools.combinations(axes, together))
    groups.sort(key=lambda free: -math.prod([axis_sizes[axis] for axis in free]))
    best: list[int] = []
    held: dict[fx.Node, Option] = {}
    for within in (None, budget) if budget is not None else (None,):
        least, idle = float("inf"), 0
        last = within is budget
        for turn, free in enumerate(itertools.cycle(groups)):
            if idle == len(groups) - 1 if last else turn == len(groups):
                break
            left = _states_left(problem, held, [axis for axis in axes if axis not in free])
            sizes = [len(states) for states in left]
            narrowed = None if within is None else (within[0].restricted(left), within[1])
            numbers = solve(sizes, objective.restricted(left), narrowed).choices
            choices = [int(states[choice]) for states, choice in zip(left, numbers, strict=True)]
            cost = evaluate(objective, choices)
            idle += 1
            if cost < least:
                idle = 0 if cost < least * (1 - _ROUNDING) else idle
                best, least = choices, cost
                held = {n: v.options[choices[v.number]] for n, v in problem.variables.items()}
    return best


def _states_left(problem: Problem, held: dict[fx.Node, Option], axes: Sequence[int]) -> list[States]:
    """The states of every variable that are, on some axes, what is held there."""
    states: list[States] = [np.arange(size) for size in problem.sizes]
    alike: dict[Hashable, States] = {}
    left: dict[fx.Node, list[Option]] = {}
    for node, variable in problem.variables.items():
        chosen = held.get(node)
        key = id(variable.options), tuple([_on(chosen, axis) for axis in axes])
        if key not in alike:
            agree = [all(_agrees(o, chosen, axis) for axis in axes) for o in variable.options]
            alike[key] = np.flatnonzero(agree) if any(agree) else np.arange(len(agree))
        states[variable.number] = alike[key]
        left[node] = [variable.options[i] for i in alike[key]]
    readers: dict[fx.Node, set[Layout]] = {node: {o.result for o in left[node]} for node in problem.readers}
    for node, options in left.items():
        for i, operand in enumerate(problem.size.operands(node)):
            if operand in readers:
                readers[operand] |= {o.needs[i] for o in options}
    for node, (layouts, number) in problem.readers.items():
        which = tuple([i for i, layout in enumerate(layouts) if layout in readers[node]])
        states[number] = alike.setdefault(("layouts", which), np.array(which))
    return states


def _on(option: Option | None, axis: int) -> Hashable:
    if option is None:
        return None
    return option.modes[axis] if option.modes else option.result[axis]


def _agrees(option: Option, held: Option | None, axis: int) -> bool:
    """Whether an option is, on one axis, what is held there; before anything is held, whole."""
    if held is None:
        return (option.modes[axis] if option.modes else option.result[axis]).kind == "I"
    return _on(option, axis) == _on(held, axis)
