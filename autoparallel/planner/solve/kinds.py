"""Layers of a factor graph that are alike, so that each kind is eliminated once.

    numbers    0 1 | 2 3 4 | 5 6 7 | 8 9 10 | 11 12        three layers of three variables
                         4 - 5     7 - 8                   a layer's first variable meets the last of the layer before

[Note: layers] A table belongs to the layer of its last variable.  The variables of a layer that no other table mentions
are its inner ones.  They are eliminated first; what is left are tables over the other variables that the layer's tables
mention.  Layers of the same tables, at the same places, leave the same tables, so these are made once for each kind of
layers.  What remains is a graph of the few variables where layers meet.  Nothing is assumed of the answer: each layer
still takes its own states, so the minimum is that of the whole graph, whatever is added up, bytes under a multiplier
included.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from autoparallel.planner.solve.factors import Array, Scope, Scopes

Layers = Sequence[Sequence[Hashable]]
"""Of each variable the layers that it is in, the outermost first."""

_LEAST_SAVED = 8  # variables that a kind must save to be worth a graph of its own


class Terms:
    """Tables, each with everywhere it stands.

    Attributes:
        tables: the different tables.
        table: the number of a table, for each place.
        scopes: its variables there, in ascending order, filled up with the last one.
    """

    def __init__(self, tables: Sequence[Array], places: Sequence[tuple[int, Scopes]]) -> None:
        """``places`` are numbers of tables, each with a row of variables for each place."""
        self.tables = tables
        width = max([1, *(scopes.shape[1] for _, scopes in places)])
        filled = [np.pad(scopes, ((0, 0), (0, width - scopes.shape[1])), mode="edge") for _, scopes in places]
        self.scopes = np.concatenate([np.zeros((0, width), dtype=np.intp), *filled])
        self.table = np.repeat([number for number, _ in places], [len(scopes) for scopes in filled]).astype(np.intp)

    def of(self, table: int, scope: Sequence[int]) -> Scope:
        """The variables of a table, without those that fill up."""
        return tuple(scope[: self.tables[table].ndim])


@dataclass(frozen=True, eq=False)
class Kind:
    """Layers that are alike.

    Attributes:
        members: for each layer a row of variables: its own, and then those of others that its tables mention.
        own_count: how many of a row are its own.
        inner: the places in a row of those that nothing else mentions.
        tables: the tables of a layer, by number, with the places of their variables.
    """

    members: Scopes
    own_count: int
    inner: Scope
    tables: list[tuple[int, Scope]]


def find_kinds(sizes: Sequence[int], terms: Terms, layers: Layers, hub: int | None) -> list[Kind]:
    """The layers that are alike; of those that are not, the layers inside.

    Args:
        hub: a variable that is no layer's inner one.
    """
    kinds: list[Kind] = []
    layer = np.full(len(sizes), -1, dtype=np.intp)  # that each variable is in, by number
    first = 0
    left = np.arange(len(sizes))
    for level in range(max(map(len, layers), default=0)):
        numbers: dict[Hashable, int] = {}
        for v in left.tolist():
            path = layers[v]
            layer[v] = first + numbers.setdefault(path[level], len(numbers)) if len(path) > level else -1
        alike = _alike(np.array(sizes, dtype=np.intp), terms, layer, range(first, first + len(numbers)), hub)
        kinds += alike
        left = np.setdiff1d(left, [v for kind in alike for v in kind.members[:, : kind.own_count].ravel()])
        first += len(numbers)
    return kinds


def _alike(sizes: Scopes, terms: Terms, layer: Scopes, numbers: range, hub: int | None) -> list[Kind]:
    """The kinds among the layers of these numbers."""
    first, count, variables = numbers.start, len(numbers), len(sizes)
    owner = layer[terms.scopes[:, -1]]
    inner = layer >= first
    inner[terms.scopes[layer[terms.scopes] != owner[:, None]]] = False
    if hub is not None:
        inner[hub] = False
    tables, scopes, owner = [entries[owner >= first] for entries in (terms.table, terms.scopes, owner - first)]
    # A layer's variables, and those of others that its tables mention, both in ascending order.
    of_layers = np.argsort(layer, kind="stable")
    position = np.empty(variables, dtype=np.intp)
    position[of_layers] = np.arange(variables)
    begins = np.searchsorted(layer[of_layers], np.arange(first, first + count + 1))
    inside = layer[scopes] == first + owner[:, None]
    met = owner[:, None] * variables + scopes
    others = np.unique(met[~inside])
    others_begin = np.searchsorted(others, np.arange(count + 1) * variables)
    # The tables of a layer, with the places of their variables among these, in an order that names do not change.
    rank = np.diff(begins)[owner][:, None] + np.searchsorted(others, met) - others_begin[owner][:, None]
    lines = np.column_stack([tables, np.where(inside, position[scopes] - begins[owner][:, None], rank)])
    order = np.lexsort((*lines.T, owner))
    lines = np.ascontiguousarray(lines[order])
    lines_begin = np.searchsorted(owner[order], np.arange(count + 1))
    alike: dict[Hashable, list[tuple[int, Scopes]]] = {}
    for i in range(count):
        inner_row = of_layers[begins[i] : begins[i + 1]]
        row = np.concatenate([inner_row, others[others_begin[i] : others_begin[i + 1]] - i * variables])
        its = lines[lines_begin[i] : lines_begin[i + 1]]
        alike.setdefault((its.tobytes(), sizes[inner_row].tobytes(), inner[inner_row].tobytes()), []).append((i, row))
    kinds = []
    for members in alike.values():
        i, row = members[0]
        own_count = int(begins[i + 1] - begins[i])
        places = np.flatnonzero(inner[row[:own_count]]).tolist()
        if (len(members) - 1) * len(places) >= _LEAST_SAVED:
            its = lines[lines_begin[i] : lines_begin[i + 1]].tolist()
            placed = [(table, terms.of(table, scope)) for table, *scope in its]
            kinds.append(Kind(np.array([row for _, row in members]), own_count, tuple(places), placed))
    return kinds
