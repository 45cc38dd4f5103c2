"""Sums of cost tables over discrete variables: what the search minimises.

A model has tens of thousands of tables, most of them the same few hundred at other places; so each is written down
once, with everywhere it stands.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Scope = tuple[int, ...]
Scopes = npt.NDArray[np.intp]
"""One row of variables for each place."""

States = npt.NDArray[np.intp]
"""Some of a variable's states, in ascending order."""


@dataclass(frozen=True, eq=False)
class Factor:
    """A cost table over one or more variables; its shape is the sizes of these variables, np.inf forbids an entry."""

    variables: Scope
    cost: Array


class Factors(Iterable[Factor]):
    """A sum of factors, by table.

    Attributes:
        tables: the different ones.
        places: the variables of each, everywhere it stands.
    """

    def __init__(self, factors: Iterable[Factor] = ()) -> None:
        self.tables: list[Array] = []
        self.places: list[list[Scope]] = []
        self._places: dict[int, list[Scope]] = {}  # by table: an id is unique while its owner lives
        self._arrays: dict[int, Scopes] = {}
        for factor in factors:
            self.add(factor.variables, factor.cost)

    @classmethod
    def of(cls, factors: Iterable[Factor]) -> Factors:
        """The same factors by table."""
        return factors if isinstance(factors, Factors) else cls(factors)

    def add(self, scope: Scope, table: Array) -> None:
        """Adds a table over some variables."""
        self.extend(table, (scope,))

    def extend(self, table: Array, places: Sequence[Scope]) -> None:
        """Adds a table at some places."""
        if places:
            before = self._places.get(id(table))
            (self._new_places(table) if before is None else before).extend(places)

    def joined(self, other: Factors) -> Factors:
        """Both sums in one."""
        out = Factors()
        for factors in (self, other):
            for table, places in zip(factors.tables, factors.places, strict=True):
                out.extend(table, places)
        return out

    def times(self, number: float) -> Factors:
        """The sum, so many times."""
        out = Factors()
        for table, places in zip(self.tables, self.places, strict=True):
            out.extend(number * table, places)
        return out

    def split(self) -> tuple[Factors, Factors]:
        """What the sum forbids, as infinite entries among zeros, and what it adds up to where it forbids nothing."""
        forbidden, finite = Factors(), Factors()
        for table, places in zip(self.tables, self.places, strict=True):
            infinite = np.isposinf(table)
            if infinite.any():
                forbidden.extend(np.where(infinite, np.inf, 0.0), places)
            finite.extend(np.where(infinite, 0.0, table) if infinite.any() else table, places)
        return forbidden, finite

    def restricted(self, states: Sequence[States]) -> Factors:
        """The tables over some states of each variable; a table that is used twice stays one table."""
        out = Factors()
        names = [id(which) for which in states]
        for table, places in zip(self.tables, self.places, strict=True):
            tables: dict[tuple[int, ...], Array] = {}
            for scope in places:
                key = tuple([names[v] for v in scope])
                if key not in tables:
                    whole = all(len(states[v]) == size for v, size in zip(scope, table.shape, strict=True))
                    tables[key] = table if whole else table[np.ix_(*[states[v] for v in scope])]
                out.add(scope, tables[key])
        return out

    def _new_places(self, table: Array) -> list[Scope]:
        """Where a table stands that is a new one: nowhere yet."""
        places = self._places[id(table)] = []
        self.tables.append(table)
        self.places.append(places)
        return places

    def everywhere(self) -> Iterator[tuple[Array, Scopes]]:
        """Every table, and where it stands as an array."""
        for number, (table, places) in enumerate(zip(self.tables, self.places, strict=True)):
            scopes = self._arrays.get(number)
            if scopes is None or len(scopes) < len(places):
                scopes = self._arrays[number] = np.array(places, dtype=np.intp).reshape(len(places), -1)
            yield table, scopes

    def entries(self, choices: Sequence[int]) -> Iterator[tuple[Scopes, Array]]:
        """Where each table stands, and its entries there at the given choices."""
        chosen = np.asarray(choices, dtype=np.intp)
        for table, scopes in self.everywhere():
            at = tuple([chosen[scopes[:, axis]] for axis in range(scopes.shape[1])])
            yield scopes, table[at] if at else np.full(len(scopes), table)

    def __iter__(self) -> Iterator[Factor]:
        for table, places in zip(self.tables, self.places, strict=True):
            for scope in places:
                yield Factor(scope, table)

    def __len__(self) -> int:
        return sum(map(len, self.places))


Allowance = tuple[Factors, float]
"""A second sum, and what it may be at most."""


def evaluate(factors: Iterable[Factor], choices: Sequence[int]) -> float:
    """The sum of the factors' entries at the given choices."""
    entries = Factors.of(factors).entries(choices)
    return math.fsum(itertools.chain.from_iterable([values.tolist() for _, values in entries]))


def check_scopes(sizes: npt.NDArray[np.intp], table: Array, scopes: Scopes) -> None:
    """Raises ValueError where a table does not fit its variables."""
    arity = scopes.shape[1]
    wrong = ((scopes < 0) | (scopes >= len(sizes))).any(axis=1)
    for axis in range(1, arity):
        wrong |= (scopes[:, :axis] == scopes[:, axis:][:, :1]).any(axis=1)
    if wrong.any():
        scope = tuple(scopes[wrong][0].tolist())
        raise ValueError(f"the variables of a factor must be distinct and below {len(sizes)}: {scope}")
    for axis in range(arity):
        wrong |= sizes[scopes[:, axis]] != (table.shape[axis] if table.ndim == arity else -1)
    if table.ndim != arity or wrong.any():
        scope = tuple(scopes[wrong if arity else slice(None)][0].tolist())
        raise ValueError(f"the table over variables {scope} has shape {table.shape}, not their sizes")


def checked_cost(table: Array, scope: Sequence[int]) -> Array:
    """The table in float64. Raises ValueError for entries that no sum can hold."""
    cost = np.asarray(table, dtype=np.float64)
    if not (cost > -np.inf).all():
        raise ValueError(f"the table over variables {tuple(scope)} has entries that are NaN or minus infinity")
    return cost


def merge(sizes: Sequence[int], factors: Iterable[Factor]) -> dict[Scope, Array]:
    """Checked tables by sorted variables, in order of first appearance; those over the same variables are added up."""
    counts = np.array(sizes, dtype=np.intp)
    tables: dict[Scope, Array] = {}
    for table, scopes in Factors.of(factors).everywhere():
        check_scopes(counts, table, scopes)
        cost = checked_cost(table, scopes[0])
        for scope in scopes.tolist():
            ordered = tuple(sorted(scope))
            moved = cost if ordered == tuple(scope) else cost.transpose([scope.index(v) for v in ordered])
            tables[ordered] = tables[ordered] + moved if ordered in tables else np.asarray(moved, order="C")
    return tables
