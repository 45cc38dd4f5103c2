"""Exact minimisation within a budget: one limit on a second sum of tables.

[Note: budgets] `Budget` puts one limit on a second sum of tables. Relaxing it with a multiplier m >= 0
leaves the unconstrained problem cost + m * usage. Its minimum less m * limit is a lower bound for every m; the best m
is found by intersecting the lines of the cheapest infeasible and the best feasible solution until no solution lies
below the intersection. What remains between bound and solution is narrowed by mixing the two solutions: as many of the
last layers as fit are those of the cheaper one, so that layers that are alike take one of two answers; then independent
parts are exchanged. Only where that leaves more than a little, each variable is looked at by itself. A gap may be left.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from autoparallel.planner.solve.elimination import Infeasible, Network, Solution
from autoparallel.planner.solve.factors import Array, Factor, Factors, evaluate
from autoparallel.planner.solve.kinds import Layers
from autoparallel.planner.solve.layered import LayeredNetwork

_LINE_STEPS = 60  # multipliers tried at most; each step ends at a new vertex of the dual, so few are needed
_CLOSE = 0.01  # the gap below which variables are not looked at one by one
_LOCAL_MOVES = 1000  # improving changes applied at most after the dual is solved
_ROUNDING = 1e-12  # relative difference of costs below which they count as equal


class Budget:
    """Two sums of tables, of which one is minimised within limits on the other; what no limit changes is made once."""

    def __init__(
        self,
        sizes: Sequence[int],
        factors: Iterable[Factor],
        usage: Iterable[Factor],
        layers: Layers = (),
    ) -> None:
        self._sizes, self._layers = sizes, layers
        self._factors, self._usage = Factors.of(factors), Factors.of(usage)
        forbidden, self._finite = self._usage.split()
        self._forbidding = self._factors.joined(forbidden)
        self._by_multiplier: dict[float, Sequence[int]] = {}
        self._network = LayeredNetwork(sizes, self._forbidding, self._finite, layers)

    def within(self, limit: float) -> Solution:
        """The cheapest assignment found whose usage is at most `limit`, with a lower bound on the best.

        See [Note: budgets]. Where bound and cost agree the solution is optimal. An infinite usage forbids an entry.
        Raises `Infeasible` with the smallest achievable usage where that is above the limit.
        """
        low = self._cheapest  # the cheapest known above the limit
        low_cost, low_usage = self.totals(low)
        if low_usage <= limit:
            return self._result(low, low_cost)
        high = self._smallest  # the best known within the limit
        high_cost, high_usage = self.totals(high)
        if high_usage > limit:
            message = f"the smallest usage that any assignment achieves is {high_usage:g}, above the limit {limit:g}"
            raise Infeasible(message, smallest_usage=high_usage, choices=high)
        bound = low_cost
        for _ in range(_LINE_STEPS):
            slope = (high_cost - low_cost) / (low_usage - high_usage)
            if slope <= 0.0:
                break
            middle = self._cheapest_at(slope)
            cost, used = self.totals(middle)
            dual = cost + slope * (used - limit)
            bound = max(bound, dual)
            intersection = high_cost + slope * (high_usage - limit)
            if dual >= intersection - _ROUNDING * (abs(cost) + slope * abs(used)):
                break
            if used <= limit:
                high, high_cost, high_usage = middle, cost, used
            else:
                low, low_cost, low_usage = middle, cost, used
        search = _LocalSearch(self, high, limit)
        search.adopt_layers(low, self._layers)
        search.adopt_parts(low)
        if search.cost - bound > _CLOSE * abs(search.cost):
            search.improve()
        return self._result(search.choices, bound)

    @cached_property
    def tables(self) -> Network:
        """The tables of both sums, by the variables that they are over."""
        return Network(self._sizes, self._forbidding, self._finite)

    def totals(self, choices: Sequence[int]) -> tuple[float, float]:
        """What both sums are."""
        return evaluate(self._forbidding, choices), evaluate(self._finite, choices)

    @cached_property
    def _cheapest(self) -> Sequence[int]:
        return self._network.solve()

    @cached_property
    def _smallest(self) -> Sequence[int]:
        return self._network.solve(lambda table: np.where(np.isinf(table), np.inf, 0.0), 1.0)

    def _cheapest_at(self, multiplier: float) -> Sequence[int]:
        """The assignment that is best at a price of usage."""
        if multiplier not in self._by_multiplier:
            self._by_multiplier[multiplier] = self._network.solve(multiplier=multiplier)
        return self._by_multiplier[multiplier]

    def _result(self, choices: Sequence[int], bound: float) -> Solution:
        cost = evaluate(self._factors, choices)
        return Solution(tuple(choices), cost, min(bound, cost))


class _LocalSearch:
    """Changes of one or two variables that lower the first sum and keep the second within its limit."""

    def __init__(self, budget: Budget, choices: Sequence[int], limit: float) -> None:
        self.network, self.totals = budget.tables, budget.totals
        self.choices = list(choices)
        self.limit = limit
        self.cost, self.usage = self.totals(choices)

    def _accept(self, changes: dict[int, int]) -> bool:
        """Make the changes if, added up anew, the assignment is within the limit and cheaper."""
        choices = list(self.choices)
        for v, state in changes.items():
            choices[v] = state
        cost, usage = self.totals(choices)
        if usage > self.limit or not cost < self.cost - _ROUNDING * abs(self.cost):
            return False
        self.choices, self.cost, self.usage = choices, cost, usage
        return True

    def adopt_layers(self, other: Sequence[int], layers: Layers) -> None:
        """Take over as many of the last layers of a cheaper assignment as fit."""
        outermost = [path[0] if path else None for path in layers]
        order = list(dict.fromkeys(layer for layer in outermost if layer is not None))
        before = list(self.choices)

        def mixed(first: int) -> dict[int, int]:
            last = {*order[first:]}
            return {v: other[v] for v, layer in enumerate(outermost) if layer in last and before[v] != other[v]}

        def over(first: int) -> bool:
            changes = mixed(first)
            return self.totals([changes.get(v, state) for v, state in enumerate(before)])[1] > self.limit

        first = bisect.bisect_left(range(len(order)), True, key=lambda i: not over(i))
        while first < len(order) and not self._accept(mixed(first)):
            first += 1

    def adopt_parts(self, other: Sequence[int]) -> None:
        """Take over connected parts of a cheaper assignment, the largest gain first, as far as they fit."""
        differing = {v for v, (here, its) in enumerate(zip(self.choices, other, strict=True)) if here != its}
        parts: list[tuple[int, int, float, dict[int, int]]] = []
        while differing:
            part, frontier = [], [min(differing)]
            differing.discard(frontier[0])
            while frontier:
                part.append(frontier.pop())
                near = sorted(self.network.neighbours(part[-1]) & differing)
                differing.difference_update(near)
                frontier.extend(near)
            changes = {v: other[v] for v in sorted(part)}
            cost, usage = self.network.change(self.choices, changes)
            # Of equal gains the last first: what the first layers save lives longest.
            if math.isfinite(cost):
                parts.append((round(cost / (_ROUNDING * abs(self.cost) or 1.0)), -min(part), usage, changes))
        for gain, _, usage, changes in sorted(parts, key=lambda part: part[:2]):
            if gain < 0 and usage <= self.limit - self.usage:
                self._accept(changes)

    def improve(self) -> None:
        """Makes single changes, then exchanges of two variables that are apart, while any helps."""
        sizes = self.network.sizes
        variable = np.repeat(np.arange(len(sizes)), sizes)
        offset = np.concatenate([[0], np.cumsum(sizes)])
        changes = np.empty((2, len(variable)))  # of cost and usage, by variable and state
        stale = set(range(len(sizes)))
        for _ in range(_LOCAL_MOVES):
            for v in stale:
                for number in (0, 1):
                    column = self.network.conditional(number, self.choices, v)
                    changes[number, offset[v] : offset[v + 1]] = column - column[self.choices[v]]
            before = self.choices
            move = self._single(changes[0], changes[1]) or self._exchange(changes[0], changes[1], variable)
            moved = {int(variable[m]): int(m - offset[variable[m]]) for m in move}
            if not (moved and self._accept(moved)):
                return
            stale = {v for v, state in enumerate(self.choices) if state != before[v]}
            stale |= {u for v in stale for u in self.network.neighbours(v)}

    def _single(self, cost: Array, usage: Array) -> tuple[int, ...]:
        fits = np.where(usage <= self.limit - self.usage, cost, np.inf)
        best = int(fits.argmin())
        return (best,) if fits[best] < -_ROUNDING * abs(self.cost) else ()

    def _exchange(self, cost: Array, usage: Array, variable: npt.NDArray[np.intp]) -> tuple[int, ...]:
        """A change that saves cost, paid for by the cheapest one that frees enough usage elsewhere."""
        savings = np.flatnonzero(cost < 0.0)
        by_usage = np.lexsort((cost, usage))
        prefix = np.minimum.accumulate(cost[by_usage])
        room = np.searchsorted(usage[by_usage], self.limit - self.usage - usage[savings], side="right") - 1
        gain = np.where(room >= 0, cost[savings] + prefix[np.maximum(room, 0)], np.inf)
        for i in np.argsort(gain, kind="stable"):
            if not gain[i] < -_ROUNDING * abs(self.cost):
                break
            saving = int(savings[i])
            near = self.network.neighbours(int(variable[saving])) | {int(variable[saving])}
            frees = by_usage[: room[i] + 1]
            frees = frees[~np.isin(variable[frees], list(near))]
            if len(frees):
                payer = int(frees[cost[frees].argmin()])
                if cost[saving] + cost[payer] < -_ROUNDING * abs(self.cost):
                    return saving, payer
        return ()
