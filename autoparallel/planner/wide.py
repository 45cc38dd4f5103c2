"""Graphs whose tables grow too large: exact over two mesh axes at a time, and a bound that does not depend on it.

[Note: wide graphs] Elimination makes tables over several tensors at once, and on three axes a tensor has hundreds of
layouts.  Where that is too much, the search minimises over two axes with the others held, each pair in turn, until none
improves: every round can only lower the cost.  The bound comes from the whole problem: where a table would be too
large, what is added up in it is minimised in several parts, each by itself (mini-buckets; Dechter and Rish, Journal of
the ACM 50, 2003), which can only be too low.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence

import numpy as np
from torch import fx

from autoparallel.placements import Layout
from autoparallel.planner.elimination import Array, Factor, evaluate
from autoparallel.planner.options import Option
from autoparallel.planner.problem import Problem

Solve = Callable[[Sequence[int], Sequence[Factor], Sequence[Factor], bool], Sequence[int]]
"""Minimises costs; with the flag, within the limit on usage."""

States = np.ndarray


def minimise_by_pairs(problem: Problem, axes: int, solve: Solve) -> list[int]:
    """The best assignment found by minimising over two mesh axes at a time (see [Note: wide graphs])."""
    best: list[int] = []
    least = float("inf")
    held: dict[fx.Node, Option] = {}
    limited = False
    while True:
        before = least
        for free in itertools.combinations(range(axes), min(2, axes - 1)):
            kept = _kept(problem, held, [axis for axis in range(axes) if axis not in free])
            sizes = [len(states) for states in kept]
            found = solve(sizes, _sliced(problem.factors, kept), _sliced(problem.usage, kept), limited)
            choices = [int(states[choice]) for states, choice in zip(kept, found, strict=True)]
            cost = evaluate(problem.factors, choices)
            if cost < least or not best:
                best, least = choices, cost
                held = {n: v.options[choices[v.number]] for n, v in problem.variables.items()}
        if limited and least >= before * (1 - 1e-9):
            return best
        if not limited:
            limited, least = True, float("inf")  # what came before may be over the limit


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


def _sliced(factors: Sequence[Factor], kept: Sequence[States]) -> list[Factor]:
    """The tables over the states that are left; a table that is used twice stays one table."""
    known: dict[Hashable, Array] = {}
    out = []
    for factor in factors:
        key = (id(factor.cost), *[id(kept[v]) for v in factor.variables])
        if key not in known:
            known[key] = factor.cost[np.ix_(*[kept[v] for v in factor.variables])]
        out.append(Factor(factor.variables, known[key]))
    return out
