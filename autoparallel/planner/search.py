"""The search: which layout every tensor and every operator of a forward graph takes.

One optimizer step on given hardware is predicted as a sum of costs over a graph of choices (``space``), and minimised
exactly by variable elimination (``elimination``), all mesh axes together.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from autoparallel.placements import format_layout
from autoparallel.plan import ParameterPlan, Plan, PlanError, fingerprint
from autoparallel.planner.budget import minimise_with_budget
from autoparallel.planner.elimination import Infeasible
from autoparallel.planner.solver import minimise
from autoparallel.planner.space import Problem, SearchSpace


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


def _solve(space: SearchSpace, problem: Problem, origin: str, memory_limit: float | None) -> Sequence[int]:
    try:
        if memory_limit is None:
            return minimise(problem.sizes, problem.factors).choices
        return minimise_with_budget(problem.sizes, problem.factors, problem.usage, memory_limit).solution.choices
    except Infeasible as error:
        raise PlanError(_explain_infeasible(error, space, problem, origin, memory_limit)) from error


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
