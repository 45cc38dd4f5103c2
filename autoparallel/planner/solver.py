"""The exact minimum of a factor graph, its repeated stretches folded (see `folding` and `elimination`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autoparallel.planner.elimination import (
    Elimination,
    Infeasible,
    Network,
    Order,
    Solution,
    Tables,
    TooWide,
    elimination_order,
)
from autoparallel.planner.factors import Array, Factor, Factors, Scope, Scopes, check_scopes, checked_cost, evaluate
from autoparallel.planner.folding import Repeat, Terms, find_repeats

MAX_TABLE = 20_000_000
"""Entries of the largest table that is made: 160 MB."""

Weigh = Callable[[Array], Array]
Mask = npt.NDArray[np.bool_]


def minimise(
    sizes: Sequence[int],
    factors: Iterable[Factor],
    *,
    max_table: int = MAX_TABLE,
    dominance: bool | None = None,
    fold: bool = True,
) -> Solution:
    """The assignment with the smallest sum of costs, exactly.

    Variable v has the states 0 .. sizes[v] - 1. Raises `TooWide` before any table with more than `max_table` entries
    would be made, `Infeasible` if no assignment has a finite cost. `dominance` says whether to prune states that
    another state can always replace; by default where elimination is long enough for it to pay. `fold` says whether
    to eliminate what repeats once. The cost is the same.
    """
    factors = Factors.of(factors)
    folded = FoldedNetwork(sizes, factors, max_table=max_table, dominance=dominance, fold=fold)
    choices = folded.solve()
    return Solution(choices, evaluate(factors, choices), folded.width)


@dataclass
class _Copy:
    """What every copy of a repeated stretch is: its tables, over its own variables and those it meets.

    Attributes:
        repeat: where the copies are.
        names: the variables of the second copy and what it meets, in ascending order.
        network: their tables; variables are numbered as in ``names``.
        order: how to eliminate those that nothing else mentions.
    """

    repeat: Repeat
    names: list[int]
    network: Network
    order: Order

    def variable(self, name: int, copy: int) -> int:
        """The variable that plays the part of `name` for another copy."""
        return name + (copy - 1) * self.repeat.period if name >= self.repeat.start else name


class FoldedNetwork:
    """A sum of tables, and a second one (usage) that a multiplier adds to it, with what repeats eliminated once.

    Attributes:
        repeats: the repeated stretches, in variables that have a choice.
        width: the largest number of other variables in a table while eliminating.
        kept: where the variable is that is kept; None where it has no choice, or is in a copy.

    With ``relax``, what is too wide is minimised in parts, and only `bound` may be asked, or, where a variable is
    ``kept``, `bounds`.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        factors: Iterable[Factor],
        usage: Iterable[Factor] = (),
        *,
        max_table: int = MAX_TABLE,
        dominance: bool | None = None,
        fold: bool = True,
        relax: bool = False,
        kept: int | None = None,
    ) -> None:
        if any(size < 1 for size in sizes):
            raise ValueError("every variable needs at least one state")
        self.free = [v for v, size in enumerate(sizes) if size > 1]
        self.sizes = [sizes[v] for v in self.free]
        self._count, self._max_table, self._dominance, self._relax = len(sizes), max_table, dominance, relax
        self._tables: list[Array] = []
        layers = self._terms(sizes, Factors.of(factors), Factors.of(usage))
        self.repeats = find_repeats(self.sizes, [t for layer in layers for t in layer]) if fold else []
        self._copies = [self._copy(repeat, layers) for repeat in self.repeats]
        repeated = np.zeros(len(self.sizes), dtype=bool)
        for repeat in self.repeats:
            repeated[repeat.start : repeat.stop] = True
        self._inner = {v for repeat in self.repeats for v in _inner(repeat)}
        self._rest = [v for v in range(len(self.sizes)) if v not in self._inner]
        place = {v: i for i, v in enumerate(self._rest)}
        self.kept = place.get(self.free.index(kept)) if kept in self.free else None
        last = set() if self.kept is None else {self.kept}
        self._network = Network(
            [self.sizes[v] for v in self._rest],
            *[self._renamed(layer, place, lambda last: ~repeated[last]) for layer in layers],
        )
        # How the copies are tied together does not depend on the multiplier.
        around = {place[u] for copy in self._copies for u in self._around(copy)} | last
        self._order = self._network.reduce(max_table, dominance, around, relax or bool(self._copies))
        scopes = [scope for layer in self._network.layers for scope in layer]
        self._ends: list[list[list[tuple[Scope, Scope]]]] = []  # by repeat, copy: scopes left there, and in the rest
        for copy in self._copies:
            left = list(self._eliminated(copy, _as_it_is, 0.0).left)
            ends = []
            for i in range(copy.repeat.count):
                moved = [(scope, tuple([place[copy.variable(copy.names[u], i)] for u in scope])) for scope in left]
                ends.append(moved)
                scopes += [tuple(sorted(where)) for _, where in moved]
            self._ends.append(ends)
        if self._copies:
            self._order = elimination_order(self._network.sizes, dict.fromkeys(scopes), max_table, last)
            if self._order.largest > max_table and not relax:
                raise TooWide(self._order.largest, max_table, self._order.largest_scope)
        self.width = max([self._order.width, *(copy.order.width for copy in self._copies)])

    def _around(self, copy: _Copy) -> set[int]:
        """The variables that some copy meets and that are not eliminated in it."""
        inner = set(copy.order.sequence)
        left = [name for u, name in enumerate(copy.names) if u not in inner]
        return {copy.variable(name, i) for name in left for i in range(copy.repeat.count)} - self._inner

    def solve(self, weigh: Weigh | None = None, multiplier: float = 0.0) -> tuple[int, ...]:
        """The assignment with the smallest sum of (weighed) costs and `multiplier` times usage."""
        parts, elimination = self._run(weigh or _as_it_is, multiplier)
        rest = [0] * len(self._rest)
        elimination.complete(rest)
        chosen = dict(zip(self._rest, self._network.original(rest), strict=True))
        for copy, part in zip(self._copies, parts, strict=True):
            self._complete(copy, part, chosen)
        choices = [0] * self._count
        for v, state in chosen.items():
            choices[self.free[v]] = state
        return tuple(choices)

    def bound(self) -> float:
        """What no assignment costs less than; its cost itself, unless tables were too large."""
        _, elimination = self._run(_as_it_is, 0.0)
        return float(sum(table for table in elimination.left.values()))

    def bounds(self) -> Array:
        """For each state of the variable that is kept, what no assignment with it costs less than."""
        _, elimination = self._run(_as_it_is, 0.0)
        assert self.kept is not None
        total = np.zeros(self._network.sizes[self.kept])
        for table in elimination.left.values():
            total = total + table
        return total

    def _most(self) -> int | None:
        return self._max_table if self._relax else None

    def _run(self, weigh: Weigh, multiplier: float) -> tuple[list[Elimination], Elimination]:
        parts = [self._eliminated(copy, weigh, multiplier) for copy in self._copies]
        tables = _weighed(self._network, weigh, multiplier)
        for part, ends in zip(parts, self._ends, strict=True):
            for moved in ends:
                for scope, where in moved:
                    message = part.left[scope]
                    ranked = tuple(sorted(where))
                    if ranked != where:
                        message = message.transpose([where.index(v) for v in ranked])
                    tables[ranked] = tables[ranked] + message if ranked in tables else message
        return parts, Elimination(self._network.sizes, tables, self._order, self._most())

    def _complete(self, copy: _Copy, part: Elimination, chosen: dict[int, int]) -> None:
        """Chooses the inner states of every copy; copies that meet the same states around them choose alike."""
        inner = set(copy.order.sequence)
        around = [u for u in range(len(copy.names)) if u not in inner]
        known: dict[tuple[int, ...], tuple[int, ...]] = {}
        for i in range(copy.repeat.count):
            met = tuple([chosen.get(copy.variable(copy.names[u], i), 0) for u in around])
            if met not in known:
                states = [0] * len(copy.names)
                for u, state in zip(around, met, strict=True):
                    states[u] = state
                part.complete(states)
                known[met] = copy.network.original(states)
            for u in range(len(copy.names)):
                name = copy.variable(copy.names[u], i)
                if name not in chosen:
                    chosen[name] = known[met][u]

    def _eliminated(self, copy: _Copy, weigh: Weigh, multiplier: float) -> Elimination:
        network = copy.network
        return Elimination(network.sizes, _weighed(network, weigh, multiplier), copy.order, self._most())

    def _terms(self, sizes: Sequence[int], *layers: Factors) -> list[list[Terms]]:
        """Tables over variables that have a choice, numbered so that the same table has the same number."""
        counts = np.array(sizes, dtype=np.intp)
        place = np.full(len(sizes), -1, dtype=np.intp)
        place[self.free] = np.arange(len(self.free))
        out: list[list[Terms]] = []
        for number, layer in enumerate(layers):
            terms: list[Terms] = []
            for table, scopes in layer.everywhere():
                check_scopes(counts, table, scopes)
                cost = checked_cost(table, scopes[0])
                if number == 0 and np.isposinf(cost).all():
                    named = f"no state of variable {scopes[0, -1]} has" if scopes.size else "nothing has"
                    raise Infeasible(f"{named} a finite cost", variable=int(scopes[0, -1]) if scopes.size else None)
                kept = [axis for axis, size in enumerate(table.shape) if size > 1]
                if not kept:
                    cost, scopes = cost * len(scopes), scopes[:1]
                scopes = place[scopes[:, kept]]
                while len(scopes):  # by the order in which the table's variables stand there; mostly one
                    order = np.argsort(scopes[0])
                    ranked = scopes[:, order]
                    ascending = (ranked[:, 1:] > ranked[:, :-1]).all(axis=1)
                    terms.append(Terms(len(self._tables), ranked[ascending]))
                    self._tables.append(_squeezed(cost, [kept[i] for i in order]))
                    scopes = scopes[~ascending]
            out.append(terms)
        return out

    def _renamed(self, terms: Iterable[Terms], place: dict[int, int], wanted: Callable[[Scopes], Mask]) -> list[Factor]:
        """Tables over other names for their variables; only those that are wanted by their last variable."""
        return [
            Factor(tuple([place[u] for u in scope]), self._tables[term.table])
            for term in terms
            for scope in (term.scopes[wanted(term.scopes[:, -1])] if term.scopes.shape[1] else term.scopes).tolist()
        ]

    def _copy(self, repeat: Repeat, layers: Sequence[Sequence[Terms]]) -> _Copy:
        second = range(repeat.start + repeat.period, repeat.start + 2 * repeat.period)

        def own(last: Scopes) -> Mask:
            return (last >= second.start) & (last < second.stop)

        layers = [[term for term in layer if term.scopes.shape[1]] for layer in layers]
        met = [t.scopes[own(t.scopes[:, -1])].ravel() for layer in layers for t in layer]
        names = sorted({*second, *np.concatenate(met).tolist()})
        place = {v: i for i, v in enumerate(names)}
        network = Network([self.sizes[v] for v in names], *[self._renamed(layer, place, own) for layer in layers])
        kept = {second[0] + k for k in repeat.kept}
        around = [place[v] for v in names if v not in second or v in kept]
        return _Copy(repeat, names, network, network.reduce(self._max_table, self._dominance, around, self._relax))


def _inner(repeat: Repeat) -> list[int]:
    """The variables of all copies that are eliminated in one."""
    inner = [k for k in range(repeat.period) if k not in repeat.kept]
    return [repeat.start + copy * repeat.period + k for copy in range(repeat.count) for k in inner]


def _as_it_is(table: Array) -> Array:
    return table


def _squeezed(cost: Array, axes: Sequence[int]) -> Array:
    """The table over some of its variables, in that order; the others have one state."""
    rest = [i for i in range(cost.ndim) if i not in axes]
    cost = cost.transpose([*axes, *rest])
    return np.array(cost.reshape(cost.shape[: len(axes)]), order="C", copy=None)


def _weighed(network: Network, weigh: Weigh, multiplier: float) -> Tables:
    tables = {scope: weigh(table) for scope, table in network.layers[0].items()}
    if multiplier:
        for scope, table in network.layers[1].items():
            weighted = multiplier * table
            tables[scope] = tables[scope] + weighted if scope in tables else weighted
    return tables
