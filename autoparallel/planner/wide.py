"""Graphs whose tables grow too large: exact over two mesh axes at a time, and a bound that does not depend on it.

[Note: wide graphs] Elimination makes tables over several tensors at once, and on three axes a tensor has hundreds of
layouts.  Where that is too much, the search minimises over two axes with the others held, each pair in turn, until none
improves: every round can only lower the cost.  The bound comes from the whole problem: where a table would be too
large, what is added up in it is minimised in several parts, each by itself (mini-buckets; Dechter and Rish, Journal of
the ACM 50, 2003), which can only be too low; costs are moved between the parts first, so that they agree as far as they
can.

[Note: hubs] A graph is mostly wide because all layers read the same few tensors: the encoder's output, a bias, a tied
embedding.  Such a hub is eliminated last, which gives a bound for each of its states.  States whose bound is above the
cost of the plan that is known are in no better plan and are dropped, which narrows the graph, so that the next hub's
bounds come closer; in the end the plan is proved, or the rest is minimised exactly, by elimination or by HiGHS.
Nothing is dropped that could be in an optimal plan.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence

import numpy as np
from torch import fx

from autoparallel.placements import Layout
from autoparallel.planner.elimination import Infeasible, Solution, TooWide
from autoparallel.planner.factors import Array, Factor, Factors, evaluate
from autoparallel.planner.integer_program import solve_if_small
from autoparallel.planner.options import Option
from autoparallel.planner.problem import Problem
from autoparallel.planner.solver import FoldedNetwork, minimise

Solve = Callable[[Sequence[int], Factors, Factors, bool], Sequence[int]]
"""Minimises costs; with the flag, within the limit on usage."""

States = np.ndarray

BOUND_TABLE = 50_000_000
"""Entries of the largest sum of tables for a first bound; these are never all in memory."""

NARROWED_TABLE = 8 * BOUND_TABLE
"""The same once two hubs have lost states: what is left is smaller, and worth a closer look."""

CLOSE = 0.01
"""The gap below which a plan is near enough to the bound not to be looked at further."""

_ROUNDING = 1e-9  # relative difference of costs below which they count as equal

LOOKS = 4
"""How often a hub is looked at."""


def minimise_by_pairs(problem: Problem, axis_sizes: Sequence[int], solve: Solve, limited: bool) -> list[int]:
    """The best assignment found by minimising over two mesh axes at a time (see [Note: wide graphs]), or one at a time
    where two are too wide, too.

    The largest axes come first.  With a limit, one round without it says where to start.
    """
    if len(axis_sizes) > 2:
        with contextlib.suppress(TooWide):
            return _minimise_in_turn(problem, axis_sizes, solve, limited, 2)
    return _minimise_in_turn(problem, axis_sizes, solve, limited, 1)


def _minimise_in_turn(
    problem: Problem, axis_sizes: Sequence[int], solve: Solve, limited: bool, together: int
) -> list[int]:
    axes = range(len(axis_sizes))
    groups = list(itertools.combinations(axes, together))
    groups.sort(key=lambda free: -math.prod([axis_sizes[axis] for axis in free]))
    best: list[int] = []
    held: dict[fx.Node, Option] = {}
    for within in (False, True) if limited else (False,):
        least, idle = float("inf"), 0
        last = within == limited
        for turn, free in enumerate(itertools.cycle(groups)):
            if idle == len(groups) - 1 if last else turn == len(groups):
                break
            kept = _kept(problem, held, [axis for axis in axes if axis not in free])
            sizes = [len(states) for states in kept]
            found = solve(sizes, _sliced(problem.factors, kept), _sliced(problem.usage, kept), within)
            choices = [int(states[choice]) for states, choice in zip(kept, found, strict=True)]
            cost = evaluate(problem.factors, choices)
            idle += 1
            if cost < least:
                idle = 0 if cost < least * (1 - _ROUNDING) else idle
                best, least = choices, cost
                held = {n: v.options[choices[v.number]] for n, v in problem.variables.items()}
    return best


def prove(
    sizes: Sequence[int],
    factors: Iterable[Factor],
    choices: Sequence[int],
    budget: tuple[Factors, float] | None = None,
) -> tuple[Sequence[int], float]:
    """The best assignment known, and what none costs less than (see [Note: hubs]).

    Args:
        choices: an assignment.
        budget: a second sum, and what it may be at most.
    """
    factors = Factors.of(factors)
    cost = evaluate(factors, choices)
    whole = {size: np.arange(size) for size in set(sizes)}  # alike stays alike, so that it folds
    kept: list[States] = [whole[size] for size in sizes]
    left, bound = factors, -np.inf
    last: int | None = None
    for look in range(LOOKS):
        counts = [len(states) for states in kept]
        last = _hub(counts, left, last)
        most = BOUND_TABLE if look < 2 else NARROWED_TABLE
        folded = FoldedNetwork(counts, left, max_table=most, relax=True, kept=last)
        if last is None or folded.kept is None:
            bound = max(bound, folded.bound())
            break
        bounds = folded.bounds()
        bound = max(bound, float(bounds.min()))
        if bound >= cost * (1 - CLOSE):
            return choices, min(bound, cost)
        kept[last] = kept[last][np.flatnonzero(bounds <= cost * (1 + _ROUNDING))]
        left = _sliced(factors, kept)
    if bound >= cost * (1 - CLOSE):
        return choices, min(bound, cost)
    within = None if budget is None else (_sliced(budget[0], kept), budget[1])
    rest = _minimise_rest([len(states) for states in kept], left, within)
    if rest is None:
        return choices, min(bound, cost)
    found, least = rest
    if found.cost < cost:
        choices = [int(states[choice]) for states, choice in zip(kept, found.choices, strict=True)]
    return choices, min(max(bound, least), cost, found.cost)


def _minimise_rest(
    sizes: Sequence[int], factors: Factors, budget: tuple[Factors, float] | None
) -> tuple[Solution, float] | None:
    """The best assignment of the states that are left, and what none of them costs less than; None where unknown."""
    if budget is None:
        with contextlib.suppress(TooWide):
            found = minimise(sizes, factors)
            return found, found.cost
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


def _kept(problem: Problem, held: dict[fx.Node, Option], axes: Sequence[int]) -> list[States]:
    """Of every variable the states that are, on some axes, what is held there."""
    kept: list[States] = [np.arange(size) for size in problem.sizes]
    known: dict[Hashable, States] = {}
    left: dict[fx.Node, list[Option]] = {}
    for node, variable in problem.variables.items():
        own = held.get(node)
        key = id(variable.options), tuple([_on(own, axis) for axis in axes])
        if key not in known:
            agree = [all(_agrees(o, own, axis) for axis in axes) for o in variable.options]
            known[key] = np.flatnonzero(agree) if any(agree) else np.arange(len(agree))
        kept[variable.number] = known[key]
        left[node] = [variable.options[i] for i in known[key]]
    readers: dict[fx.Node, set[Layout]] = {node: {o.result for o in left[node]} for node in problem.readers}
    for node, options in left.items():
        for i, operand in enumerate(problem.operands(node)):
            if operand in readers:
                readers[operand] |= {o.needs[i] for o in options}
    for node, (layouts, number) in problem.readers.items():
        which = tuple([i for i, layout in enumerate(layouts) if layout in readers[node]])
        kept[number] = known.setdefault(("layouts", which), np.array(which))
    return kept


def _on(option: Option | None, axis: int) -> Hashable:
    if option is None:
        return None
    return option.modes[axis] if option.modes else option.result[axis]


def _agrees(option: Option, held: Option | None, axis: int) -> bool:
    """Whether an option is, on one axis, what is held there; before anything is held, whole."""
    if held is None:
        return (option.modes[axis] if option.modes else option.result[axis]).kind == "I"
    return _on(option, axis) == _on(held, axis)


def _sliced(factors: Factors, kept: Sequence[States]) -> Factors:
    """The tables over the states that are left; a table that is used twice stays one table."""
    out = Factors()
    names = [id(states) for states in kept]
    for table, places in zip(factors.tables, factors.places, strict=True):
        known: dict[Hashable, Array] = {}
        for scope in places:
            key = tuple([names[v] for v in scope])
            if key not in known:
                whole = all(len(kept[v]) == size for v, size in zip(scope, table.shape, strict=True))
                known[key] = table if whole else table[np.ix_(*[kept[v] for v in scope])]
            out.add(scope, known[key])
    return out
