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

Scope = tuple[int, ...]
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


@dataclass(frozen=True)
class Term:
    """One table: which it is among all different tables, and its variables in ascending order."""

    table: int
    scope: Scope


def find_repeats(sizes: Sequence[int], terms: Sequence[Term]) -> list[Repeat]:
    """The repeated stretches that save most, none overlapping, in order.

    Two variables are alike when they have as many states and close the same tables; a table is closed by its last
    variable.  A stretch is a copy of the one before it when its variables are alike, one by one, and every table's
    other variables are moved along, or are the very same ones outside.
    """
    closed: list[list[Term]] = [[] for _ in sizes]
    for term in terms:
        if term.scope:
            closed[term.scope[-1]].append(term)
    for own in closed:
        own.sort(key=lambda term: (term.table, [term.scope[-1] - u for u in term.scope]))
    numbers: dict[object, int] = {}
    kinds = np.array(
        [
            numbers.setdefault((size, tuple([(t.table, len(t.scope)) for t in own])), len(numbers))
            for size, own in zip(sizes, closed, strict=True)
        ],
        dtype=np.int64,
    )
    found: list[Repeat] = []
    free = np.ones(len(sizes), dtype=bool)
    for period in _periods(kinds):
        alike = (kinds[period:] == kinds[:-period]) & free[period:] & free[:-period]
        for begin, end in _runs(alike, period):
            same = np.array([_moved(closed, v + period, period) for v in range(begin, end)], dtype=bool)
            for first, last in _runs(same, period):
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
    last: dict[int, int] = {}
    votes: dict[int, int] = {}
    for v, kind in enumerate(kinds.tolist()):
        if kind in last:
            votes[v - last[kind]] = votes.get(v - last[kind], 0) + 1
        last[kind] = v
    likely = sorted(votes, key=lambda p: (-votes[p] * min(p, 8), p))[:_MOST_PERIODS]

    def explained(period: int) -> int:
        """How many variables lie in runs of at least one more copy."""
        ends = np.flatnonzero(np.concatenate([[True], kinds[period:] != kinds[:-period], [True]]))
        runs = np.diff(ends) - 1
        return int(runs[runs >= period].sum())

    scored = [(explained(period), period) for period in likely]
    return [period for score, period in sorted(scored, key=lambda s: (-s[0], s[1])) if score]


def _moved(closed: Sequence[Sequence[Term]], v: int, period: int) -> bool:
    """Whether the tables that a variable closes are those of the one a period before, moved along."""
    for term, before in zip(closed[v], closed[v - period], strict=True):
        for u, w in zip(term.scope, before.scope, strict=True):
            if u - w != period and u != w:
                return False
    return True


def _best_cut(
    sizes: Sequence[int], closed: Sequence[Sequence[Term]], begin: int, end: int, period: int
) -> Repeat | None:
    """Where to cut a run of copies, so that copies meet in as few states as can be.

    The run is ``[begin, end)``; from ``begin + period`` on, every variable is like the one a period before.
    """
    count = (end - begin) // period
    if period * (count - 1) < _LEAST_SAVED:
        return None
    reach = np.arange(len(sizes))  # the last variable that meets each, among the first copies
    for v in range(begin, min(end, begin + 3 * period)):
        for term in closed[v]:
            for u in term.scope[:-1]:
                reach[u] = max(reach[u], v)
    logs = np.log(np.array(sizes, dtype=np.float64))

    def crossing(start: int) -> float:
        copy = slice(start, start + period)
        return float(logs[copy][reach[copy] >= start + period].sum())

    start = min(range(begin, begin + (end - begin) % period + 1), key=crossing)
    stop = start + period * count
    kept: set[int] = set()
    for v in range(start, len(sizes)):
        second = closed[start + period + (v - start) % period]  # as the second copy meets what is around it
        for term, like in zip(closed[v], second if v < stop else closed[v], strict=True):
            for u, w in zip(term.scope, like.scope, strict=True):
                if u < start:
                    if v < stop and v >= start + period and u != w:
                        return None  # it is met by one copy and not by the next
                elif v >= stop:
                    if u < stop:
                        kept.add((u - start) % period)
                else:
                    ahead = (v - start) // period - (u - start) // period
                    if ahead > 1 or v >= start + period and v - u != (start + period + (v - start) % period) - w:
                        return None
                    if ahead:
                        kept.add((u - start) % period)
    return Repeat(start, period, count, tuple(sorted(kept))) if len(kept) < period else None
