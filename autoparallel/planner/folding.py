"""Repeated stretches of a factor graph, so that what repeats is eliminated once.

The layers of a model are copies of each other: the same variables, the same tables, the same neighbours.

    numbers    0 1 | 2 3 4 | 5 6 7 | 8 9 10 | 11 12        three copies of three variables, [2, 11)
                         4 - 5     7 - 8                   a copy's last variable meets the next copy's first

[Note: folding] The variables of a copy that nothing outside of it mentions are eliminated in one copy; the tables that
are left, over the variables where copies meet, stand for every copy.  What remains is a chain of these few variables.
Nothing is assumed of the answer: each copy still takes its own states, so the minimum is that of the unfolded graph,
whatever is added up, bytes under a multiplier included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoparallel.planner.factors import Scopes

_MOST_PERIODS = 64  # distances between like variables that are looked at
_LEAST_SAVED = 8  # variables that a fold must save to be worth it


@dataclass(frozen=True)
class Repeat:
    """Copies of a stretch of variables.

    Attributes:
        start: the first variable of the first copy.
        period: the variables of one copy.
        count: how many copies there are.
        kept: the places in a copy (from 0) that others mention: the next copy, or what is outside of all.
    """

    start: int
    period: int
    count: int
    kept: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + self.period * self.count


@dataclass(frozen=True, eq=False)
class Terms:
    """One table and everywhere it stands.

    Attributes:
        table: which it is among all different tables.
        scopes: for each place a row of its variables, in ascending order.
    """

    table: int
    scopes: Scopes


class _Closed:
    """The tables that each variable closes, which are those that it is the last variable of.

    Attributes:
        start: of each variable, its first entry in the other attributes; they have one entry for every table at every
            place, by the variable that closes it, and in the same order for variables that are alike.
        owner: that variable.
        table: which table.
        scopes: its variables, in ascending order, filled up with the last one.
    """

    def __init__(self, count: int, terms: Sequence[Terms]) -> None:
        terms = [term for term in terms if term.scopes.shape[1]]
        width = max([term.scopes.shape[1] for term in terms], default=1)
        scopes = [t.scopes[:, [*range(t.scopes.shape[1]), *[-1] * (width - t.scopes.shape[1])]] for t in terms]
        self.scopes = np.concatenate([np.zeros((0, width), dtype=np.intp), *scopes])
        self.table = np.repeat([t.table for t in terms], [len(t.scopes) for t in terms]).astype(np.intp)
        self.owner = self.scopes[:, -1]
        steps = [self.owner - self.scopes[:, i] for i in range(width - 1)]
        order = np.lexsort((*reversed(steps), self.table, self.owner))
        self.scopes, self.table, self.owner = self.scopes[order], self.table[order], self.owner[order]
        self.start = np.searchsorted(self.owner, np.arange(count + 1))

    def kinds(self, sizes: Sequence[int]) -> np.ndarray:
        """A number for each variable, the same for those with as many states that close the same tables."""
        tables, step = self.table.tobytes(), self.table.itemsize
        ends = (self.start * step).tolist()
        numbers: dict[tuple[int, bytes], int] = {}
        own = zip(sizes, ends[:-1], ends[1:], strict=True)
        return np.array([numbers.setdefault((size, tables[a:b]), len(numbers)) for size, a, b in own], dtype=np.intp)

    def entries(self, begin: int, end: int) -> slice:
        """Those of the variables ``begin <= v < end``."""
        return slice(int(self.start[begin]), int(self.start[end]))

    def like(self, owner: np.ndarray, own: slice, other: np.ndarray) -> np.ndarray:
        """The entries of other variables that are at the same place among theirs."""
        return np.arange(own.start, own.stop) - self.start[owner] + self.start[other]

    def moved(self, begin: int, end: int, period: int) -> np.ndarray:
        """Whether the tables that each of some variables closes are those of the one a period before, moved along.

        The variables must be of the kinds of those a period before.
        """
        own = self.entries(begin, end)
        owner = self.owner[own]
        steps = self.scopes[own] - self.scopes[self.like(owner, own, owner - period)]
        wrong = ((steps != period) & (steps != 0)).any(axis=1)
        return np.bincount(owner[wrong] - begin, minlength=end - begin) == 0


def find_repeats(sizes: Sequence[int], terms: Sequence[Terms]) -> list[Repeat]:
    """The repeated stretches that save most, none overlapping, in order.

    Two variables are alike when they have as many states and close the same tables; a table is closed by its last
    variable.  A stretch is a copy of the one before it when its variables are alike, one by one, and every table's
    other variables are moved along, or are the very same ones outside.
    """
    closed = _Closed(len(sizes), terms)
    kinds = closed.kinds(sizes)
    found: list[Repeat] = []
    free = np.ones(len(sizes), dtype=bool)
    for period in _periods(kinds):
        alike = (kinds[period:] == kinds[:-period]) & free[period:] & free[:-period]
        for begin, end in _runs(alike, period):
            for first, last in _runs(closed.moved(begin + period, end + period, period), period):
                repeat = _best_cut(sizes, closed, begin + first, begin + last + period, period)
                if repeat is not None:
                    found.append(repeat)
                    free[repeat.start : repeat.stop] = False
    return sorted(found, key=lambda repeat: repeat.start)


def _runs(flags: np.ndarray, least: int) -> list[tuple[int, int]]:
    """Where at least so many flags in a row are true."""
    ends = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]])))
    return [(int(a), int(b)) for a, b in ends.reshape(-1, 2) if b - a >= least]


def _periods(kinds: np.ndarray) -> list[int]:
    """Distances at which like variables follow each other, those that explain most variables first."""
    order = np.argsort(kinds, kind="stable")
    steps = np.diff(order)[np.diff(kinds[order]) == 0]
    distances, votes = np.unique(steps, return_counts=True)
    known = zip(distances.tolist(), votes.tolist(), strict=True)
    likely = [p for p, _ in sorted(known, key=lambda known: (-known[1] * min(known[0], 8), known[0]))[:_MOST_PERIODS]]

    def explained(period: int) -> int:
        """How many variables lie in runs of at least one more copy."""
        ends = np.flatnonzero(np.concatenate([[True], kinds[period:] != kinds[:-period], [True]]))
        runs = np.diff(ends) - 1
        return int(runs[runs >= period].sum())

    scored = [(explained(period), period) for period in likely]
    return [period for score, period in sorted(scored, key=lambda s: (-s[0], s[1])) if score]


def _best_cut(sizes: Sequence[int], closed: _Closed, begin: int, end: int, period: int) -> Repeat | None:
    """Where to cut a run of copies, so that copies meet in as few states as can be.

    The run is ``[begin, end)``; from ``begin + period`` on, every variable is like the one a period before.
    """
    count = (end - begin) // period
    if period * (count - 1) < _LEAST_SAVED:
        return None
    reach = np.arange(len(sizes))  # the last variable that meets each, among the first copies
    own = closed.entries(begin, min(end, begin + 3 * period))
    for i in range(closed.scopes.shape[1] - 1):
        np.maximum.at(reach, closed.scopes[own, i], closed.owner[own])
    logs = np.log(np.array(sizes, dtype=np.float64))

    def crossing(start: int) -> float:
        copy = slice(start, start + period)
        return float(logs[copy][reach[copy] >= start + period].sum())

    start = min(range(begin, begin + (end - begin) % period + 1), key=crossing)
    stop = start + period * count
    own = closed.entries(start, len(sizes))
    v = closed.owner[own]
    second = start + period + (v - start) % period  # as the second copy meets what is around it
    like = closed.scopes[closed.like(v, own, np.where(v < stop, second, v))]
    kept: set[int] = set()
    for i in range(closed.scopes.shape[1] - 1):
        u, w = closed.scopes[own, i], like[:, i]
        within, later, outside = v < stop, v >= start + period, u < start
        ahead = np.where(outside, 0, (v - start) // period - (u - start) // period)
        if (outside & within & later & (u != w)).any():
            return None  # it is met by one copy and not by the next
        if (~outside & within & ((ahead > 1) | later & (v - u != second - w))).any():
            return None
        met = ~outside & np.where(within, ahead > 0, u < stop)
        kept.update(((u[met] - start) % period).tolist())
    return Repeat(start, period, count, tuple(sorted(kept))) if len(kept) < period else None
