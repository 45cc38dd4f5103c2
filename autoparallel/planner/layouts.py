"""The cheapest layouts: which one every tensor and every operator of a forward graph takes.

One optimizer step on given hardware is predicted as a sum of costs over a graph of choices (``space``), and minimised
exactly by variable elimination (``solve.layered``), all mesh axes together.  Where that needs tables that are too
large, HiGHS is asked (``solve.integer_program``) if its program is small enough; else two axes at a time are minimised
(``axis_pairs``), and what is found so is proved, or what its cost leaves of the choices is handed to HiGHS
(``solve.hubs``).
"""

from __future__ import annotations

from collections.abc import Sequence

from autoparallel.decisions.decisions import RECOMPUTED, Estimate
from autoparallel.decisions.parameters import ParameterPlan, PlanError
from autoparallel.placements import Invariant, format_layout
from autoparallel.placements.modes import INVARIANT_MODE
from autoparallel.plan import Plan
from autoparallel.planner.axis_pairs import minimise_by_pairs
from autoparallel.planner.infeasible import explain_limit
from autoparallel.planner.solve.budget import Budget
from autoparallel.planner.solve.elimination import Infeasible, Solution, TooWide
from autoparallel.planner.solve.factors import Allowance, Factors, evaluate
from autoparallel.planner.solve.hubs import prove
from autoparallel.planner.solve.integer_program import solve_if_small
from autoparallel.planner.solve.layered import minimise
from autoparallel.planner.space.problem import Problem
from autoparallel.planner.thresholds import THRESHOLDS


def cheapest(problem: Problem, memory_limit: float | None = None, room: float = 0.0, *, sparing: bool = False) -> Plan:
    """The plan that minimises the predicted time of a step.

    Args:
        problem: the choices and their prices.
        memory_limit: bytes per device for parameters, gradients, optimizer states, gathered parameters and saved
            activations.
        room: bytes of it that are left for what the search does not add up.
        sparing: takes as little memory as possible, and among what takes as little, the least time.

    Raises:
        PlanError: when no plan satisfies the constraints or the limit.
    """
    space, objective = problem.space, problem.objective
    if sparing:
        objective = objective.joined(problem.usage.times(THRESHOLDS.sparing))
    solution = _solve(problem, objective, memory_limit, room)
    choices = solution.choices
    operators, shared, parameters = {}, {}, {}
    texts: dict[int, tuple[str, ...]] = {}  # of options, by id
    for node, variable in problem.variables.items():
        option = variable.options[choices[variable.number]]
        if node.op == "call_function":
            text = texts.get(id(option))
            if text is None:
                text = texts[id(option)] = tuple(map(str, space.uncut(option.modes, INVARIANT_MODE)))
            operators[node.meta["key"]] = text
        elif node.name in space.captured.parameters:
            layout = space.uncut(option.result, Invariant)
            gather = option.gather if any(p.kind == "S" for p in layout) else "per_step"
            parameters[space.captured.parameters[node.name]] = ParameterPlan(format_layout(layout), gather)
    for node, (layouts, number) in problem.readers.items():
        result = problem.variables[node].options[choices[problem.variables[node].number]].result
        layout = space.uncut(layouts[choices[number]], Invariant)
        if layout != space.uncut(result, Invariant):
            shared[node.meta["key"]] = format_layout(layout)
    cost = evaluate(problem.factors, choices)
    return Plan(
        mesh=space.mesh,
        origin=space.preset,
        fingerprint=space.subject.fingerprint,
        operators=operators,
        shared=shared,
        parameters=parameters,
        unruled=dict(space.unruled),
        recompute={layer: RECOMPUTED[choices[n] - 1] for layer, n in problem.again.items() if choices[n]},
        linear_chunks=_linear_chunks(problem, choices),
        cost=cost,
        lower_bound=0.0 if sparing else min(solution.bound, cost),
        estimate=_estimate(problem, choices),
    )


def _linear_chunks(problem: Problem, choices: Sequence[int]) -> int:
    """The number of chunks of linear layers that hides most."""
    hidden = {count: evaluate(factors, choices) for count, factors in problem.hidden.items()}
    best = max(hidden, key=lambda count: hidden[count], default=1)
    return best if hidden and hidden[best] > 0 else 1


def _estimate(problem: Problem, choices: Sequence[int]) -> Estimate:
    names, shares = problem.captured.parameters, problem.shares(problem.factors, choices)
    parameters = {names[node.name]: seconds for node, seconds in shares.items() if node.name in names}
    return Estimate(evaluate(problem.usage, choices), parameters)


def _solve(problem: Problem, objective: Factors, memory_limit: float | None, room: float) -> Solution:
    """The choices that minimise an objective."""
    budget = None if memory_limit is None else (problem.usage, memory_limit - room)

    def solve(sizes: Sequence[int], factors: Factors, budget: Allowance | None) -> Solution:
        try:
            if budget is None:
                return minimise(sizes, factors, problem.layers)
            usage, limit = budget
            whole = factors is problem.objective  # which is searched within several limits
            return (problem.budget if whole else Budget(sizes, factors, usage, problem.layers)).within(limit)
        except TooWide:
            assignment = solve_if_small(sizes, factors, budget)
            if assignment is None:
                raise
            return assignment

    try:
        try:
            return solve(problem.sizes, objective, budget)
        except TooWide:
            if len(problem.space.axis_sizes) < 2:
                raise
        choices = minimise_by_pairs(problem, objective, solve, budget)
        return prove(problem.sizes, objective, choices, budget, problem.layers)
    except TooWide as error:
        message = "the model's tensors depend on each other in too many ways to be planned on this mesh: use fewer axes"
        raise PlanError(f"{message}, or pin some parameters ({error})") from error
    except Infeasible as error:
        if memory_limit is not None and error.variable is None:
            raise PlanError(explain_limit(error, problem, memory_limit, room)) from error
        node = problem.node_of(error.variable)
        options = problem.variables[node].options if node is not None else ()
        raise PlanError(problem.space.conflict(node, options)) from error
