"""The search: which layout every tensor and every operator of a forward graph takes.

One optimizer step on given hardware is predicted as a sum of costs over a graph of choices (``space``), and minimised
exactly by variable elimination (``elimination``), all mesh axes together.

[Note: three axes] The tables of elimination grow with the number of layouts to the power of the graph's width, and a
tensor has hundreds of layouts on three axes.  Where they grow too large, the search minimises exactly over two axes at
a time with the third held, each pair in turn until none improves: every round can only lower the cost, and the plan
is optimal in each pair of axes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence

from torch import fx

from autoparallel.placements import format_layout
from autoparallel.plan import ParameterPlan, Plan, PlanError, fingerprint
from autoparallel.planner.budget import minimise_with_budget
from autoparallel.planner.elimination import Infeasible, TooWide, evaluate, minimise
from autoparallel.planner.space import Option, Problem, SearchSpace

MAX_TABLE = 2_000_000
"""Entries of the largest table of the search over three axes at once."""


def search(space: SearchSpace, origin: str, memory_limit: float | None = None) -> Plan:
    """The plan that minimises the predicted time of a step.

    Args:
        space: the choices and their prices.
        origin: the preset's name, for the plan.
        memory_limit: bytes per device for parameters, gradients, optimizer states, gathered parameters and saved
            activations.

    Raises:
        PlanError: when no plan satisfies the constraints or the limit.
    """
    start = time.perf_counter()
    if len(space.axis_sizes) > 2 and not (space.constraints.data or space.constraints.tensor):
        problem, choices = _by_pairs(space, origin, memory_limit)
    else:
        problem = space.build()
        choices = _solve(space, problem, origin, memory_limit)
    operators, shared, parameters = {}, {}, {}
    for node, variable in problem.variables.items():
        option = variable.options[choices[variable.number]]
        if node.name in space.captured.parameters:
            parameters[space.captured.parameters[node.name]] = ParameterPlan(
                format_layout(option.result), option.gather
            )
        elif node.op == "call_function":
            operators[node.meta["key"]] = tuple(str(m) for m in option.modes)
    for node, (layouts, number) in problem.readers.items():
        made = problem.variables[node].options[choices[problem.variables[node].number]].result
        if layouts[choices[number]] != made:
            shared[node.meta["key"]] = format_layout(layouts[choices[number]])
    return Plan(
        mesh=space.mesh,
        origin=origin,
        fingerprint=fingerprint(space.captured.graph),
        operators=operators,
        shared=shared,
        parameters=parameters,
        unruled=dict(space.unruled),
        search_seconds=time.perf_counter() - start,
    )


def _solve(
    space: SearchSpace, problem: Problem, origin: str, memory_limit: float | None, max_table: int = 50_000_000
) -> Sequence[int]:
    try:
        if memory_limit is None:
            return minimise(problem.sizes, problem.factors, max_table=max_table).choices
        return minimise_with_budget(
            problem.sizes, problem.factors, problem.usage, memory_limit, max_table=max_table
        ).solution.choices
    except Infeasible as error:
        raise PlanError(_explain_infeasible(error, space, problem, origin, memory_limit)) from error


def _by_pairs(space: SearchSpace, origin: str, memory_limit: float | None) -> tuple[Problem, Sequence[int]]:
    """Exact over all axes where that is small enough, else over pairs of axes in turn (see [Note: three axes])."""
    problem = space.build()
    try:
        return problem, _solve(space, problem, origin, memory_limit, MAX_TABLE)
    except TooWide:
        pass
    axes = range(len(space.axis_sizes))
    held: dict[fx.Node, Option] = {}
    best = float("inf")
    chosen: tuple[Problem, Sequence[int]] = (problem, ())
    rounds = 0
    while True:
        before = best
        for free in itertools.combinations(axes, 2):
            problem = space.build(_holding(held, [axis for axis in axes if axis not in free]))
            choices = _solve(space, problem, origin, memory_limit if rounds else None)
            cost = evaluate(problem.factors, choices)
            if cost < best or not rounds:
                best, chosen = cost, (problem, choices)
                held = {n: v.options[choices[v.number]] for n, v in problem.variables.items()}
        rounds += 1
        if best >= before * (1 - 1e-9) and rounds > 1:
            return chosen


def _holding(held: Mapping[fx.Node, Option], axes: Sequence[int]) -> Callable[[fx.Node, Option], bool]:
    return lambda node, option: all(_agrees(option, held.get(node), axis) for axis in axes)


def _agrees(option: Option, held: Option | None, axis: int) -> bool:
    """Whether an option is, on one axis, what is held there; before anything is held, whole."""
    if option.modes:
        return option.modes[axis].kind == "I" if held is None else option.modes[axis] == held.modes[axis]
    return option.result[axis].kind == "I" if held is None else option.result[axis] == held.result[axis]


def _explain_infeasible(
    error: Infeasible, space: SearchSpace, problem: Problem, origin: str, memory_limit: float | None
) -> str:
    mesh = ", ".join(f"{name}={size}" for name, size in space.mesh)
    if memory_limit is not None:
        least = error.smallest_usage
        needs = f"; the smallest that a plan needs is {least / 1e6:.1f} MB" if least is not None else ""
        return (
            f"no plan fits in {memory_limit / 1e6:.1f} MB per device on the mesh ({mesh}){needs}: raise memory_limit, "
            "or use a larger mesh or a smaller batch"
        )
    where = ""
    variable = error.variable
    if variable is not None:
        for node, found in problem.variables.items():
            if found.number == variable:
                where = f" at {node.meta['key']}"
    return space.explain_unsatisfiable(where)
