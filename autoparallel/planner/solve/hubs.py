"""What a graph costs at least whose tables grow too large, and its optimum where that bound leaves little.

[Note: wide graphs] Elimination makes tables over several tensors at once, and on three axes a tensor has hundreds of
layouts.  Where a table would be too large, what is added up in it is minimised in several parts, each by itself
(mini-buckets; Dechter and Rish, Journal of the ACM 50, 2003), which can only be too low; costs are moved between the
parts first, so that they agree as far as they can.

[Note: hubs] A graph is mostly wide because all layers read the same few tensors: the encoder's output, a bias, a tied
embedding.  Such a hub is eliminated last, which gives a bound for each of its states.  States whose bound is above the
cost of the plan that is known are in no better plan and are dropped, which narrows the graph, so that the next hub's
bounds come closer; in the end the plan is proved, or the rest is minimised exactly, by elimination or by HiGHS.
Nothing is dropped that could be in an optimal plan.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence

import numpy as np

from autoparallel.planner.solve.elimination import Infeasible, Solution, TooWide
from autoparallel.planner.solve.factors import Allowance, Factor, Factors, States, evaluate
from autoparallel.planner.solve.integer_program import solve_if_small
from autoparallel.planner.solve.kinds import Layers
from autoparallel.planner.solve.layered import LayeredNetwork, minimise

BOUND_TABLE = 50_000_000
"""Entries of the largest sum of tables for a first bound; these are never all in memory."""

NARROWED_TABLE = 8 * BOUND_TABLE
"""The same once two hubs have lost states: what is left is smaller, and worth a closer look."""

CLOSE = 0.01
"""The gap below which a plan is near enough to the bound not to be looked at further."""

_ROUNDING = 1e-9  # relative difference of costs below which they count as equal

LOOKS = 4
"""How often a hub is looked at."""


def prove(
    sizes: Sequence[int],
    factors: Iterable[Factor],
    choices: Sequence[int],
    budget: Allowance | None = None,
    layers: Layers = (),
) -> Solution:
    """The best assignment known (see [Note: hubs]).

    Args:
        choices: an assignment.
        budget: a second sum, and what it may be at most.
    """
    factors = Factors.of(factors)
    cost = evaluate(factors, choices)
    whole = {size: np.arange(size) for size in set(sizes)}  # alike stays alike, so that it folds
    states_left: list[States] = [whole[size] for size in sizes]
    left, bound = factors, -np.inf
    last: int | None = None
    for look in range(LOOKS):
        counts = [len(states) for states in states_left]
        last = _hub(counts, left, last)
        most = BOUND_TABLE if look < 2 else NARROWED_TABLE
        network = LayeredNetwork(counts, left, layers=layers, max_table=most, relax=True, hub=last)
        if last is None or network.hub is None:
            bound = max(bound, network.bound())
            break
        bounds = network.bounds()
        bound = max(bound, float(bounds.min()))
        if bound >= cost * (1 - CLOSE):
            return Solution(tuple(choices), cost, min(bound, cost))
        states_left[last] = states_left[last][np.flatnonzero(bounds <= cost * (1 + _ROUNDING))]
        left = factors.restricted(states_left)
    if bound >= cost * (1 - CLOSE):
        return Solution(tuple(choices), cost, min(bound, cost))
    within = None if budget is None else (budget[0].restricted(states_left), budget[1])
    rest = _minimise_rest([len(states) for states in states_left], left, within, layers)
    if rest is not None:
        bound = max(bound, rest.bound)
        if rest.cost < cost:
            choices = [int(states[choice]) for states, choice in zip(states_left, rest.choices, strict=True)]
            cost = rest.cost
    return Solution(tuple(choices), cost, min(bound, cost))


def _minimise_rest(sizes: Sequence[int], factors: Factors, budget: Allowance | None, layers: Layers) -> Solution | None:
    """The best assignment of the states that are left; None where it is not known."""
    if budget is None:
        with contextlib.suppress(TooWide):
            return minimise(sizes, factors, layers)
    with contextlib.suppress(Infeasible):  # by HiGHS's tolerance: the plan that is known is among them
        return solve_if_small(sizes, factors, budget)
    return None


def _hub(sizes: Sequence[int], factors: Factors, before: int | None) -> int | None:
    """The variable, other than the one before, with most neighbours and states; of equal ones the last."""
    near: list[set[int]] = [set() for _ in sizes]
    for places in factors.places:
        for scope in places:
            for v in scope:
                near[v].update([u for u in scope if sizes[u] > 1])
    free = [v for v, size in enumerate(sizes) if size > 1 and v != before]
    return min(free, key=lambda v: (-len(near[v]) * math.log(sizes[v]), -v), default=None)
