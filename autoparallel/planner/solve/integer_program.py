"""The minimisation of `elimination` as a 0/1 program, for HiGHS.

Every state of every variable has one binary, of which exactly one per variable is 1. Every table over two or more
variables has one continuous weight per finite entry, tied to the binaries by its marginals (the local polytope):

    sum over s of x[v, s] = 1                                      for every variable v
    sum of the weights of f's entries with v = s  =  x[v, s]       for every table f, each of its variables v, state s
    sum of usage <= limit                                          where there is a budget

With binary x, all weight of a table lies on the one chosen entry. Slower than elimination on graphs of small width,
but it does not grow with the width, so wide graphs with few states are solved so; and it shares no code with it beyond
the merging of tables, so it is the referee.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from autoparallel.planner.solve import highs
from autoparallel.planner.solve.elimination import Infeasible, Solution, Tables
from autoparallel.planner.solve.factors import Allowance, Factor, Factors, evaluate, merge

MOST_COLUMNS = 600_000
"""Of a program that is worth handing to HiGHS: with so many it takes about half a minute and 2 GB."""

SECONDS = 30.0
"""How long HiGHS may look."""

_TOLERANCE = 1e-6  # of HiGHS, relative


def solve_if_small(sizes: Sequence[int], factors: Factors, budget: Allowance | None = None) -> Solution | None:
    """What `solve` finds in `SECONDS`; None where nothing, or where the program has more than `MOST_COLUMNS`.

    Raises `Infeasible`, with the smallest achievable usage where that is above the limit.
    """
    columns = sum(int(np.isfinite(table).sum()) * len(scopes) for table, scopes in factors.everywhere())
    if columns > MOST_COLUMNS:
        return None
    with contextlib.suppress(TimeoutError):
        try:
            return solve(sizes, factors, budget, seconds=SECONDS)
        except Infeasible as error:
            if budget is None:
                raise
            least = solve(sizes, factors.split()[0].joined(budget[0]), seconds=SECONDS)
            raise Infeasible(str(error), smallest_usage=least.cost, choices=least.choices) from error
    return None


def solve(
    sizes: Sequence[int],
    factors: Iterable[Factor],
    budget: tuple[Iterable[Factor], float] | None = None,
    *,
    seconds: float | None = None,
) -> Solution:
    """The assignment with the smallest sum of costs; with `budget=(usage, limit)`, among those within the limit.

    Optimal up to HiGHS's tolerances (1e-6 relative).

    Args:
        seconds: when to stop (see `highs`); then the best assignment found so far.

    Raises:
        Infeasible: without naming a variable.
        TimeoutError: when nothing was found in time.
    """
    usage, limit = budget if budget is not None else ((), math.inf)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.intp)
    program, constant_cost = _program(sizes, offsets, merge(sizes, factors), merge(sizes, usage), limit)
    answer = highs.solve(program, seconds)
    if answer.infeasible:
        raise Infeasible("no assignment has a finite cost" + (" within the limit" if math.isfinite(limit) else ""))
    if answer.x is None:
        raise TimeoutError(f"HiGHS found no assignment: {answer.message}")
    choices = tuple([int(answer.x[offsets[v] : offsets[v + 1]].argmax()) for v in range(len(sizes))])
    total, bound = evaluate(factors, choices), answer.bound + constant_cost
    return Solution(choices, total, min(total, bound - _TOLERANCE * abs(bound)))


def _program(
    sizes: Sequence[int], offsets: npt.NDArray[np.intp], costs: Tables, uses: Tables, limit: float
) -> tuple[highs.Program, float]:
    """The 0/1 program, and the cost that no choice changes.

    Args:
        offsets: the column of each variable's first binary, and behind the last one.
        costs, uses: tables by the variables they are over.
        limit: of the sum of uses.

    Raises:
        Infeasible: where a table has no finite entry.
    """
    states = int(offsets[-1])
    upper = np.ones(states)
    objective, weights = [np.zeros(states)], [np.zeros(states)]
    columns = states
    constant_cost = constant_usage = 0.0
    # The constraint matrix as coordinates: first one row per variable, then the marginals, then the budget.
    rows: list[npt.NDArray[np.intp]] = [np.repeat(np.arange(len(sizes)), sizes)]
    cols: list[npt.NDArray[np.intp]] = [np.arange(states)]
    values: list[npt.NDArray[np.float64]] = [np.ones(states)]
    row_count = len(sizes)
    for scope in costs | uses:
        shape = tuple([sizes[v] for v in scope])
        cost, use = costs.get(scope, np.zeros(shape)), uses.get(scope, np.zeros(shape))
        allowed = np.isfinite(cost) & np.isfinite(use)
        if not allowed.any():
            raise Infeasible(f"the table over variables {scope} has no finite entry")
        if not scope:
            constant_cost, constant_usage = constant_cost + float(cost), constant_usage + float(use)
        elif len(scope) == 1:
            span = slice(offsets[scope[0]], offsets[scope[0] + 1])
            objective[0][span] += np.where(allowed, cost, 0.0)
            weights[0][span] += np.where(allowed, use, 0.0)
            upper[span][~allowed] = 0.0
        else:
            entries = np.nonzero(allowed)
            count = len(entries[0])
            objective.append(cost[entries])
            weights.append(use[entries])
            for v, at in zip(scope, entries, strict=True):
                rows += [row_count + at, np.arange(row_count, row_count + sizes[v])]
                cols += [np.arange(columns, columns + count), np.arange(offsets[v], offsets[v + 1])]
                values += [np.ones(count), -np.ones(sizes[v])]
                row_count += sizes[v]
            columns += count
    right = np.zeros(row_count)
    right[: len(sizes)] = 1.0
    weight = np.concatenate(weights)
    scale = np.abs(weight).max(initial=0.0) or 1.0  # bytes to numbers near 1, which the tolerances are made for
    program = highs.Program(
        objective=np.concatenate(objective),
        upper=np.concatenate([upper, np.ones(columns - states)]),
        equal=(np.concatenate(rows), np.concatenate(cols), np.concatenate(values)),
        right=right,
        weight=weight / scale,
        most=(limit - constant_usage) / scale,
        binaries=states,
    )
    return program, constant_cost
