"""The minimisation of `elimination` as a 0/1 program, solved by HiGHS through scipy.

Every state of every variable has one binary, of which exactly one per variable is 1. Every table over two or more
variables has one continuous weight per finite entry, tied to the binaries by its marginals (the local polytope):

    sum over s of x[v, s] = 1                                      for every variable v
    sum of the weights of f's entries with v = s  =  x[v, s]       for every table f, each of its variables v, state s
    sum of usage <= limit                                          where there is a budget

With binary x, all weight of a table lies on the one chosen entry. Slower than elimination on graphs of small width,
but it does not grow with the width; and it shares no code with it beyond the merging of tables, so it is the referee.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy import optimize, sparse

from autoparallel.planner.elimination import Infeasible, Solution
from autoparallel.planner.factors import Factor, evaluate, merge

_LIMIT_REACHED, _INFEASIBLE = 1, 2  # scipy.optimize.milp: values of its result's status


def solve(
    sizes: Sequence[int],
    factors: Sequence[Factor],
    budget: tuple[Sequence[Factor], float] | None = None,
    *,
    time_limit: float | None = None,
) -> Solution:
    """The assignment with the smallest sum of costs; with `budget=(usage, limit)`, among those within the limit.

    Optimal up to HiGHS's tolerances (1e-6 relative). Raises `Infeasible` without naming a variable. Past `time_limit`
    seconds the best assignment found so far, or TimeoutError; but HiGHS's presolve does not always look at the clock
    (github.com/ERGO-Code/HiGHS/issues/2226), so a caller who must go on needs a process to end. The width is that of
    the largest table given.
    """
    usage, limit = budget if budget is not None else ((), math.inf)
    costs, uses = merge(sizes, factors), merge(sizes, usage)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.intp)
    states = int(offsets[-1])
    upper = np.ones(states)
    objective, weights = [np.zeros(states)], [np.zeros(states)]
    columns = states
    constant_usage = 0.0
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
            constant_usage += float(use)
        elif len(scope) == 1:
            own = slice(offsets[scope[0]], offsets[scope[0] + 1])
            objective[0][own] += np.where(allowed, cost, 0.0)
            weights[0][own] += np.where(allowed, use, 0.0)
            upper[own][~allowed] = 0.0
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
    coordinates = (np.concatenate(rows), np.concatenate(cols))
    matrix = sparse.coo_array((np.concatenate(values), coordinates), shape=(row_count, columns)).tocsr()
    constraints = [optimize.LinearConstraint(matrix, right, right)]
    weight = np.concatenate(weights)
    scale = np.abs(weight).max(initial=0.0) or 1.0  # bytes to numbers near 1, which the tolerances are made for
    if math.isfinite(limit):
        constraints.append(
            optimize.LinearConstraint(sparse.csr_array(weight[None] / scale), ub=(limit - constant_usage) / scale)
        )
    full_objective = np.concatenate(objective)
    options: dict[str, float] = {"mip_rel_gap": 0.0}
    if time_limit is not None:
        options["time_limit"] = time_limit
    result = optimize.milp(
        full_objective / (np.abs(full_objective).max(initial=0.0) or 1.0),
        integrality=np.concatenate([np.ones(states), np.zeros(columns - states)]),
        bounds=optimize.Bounds(0.0, np.concatenate([upper, np.ones(columns - states)])),
        constraints=constraints,
        options=options,
    )
    if result.status == _INFEASIBLE:
        raise Infeasible("no assignment has a finite cost" + (" within the limit" if math.isfinite(limit) else ""))
    if result.x is None:
        failure = TimeoutError if result.status == _LIMIT_REACHED else RuntimeError
        raise failure(f"HiGHS found no assignment: {result.message}")
    choices = tuple([int(result.x[offsets[v] : offsets[v + 1]].argmax()) for v in range(len(sizes))])
    return Solution(choices, evaluate(factors, choices), max([len(scope) for scope in costs], default=1) - 1)
