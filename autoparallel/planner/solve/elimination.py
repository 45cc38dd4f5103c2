"""Exact minimisation of a sum of cost tables over discrete variables.

    minimise   sum over factors f of   f.cost[x restricted to f.variables],   x[v] in 0 .. sizes[v] - 1

The method is bucket elimination (Dechter, "Bucket elimination: a unifying framework for reasoning", Artificial
Intelligence 113, 1999). To eliminate a variable, add up the tables that mention it and keep, for every choice of its
neighbours, the best it can do: one new table over the neighbours. In reverse order the choices are then read off.

    tables   (a) (a b) (b c) (a c)      eliminate c:  m(a, b) = min over c of (b c) + (a c)
             (a) (a b) m(a b)           eliminate b:  m(a)    = min over b of (a b) + m(a b)
             (a) m(a)                   eliminate a:  the minimum

Before that, two reductions that cannot change the minimum: states that no finite assignment can use are dropped (arc
consistency), and so are states which another state of the same variable can always replace at no loss (dominance;
Goldstein, "Efficient rotamer elimination", Biophysical Journal 66, 1994). Only elementwise additions and minima of
float64 are used, and ties go to the lowest index, so the same input gives the same choices on every machine. Sums of
tables are made a block at a time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autoparallel.planner.solve.factors import Array, Factor, Scope, merge

Tables = dict[Scope, Array]

_BLOCK = 1 << 16  # entries of a sum of tables that are computed at a time: half a megabyte, which stays in cache
_DOMINANCE_ROUNDS = 4  # a state that goes may expose others; later rounds find little
_DOMINANCE_STATES = 2000  # a variable with more is left alone, since every two of its states are compared
_EASY_WORK = 100_000_000  # additions below which neither dominance nor a second elimination order is worth a look
_ROUNDING = 1e-12  # relative difference of costs below which they count as equal


@dataclass(frozen=True)
class Solution:
    """An assignment.

    Attributes:
        choices: a state for each variable.
        cost: what it costs.
        bound: what none costs less than, up to rounding; the cost itself where the assignment is proved to be the best.
    """

    choices: tuple[int, ...]
    cost: float
    bound: float


class TooWide(Exception):
    """Elimination would need a table with more entries than allowed."""

    def __init__(self, entries: int, max_table: int, variables: tuple[int, ...]) -> None:
        super().__init__(f"a table over variables {variables} needs {entries} entries; max_table is {max_table}")
        self.entries = entries
        self.variables = variables


class Infeasible(Exception):
    """No assignment has a finite cost (`variable`, where known), or none is within the limit (`smallest_usage`)."""

    def __init__(
        self,
        message: str,
        *,
        variable: int | None = None,
        smallest_usage: float | None = None,
        choices: Sequence[int] | None = None,
    ) -> None:
        super().__init__(message)
        self.choices = choices  # with the smallest usage
        self.variable = variable
        self.smallest_usage = smallest_usage


class Network:
    """Tables over the states that are left. Each of its sums has tables of its own; in the first, infinity forbids."""

    def __init__(self, sizes: Sequence[int], *sums: Iterable[Factor]) -> None:
        if any(size < 1 for size in sizes):
            raise ValueError("every variable needs at least one state")
        self.states = [np.arange(size) for size in sizes]  # the original index of every state that is left
        self.sizes = list(sizes)
        self.sums = [merge(sizes, factors) for factors in sums]
        self._protected: frozenset[int] = frozenset()
        self.scopes_of: list[list[list[Scope]]] = [[[] for _ in sizes] for _ in sums]
        for tables, of in zip(self.sums, self.scopes_of, strict=True):
            for scope in tables:
                for v in scope:
                    of[v].append(scope)

    def original(self, choices: Sequence[int]) -> tuple[int, ...]:
        return tuple([int(states[choice]) for states, choice in zip(self.states, choices, strict=True)])

    def change(self, choices: Sequence[int], changes: Mapping[int, int]) -> list[float]:
        """By how much each sum grows where some variables, by number, take other states."""
        new = [changes.get(v, state) for v, state in enumerate(choices)]
        grown = []
        for tables, of in zip(self.sums, self.scopes_of, strict=True):
            met = dict.fromkeys([scope for v in changes for scope in of[v]])
            pairs = [(tables[s], tuple([new[v] for v in s]), tuple([choices[v] for v in s])) for s in met]
            grown.append(math.fsum([float(t[there]) - float(t[here]) for t, there, here in pairs]))
        return grown

    def neighbours(self, v: int) -> set[int]:
        return {u for of in self.scopes_of for scope in of[v] for u in scope if u != v}

    def conditional(self, number: int, choices: Sequence[int], v: int) -> Array:
        """What the tables of a sum that mention a variable add up to, over its states; others as chosen."""
        total = np.zeros(self.sizes[v])
        for scope in self.scopes_of[number][v]:
            total += self.sums[number][scope][tuple([slice(None) if u == v else choices[u] for u in scope])]
        return total

    def reduce(self, max_table: int, protected: Collection[int] = (), relax: bool = False) -> Order:
        """Drop states that cannot, or need not, be part of a best assignment; the order to eliminate the rest in.

        Protected variables, which something else may depend on, keep all states and are not eliminated.  With
        ``relax``, tables may become too large.
        """
        self._protected = frozenset(protected)
        self._drop_impossible()
        scopes = list(dict.fromkeys(scope for tables in self.sums for scope in tables))
        order = elimination_order(self.sizes, scopes, max_table, self._protected)
        if order.work > _EASY_WORK or order.largest > max_table:
            changed = set(range(len(self.sizes))) - self._protected
            for _ in range(_DOMINANCE_ROUNDS):
                pruned = [v for v in sorted(changed) if self._drop_dominated(v)]
                changed = {u for v in pruned for u in self.neighbours(v)} - self._protected
            order = elimination_order(self.sizes, scopes, max_table, self._protected)
        if order.largest > max_table and not relax:
            raise TooWide(order.largest, max_table, order.largest_scope)
        return order

    def _keep(self, v: int, states: npt.NDArray[np.intp]) -> None:
        self.states[v] = self.states[v][states]
        self.sizes[v] = len(states)
        for tables, of in zip(self.sums, self.scopes_of, strict=True):
            for scope in of[v]:
                tables[scope] = tables[scope].take(states, axis=scope.index(v))

    def _drop_impossible(self) -> None:
        """Arc consistency: keep a state only if every table has a finite entry for it among the states left."""
        costs, of = self.sums[0], self.scopes_of[0]
        pending = {scope: None for scope, table in costs.items() if np.isposinf(table).any()}
        restricting = set(pending)
        while pending:
            scope = next(iter(pending))
            del pending[scope]
            for axis, v in enumerate(scope):
                finite = np.isfinite(costs[scope])
                possible = finite.any(axis=tuple([other for other in range(len(scope)) if other != axis]))
                if possible.all() or v in self._protected:
                    continue
                if not possible.any():
                    raise Infeasible(f"no state of variable {v} has a finite cost", variable=v)
                self._keep(v, np.flatnonzero(possible))
                pending.update((other, None) for other in of[v] if other != scope and other in restricting)

    def _drop_dominated(self, v: int) -> bool:
        """Drop each state a for which some b costs no more, whatever the neighbours do, in every sum."""
        size = self.sizes[v]
        if not 1 < size <= _DOMINANCE_STATES:
            return False
        rows: list[list[Array]] = []  # per sum and table: one row per state of v
        promising = np.full((size, size), np.inf)  # [b, a]: the advantage of b is at most this
        for tables, of in zip(self.sums, self.scopes_of, strict=True):
            rows.append([_rows(tables[scope], scope.index(v)) for scope in of[v]])
            advantage = np.zeros((size, size))
            for row in rows[-1]:
                at_best = row.take(row.argmin(axis=1), axis=1)  # where the neighbours suit a most
                advantage += at_best.diagonal() - at_best
            np.minimum(promising, advantage, out=promising)
        np.fill_diagonal(promising, -np.inf)
        rivals = promising.argmax(axis=0)
        weak = np.flatnonzero(promising[rivals, np.arange(size)] >= 0.0)
        if not len(weak):
            return False
        rivals = rivals[weak]
        dominated = np.ones(len(weak), dtype=bool)
        for rows_of_sum in rows:
            least = np.zeros(len(weak))
            with np.errstate(invalid="ignore"):  # both forbidden: inf - inf is NaN, which fmin passes over
                for row in rows_of_sum:
                    least += np.fmin.reduce(row.take(weak, axis=0) - row.take(rivals, axis=0), axis=1)
            dominated &= least >= 0.0
        alive = np.ones(size, dtype=bool)
        for state, rival, loses in zip(weak[::-1], rivals[::-1], dominated[::-1], strict=True):
            if loses and alive[rival]:  # of equal states the lowest stays
                alive[state] = False
        if alive.all():
            return False
        self._keep(v, np.flatnonzero(alive))
        return True


def _rows(table: Array, axis: int) -> Array:
    """One row per state of the variable at the axis, one column per choice of the others."""
    if table.ndim == 2:
        return table.T if axis else table
    return np.moveaxis(table, axis, 0).reshape(table.shape[axis], -1)


@dataclass(frozen=True)
class Order:
    """In which order to eliminate the variables that have a choice."""

    sequence: list[int]
    work: int  # entries of all sums of tables
    largest: int  # entries of the largest table made
    largest_scope: Scope


def elimination_order(sizes: Sequence[int], scopes: Iterable[Scope], max_table: int, ends: Collection[int]) -> Order:
    """Smallest next table first; where that is costly, also three others, and the best of them.

    They are least new adjacency first, and along the graph from either end: each variable once its furthest neighbour
    is reached, as suits a long chain whose parts all meet the same variable.

    The ``ends`` are not in the order.
    """
    neighbours: list[set[int]] = [set() for _ in sizes]
    for scope in scopes:
        free = [v for v in scope if sizes[v] > 1]
        for v in free:
            neighbours[v].update(free)
    for v, near in enumerate(neighbours):
        near.discard(v)
    order = _greedy_order(sizes, neighbours, ends)
    if order.largest > max_table or order.work > _EASY_WORK:
        last = [max(near, default=0) for near in neighbours]
        first = [-min(near, default=0) for near in neighbours]
        along = [_greedy_order(sizes, neighbours, ends, rank) for rank in (last, first)]
        filling = _greedy_order(sizes, neighbours, ends, fill=True)
        order = min(order, filling, *along, key=lambda o: (o.largest > max_table, o.work))
    return order


def _greedy_order(
    sizes: Sequence[int],
    adjacency: list[set[int]],
    ends: Collection[int],
    rank: Sequence[int] | None = None,
    fill: bool = False,
) -> Order:
    """The order that takes the least first: by rank or new adjacency, where asked for, and by the next table."""
    near = [set(others) for others in adjacency]

    def score(v: int) -> tuple[int, int]:
        table = math.prod([sizes[u] for u in near[v]])
        if not fill:
            return rank[v] if rank is not None else 0, table
        return sum([sizes[a] * sizes[b] for a in near[v] for b in near[v] if a < b and b not in near[a]]), table

    scores = {v: score(v) for v in range(len(sizes)) if sizes[v] > 1 and v not in ends}
    heap = [(value, v) for v, value in scores.items()]
    heapq.heapify(heap)
    sequence: list[int] = []
    work = largest = 0
    largest_scope: Scope = ()
    while heap:
        value, v = heapq.heappop(heap)
        if scores.get(v) != value:  # out of date, or eliminated
            continue
        del scores[v]
        sequence.append(v)
        around = near[v]
        work += value[1] * sizes[v]
        if value[1] > largest:
            largest, largest_scope = value[1], tuple(sorted(around))
        for u in around:
            near[u] |= around
            near[u] -= {u, v}
        touched = around.union(*[near[u] for u in around]) if fill else around
        for u in touched:
            if u not in scores:
                continue
            renewed = score(u)
            if renewed != scores[u]:
                scores[u] = renewed
                heapq.heappush(heap, (renewed, u))
    return Order(sequence, work, largest, largest_scope)


class Elimination:
    """Eliminates variables in an order; what is left are tables over those that are not in it.

    Where a table would have more than ``most`` entries, its summands are minimised in parts: what is left is a lower
    bound then, and not to be completed.

    Attributes:
        left: these tables, by their variables in ascending order.
    """

    def __init__(self, sizes: Sequence[int], tables: Tables, order: Order, most: int | None = None) -> None:
        # Variables are renamed by their rank in the order, so that the next one is always axis 0; others come last.
        named = set(order.sequence)
        self._names = [*order.sequence, *(v for v in range(len(sizes)) if v not in named and sizes[v] > 1)]
        self._count = len(order.sequence)
        self.left: Tables = {}
        rank = {v: i for i, v in enumerate(self._names)}
        dims = [sizes[v] for v in self._names]
        buckets: list[Tables] = [{} for _ in dims]  # every table waits at the first of its variables
        for scope, table in tables.items():
            free = [v for v in scope if sizes[v] > 1]
            ranks = [rank[v] for v in free]
            ranked = tuple(sorted(ranks))
            table = table.reshape([sizes[v] for v in free]).transpose([ranks.index(r) for r in ranked])
            self._put(buckets, ranked, table)
        self._decisions: list[list[tuple[Scope, Array]]] = []  # the tables to add up again when a variable is chosen
        for v in range(self._count):
            parts = sorted(buckets[v].items(), key=lambda part: part[1].size)
            buckets[v] = {}
            self._decisions.append(parts)
            for group in [parts] if most is None else _match_costs(_groups(parts, dims, most), dims, v):
                rest = tuple(sorted({u for scope, _ in group for u in scope if u != v}))
                full, shape = (v, *rest), [dims[u] for u in rest]
                views = [
                    table if len(scope) == len(full) else table.reshape([dims[u] if u in scope else 1 for u in full])
                    for scope, table in group
                ]
                if not views:
                    continue
                message = np.empty(shape)
                _reduce_in_blocks(views, message)
                if np.minimum.reduce(message, axis=None) == np.inf:
                    variable = order.sequence[v]
                    what = f"no state of variable {variable} fits the variables around it"
                    raise Infeasible(what, variable=variable)
                self._put(buckets, rest, message)
        for bucket in buckets:
            for scope, table in bucket.items():
                self.left[tuple([self._names[u] for u in scope])] = table

    def _put(self, buckets: list[Tables], scope: Scope, table: Array) -> None:
        if not scope:
            self.left[()] = self.left[()] + table if () in self.left else table
            return
        bucket = buckets[scope[0]]
        bucket[scope] = bucket[scope] + table if scope in bucket else np.ascontiguousarray(table)

    def complete(self, choices: list[int]) -> None:
        """Chooses the best state of every eliminated variable, in place, given those of the others."""
        chosen = [choices[v] for v in self._names]
        for v in range(self._count - 1, -1, -1):
            parts = self._decisions[v]
            if parts:
                columns = [t[tuple([slice(None) if u == v else chosen[u] for u in scope])] for scope, t in parts]
                chosen[v] = int(_add_up(columns).argmin())
        for v, state in zip(self._names, chosen, strict=True):
            choices[v] = state


def _groups(parts: list[tuple[Scope, Array]], dims: Sequence[int], most: int) -> list[list[tuple[Scope, Array]]]:
    """Parts whose sum has at most so many entries, the largest first; one part alone may have more."""
    groups: list[tuple[set[int], list[tuple[Scope, Array]]]] = []
    for scope, table in reversed(parts):
        for variables, group in groups:
            if math.prod([dims[u] for u in variables.union(scope)]) <= most:
                variables.update(scope)
                group.append((scope, table))
                break
        else:
            groups.append((set(scope), [(scope, table)]))
    return [group for _, group in groups]


def _match_costs(
    groups: list[list[tuple[Scope, Array]]], dims: Sequence[int], v: int
) -> list[list[tuple[Scope, Array]]]:
    """The same groups, with costs moved between them until each has the same least cost for every state of ``v``.

    Their sum stays what it was, and minimising each by itself loses less, because none prefers a state of its own.
    """
    if len(groups) < 2:
        return groups
    least = []
    for group in groups:
        scope = sorted({u for of, _ in group for u in of})
        views = [table.reshape([dims[u] if u in of else 1 for u in scope]) for of, table in group]
        least.append([float(_add_up([view[state] for view in views]).min()) for state in range(dims[v])])
    low = np.array(least)
    mean = low.mean(axis=0)
    with np.errstate(invalid="ignore"):  # what one group forbids, none allows
        shifts = np.where(np.isinf(mean), np.inf, mean - low)
    return [[*group, ((v,), shift)] for group, shift in zip(groups, shifts, strict=True)]


def _add_up(tables: Sequence[Array]) -> Array:
    """Always in the same order, so that a column added up again has the very same entries."""
    total = tables[0]
    for table in tables[1:]:
        total = total + table
    return total


def _reduce_in_blocks(tables: list[Array], message: Array) -> None:
    """The minimum along axis 0 of the sum of tables, never making more of the sum than a block of it."""
    states = max(table.shape[0] for table in tables)
    axis = next((axis for axis, size in enumerate(message.shape) if size > 1), None)
    if states * message.size <= _BLOCK or axis is None:
        np.minimum.reduce(_add_up(tables), axis=0, out=message)
        return
    step = max(1, message.shape[axis] * _BLOCK // (states * message.size))
    for start in range(0, message.shape[axis], step):
        block = (slice(None),) * axis + (slice(start, start + step),)
        pieces = [table[(slice(None), *block)] if table.shape[axis + 1] > 1 else table for table in tables]
        _reduce_in_blocks(pieces, message[block])
