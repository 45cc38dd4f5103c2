"""The exact minimum of a factor graph, whose layers are eliminated once for each kind (see [Note: layers])."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from autoparallel.planner.solve.elimination import (
    Elimination,
    Infeasible,
    Network,
    Order,
    Solution,
    Tables,
    TooWide,
    elimination_order,
)
from autoparallel.planner.solve.factors import (
    Array,
    Factor,
    Factors,
    Scope,
    Scopes,
    check_scopes,
    checked_cost,
    evaluate,
)
from autoparallel.planner.solve.kinds import Kind, Layers, Terms, find_kinds

MAX_TABLE = 20_000_000
"""Entries of the largest table that is made: 160 MB."""

Weigh = Callable[[Array], Array]


def minimise(
    sizes: Sequence[int],
    factors: Iterable[Factor],
    layers: Layers = (),
    *,
    max_table: int = MAX_TABLE,
) -> Solution:
    """The assignment with the smallest sum of costs, exactly.

    Variable v has the states 0 .. sizes[v] - 1. Raises `TooWide` before any table with more than `max_table` entries
    would be made, `Infeasible` if no assignment has a finite cost. `layers` says which variables may repeat others.
    """
    factors = Factors.of(factors)
    network = LayeredNetwork(sizes, factors, layers=layers, max_table=max_table)
    choices = network.solve()
    cost = evaluate(factors, choices)
    return Solution(choices, cost, cost)


@dataclass
class _Layer:
    """What all layers of a kind are: their tables, over variables that are numbered by their places in a row.

    Attributes:
        kind: where these layers are.
        network: the tables of one.
        order: how to eliminate the inner variables.
        outer: the places of the others.
        ends: for each layer, the scopes of the tables that are left there, and the same in the rest of the graph.
    """

    kind: Kind
    network: Network
    order: Order
    outer: list[int]
    ends: list[list[tuple[Scope, Scope]]]


class LayeredNetwork:
    """A sum of tables, and a second one (usage) that a multiplier adds to it, with each kind of layers eliminated once.

    Attributes:
        kinds: the layers that are alike, in variables that have a choice.
        hub: where the variable is that is kept; None where it has no choice.

    With ``relax``, what is too wide is minimised in parts, and only `bound` may be asked, or, where a variable is
    ``hub``, `bounds`.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        factors: Iterable[Factor],
        usage: Iterable[Factor] = (),
        layers: Layers = (),
        *,
        max_table: int = MAX_TABLE,
        relax: bool = False,
        hub: int | None = None,
    ) -> None:
        if any(size < 1 for size in sizes):
            raise ValueError("every variable needs at least one state")
        self._free = [v for v, size in enumerate(sizes) if size > 1]
        self._sizes = [sizes[v] for v in self._free]
        self._count, self._most = len(sizes), max_table if relax else None
        terms, costs, constants = self._terms(sizes, Factors.of(factors), Factors.of(usage))
        last = self._free.index(hub) if hub in self._free else None
        self.kinds = find_kinds(self._sizes, terms, [layers[v] for v in self._free] if layers else (), last)
        in_layer = np.zeros(len(self._sizes), dtype=bool)
        inner = np.zeros(len(self._sizes), dtype=bool)
        for kind in self.kinds:
            in_layer[kind.members[:, : kind.own_count]] = True
            inner[kind.members[:, kind.inner]] = True
        self._rest = np.flatnonzero(~inner).tolist()
        place = {v: i for i, v in enumerate(self._rest)}
        self.hub = None if last is None else place[last]
        ends = set() if self.hub is None else {self.hub}

        def network(sizes: Sequence[int], placed: Iterable[tuple[int, Scope]], constants: Sequence[float]) -> Network:
            sums = [Factors() for _ in constants]
            for total, constant in zip(sums, constants, strict=True):
                total.add((), np.array(constant))
            for table, scope in placed:
                sums[table >= costs].add(scope, terms.tables[table])
            return Network(sizes, *sums)

        remaining = ~in_layer[terms.scopes[:, -1]]
        rows = zip(terms.table[remaining].tolist(), terms.scopes[remaining].tolist(), strict=True)
        placed = [(table, tuple([place[v] for v in terms.of(table, scope)])) for table, scope in rows]
        self._network = network([self._sizes[v] for v in self._rest], placed, constants)
        self._layers: list[_Layer] = []
        for kind in self.kinds:
            inside = network([self._sizes[v] for v in kind.members[0]], kind.tables, (0.0, 0.0))
            outer = [u for u in range(kind.members.shape[1]) if u not in kind.inner]
            order = inside.reduce(max_table, outer, relax)
            self._layers.append(_Layer(kind, inside, order, outer, []))
        # How the layers are tied together does not depend on the multiplier.
        met = {place[v] for layer in self._layers for v in layer.kind.members[:, layer.outer].ravel().tolist()} | ends
        self._order = self._network.reduce(max_table, met, relax or bool(self.kinds))
        scopes = [scope for tables in self._network.sums for scope in tables]
        for layer in self._layers:
            # With usage, which is over other variables than costs are, other tables may be left than without.
            multipliers = (0.0, 1.0) if layer.network.sums[1] else (0.0,)
            left = dict.fromkeys(s for m in multipliers for s in self._eliminate(layer, _as_it_is, m).left)
            for row in layer.kind.members.tolist():
                layer.ends.append([(scope, tuple([place[row[u]] for u in scope])) for scope in left])
                scopes += [tuple(sorted(where)) for _, where in layer.ends[-1]]
        if self.kinds:
            self._order = elimination_order(self._network.sizes, dict.fromkeys(scopes), max_table, ends)
            if self._order.largest > max_table and not relax:
                raise TooWide(self._order.largest, max_table, self._order.largest_scope)

    def solve(self, weigh: Weigh | None = None, multiplier: float = 0.0) -> tuple[int, ...]:
        """The assignment with the smallest sum of (weighed) costs and `multiplier` times usage."""
        parts, elimination = self._run(weigh or _as_it_is, multiplier)
        rest = [0] * len(self._rest)
        elimination.complete(rest)
        chosen = dict(zip(self._rest, self._network.original(rest), strict=True))
        for layer, part in zip(self._layers, parts, strict=True):
            self._complete(layer, part, chosen)
        choices = [0] * self._count
        for v, state in chosen.items():
            choices[self._free[v]] = state
        return tuple(choices)

    def bound(self) -> float:
        """What no assignment costs less than; its cost itself, unless tables were too large."""
        _, elimination = self._run(_as_it_is, 0.0)
        return float(sum(table for table in elimination.left.values()))

    def bounds(self) -> Array:
        """For each state of the variable that is kept, what no assignment with it costs less than."""
        _, elimination = self._run(_as_it_is, 0.0)
        assert self.hub is not None
        total = np.zeros(self._network.sizes[self.hub])
        for table in elimination.left.values():
            total = total + table
        return total

    def _run(self, weigh: Weigh, multiplier: float) -> tuple[list[Elimination], Elimination]:
        parts = [self._eliminate(layer, weigh, multiplier) for layer in self._layers]
        tables = _weigh(self._network, weigh, multiplier)
        for layer, part in zip(self._layers, parts, strict=True):
            for ends in layer.ends:
                for scope, where in ends:
                    if scope not in part.left:
                        continue
                    message = part.left[scope]
                    ranked = tuple(sorted(where))
                    if ranked != where:
                        message = message.transpose([where.index(v) for v in ranked])
                    tables[ranked] = tables[ranked] + message if ranked in tables else message
        return parts, Elimination(self._network.sizes, tables, self._order, self._most)

    def _complete(self, layer: _Layer, part: Elimination, chosen: dict[int, int]) -> None:
        """Chooses the inner states of every layer of a kind; layers that meet the same states choose alike."""
        assignments: dict[tuple[int, ...], tuple[int, ...]] = {}
        for row in layer.kind.members.tolist():
            met = tuple([chosen[row[u]] for u in layer.outer])
            if met not in assignments:
                states = [0] * len(row)
                for u, state in zip(layer.outer, met, strict=True):
                    states[u] = state
                part.complete(states)
                assignments[met] = layer.network.original(states)
            for u in layer.kind.inner:
                chosen[row[u]] = assignments[met][u]

    def _eliminate(self, layer: _Layer, weigh: Weigh, multiplier: float) -> Elimination:
        network = layer.network
        return Elimination(network.sizes, _weigh(network, weigh, multiplier), layer.order, self._most)

    def _terms(self, sizes: Sequence[int], *sums: Factors) -> tuple[Terms, int, list[float]]:
        """Tables over variables that have a choice, how many of them are costs, and what each sum has beside them."""
        counts = np.array(sizes, dtype=np.intp)
        place = np.full(len(sizes), -1, dtype=np.intp)
        place[self._free] = np.arange(len(self._free))
        tables: list[Array] = []
        numbers: dict[Hashable, int] = {}  # equal tables are one, whoever made them
        places: list[tuple[int, Scopes]] = []
        costs, constants = 0, [0.0 for _ in sums]
        for number, factors in enumerate(sums):
            for table, scopes in factors.everywhere():
                check_scopes(counts, table, scopes)
                cost = checked_cost(table, scopes[0])
                if number == 0 and np.isposinf(cost).all():
                    named = f"no state of variable {scopes[0, -1]} has" if scopes.size else "nothing has"
                    raise Infeasible(f"{named} a finite cost", variable=int(scopes[0, -1]) if scopes.size else None)
                axes = [axis for axis, size in enumerate(table.shape) if size > 1]
                if not axes:
                    constants[number] += float(cost.sum()) * len(scopes)
                    continue
                scopes = place[scopes[:, axes]]
                while len(scopes):  # by the order in which the table's variables stand there; mostly one
                    order = np.argsort(scopes[0])
                    ranked = scopes[:, order]
                    ascending = (ranked[:, 1:] > ranked[:, :-1]).all(axis=1)
                    squeezed = _squeeze(cost, [axes[i] for i in order])
                    which = numbers.setdefault(
                        (number, squeezed.shape, hashlib.blake2b(squeezed.data).digest()), len(tables)
                    )
                    if which == len(tables):
                        tables.append(squeezed)
                    places.append((which, ranked[ascending]))
                    scopes = scopes[~ascending]
            costs = costs if number else len(tables)
        return Terms(tables, places), costs, constants


def _as_it_is(table: Array) -> Array:
    return table


def _squeeze(cost: Array, axes: Sequence[int]) -> Array:
    """The table over some of its variables, in that order; the others have one state."""
    rest = [i for i in range(cost.ndim) if i not in axes]
    cost = cost.transpose([*axes, *rest])
    return np.array(cost.reshape(cost.shape[: len(axes)]), order="C", copy=None)


def _weigh(network: Network, weigh: Weigh, multiplier: float) -> Tables:
    tables = {scope: weigh(table) for scope, table in network.sums[0].items()}
    if multiplier:
        for scope, table in network.sums[1].items():
            weighted = multiplier * table
            tables[scope] = tables[scope] + weighted if scope in tables else weighted
    return tables
