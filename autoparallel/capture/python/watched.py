"""One object of a traced copy of a model: what a run reads and writes of its attributes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributions.utils import lazy_property

from autoparallel._torch.numbers import OPEN
from autoparallel.capture.python.containers import leaves_of
from autoparallel.graph.arrays import Array
from autoparallel.graph.labels import label_in
from autoparallel.graph.python_state import MISSING, is_plain

INTERNAL = frozenset((*vars(nn.Module()), *dir(nn.Module), "_is_hf_initialized")) - {"forward"}
"""Attributes of modules that are torch's own; those that matter are part of the kind of call in other ways."""

TABLES = ("_buffers", "_parameters", "_modules")


@dataclass
class Watched:
    """One object of the copy.

    Attributes:
        path: of the module; of another object the attribute that holds it.
        original, copy: the user's object and that of the copy.
        reads: names that were read before they were written.
        all_read: whether somebody has asked for the ``__dict__`` itself.
        writes: names that were written, and the line that last did.
        entries: all that there was before.
        tables: of a module the buffers, parameters and modules that there were.
        ignored: names that libraries write for themselves.
        carried: what a call is given in the place of attributes that it changes, by name.
        carried_names: of which it was given something in any run; of some objects nobody notes what is read.
    """

    path: str
    original: Any
    copy: Any
    reads: set[str] = field(default_factory=set)
    all_read: bool = False
    writes: dict[str, str] = field(default_factory=dict)
    entries: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    ignored: set[str] = field(default_factory=set)
    carried: dict[str, Any] = field(default_factory=dict)
    carried_names: set[str] = field(default_factory=set)
    _stood_there: dict[str, list[tuple[dict[str, Any], Any]]] = field(default_factory=dict)

    def begin(self) -> None:
        """Notes what there is before a run, which has put its own tensors in the place of parameters and buffers."""
        self.entries = dict(vars(self.copy))
        if isinstance(self.copy, nn.Module):
            self.tables = {kind: dict(vars(self.copy)[kind]) for kind in TABLES}

    def carry(self, name: str, value: Any) -> None:
        """Puts in the place of an attribute what a call is given."""
        tables = self._tables()
        self.carried[name] = value
        self.carried_names.add(name)
        self._stood_there[name] = [(table, table.get(name, MISSING)) for table in tables]
        next((table for table in tables if name in table), tables[0])[name] = value

    def now(self, name: str) -> Any:
        """What stands in the place of an attribute."""
        return next((table[name] for table in self._tables() if name in table), MISSING)

    def put_back(self) -> None:
        """Puts back what stood where attributes were carried."""
        for name, places in self._stood_there.items():
            for table, value in places:
                table[name] = value
                if value is MISSING:
                    del table[name]
        self.carried.clear()
        self._stood_there.clear()

    def _tables(self) -> list[dict[str, Any]]:
        table = vars(self.copy)
        return [table, table["_buffers"]] if isinstance(self.copy, nn.Module) else [table]

    def changed(self) -> dict[str, str]:
        """The names that were written, with lines; with none what was not written as an attribute, but as an entry of
        the ``__dict__``, by ``object.__setattr__``, or by ``register_buffer``."""
        table = vars(self.copy)
        others = [name for name in _exchanged_names(self.entries, table) if self._may_be_users(name)]
        others += [name for kind, before in self.tables.items() for name in _exchanged_names(before, table[kind])]
        return self.writes | dict.fromkeys((name for name in others if name not in self.writes), "")

    def _may_be_users(self, name: str) -> bool:
        # An object that is cached is of the copy alone; the user's makes its own when it is asked.
        is_object = self.caches(name) and not all(map(may_leave, leaves_of(vars(self.copy).get(name))))
        return not is_object and name not in self.ignored and name not in INTERNAL

    def caches(self, name: str) -> bool:
        """Whether an attribute is a ``functools.cached_property``, or one of a distribution that is computed once."""
        of_class = next((vars(c)[name] for c in type(self.original).__mro__ if name in vars(c)), None)
        return isinstance(of_class, cached_property | lazy_property)

    def label(self, name: str) -> str:
        return label_in(self.path, name)


@dataclass
class WatchedVariables(Watched):
    """The variables around a model (see ``graph.surroundings``), which hold what the copy has while it runs: nobody
    notes what functions read and bind.

    Attributes:
        stood: what they hold otherwise, by name; empty when the copy does not run.
    """

    stood: dict[str, Any] = field(default_factory=dict)

    def enter(self) -> None:
        """Binds the variables to what the copy has."""
        self.stood = dict(vars(self.original))
        vars(self.original).update(vars(self.copy))

    def leave(self) -> None:
        """Takes what they hold for the copy's, and binds them to what they held."""
        self._take()
        vars(self.original).update(self.stood)
        for name in vars(self.copy).keys() - self.stood.keys():
            del vars(self.original)[name]
        self.stood = {}

    def _take(self) -> None:
        copied = vars(self.copy)
        copied.clear()
        copied.update(vars(self.original))

    def changed(self) -> dict[str, str]:
        if self.stood:  # in the middle of a run
            self._take()
        return super().changed()


class AllAttributes(MutableMapping[str, Any]):
    """The ``__dict__`` of a module as the user's has it: plain attributes that are tensors are buffers of the copy.

    Args:
        table: that of the copy.
        tensors: the names of those attributes.
    """

    def __init__(self, table: dict[str, Any], tensors: Collection[str]) -> None:
        self._table, self._tensors = table, tensors

    def __getitem__(self, name: str) -> Any:
        return self._table["_buffers"][name] if name in self._left() else self._table[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._table[name] = value

    def __delitem__(self, name: str) -> None:
        del (self._table["_buffers"] if name in self._left() else self._table)[name]

    def __iter__(self) -> Iterator[str]:
        return iter((*self._table, *self._left()))

    def __len__(self) -> int:
        return len(self._table) + len(self._left())

    def copy(self) -> dict[str, Any]:
        """As that of a dict."""
        return dict(self)

    def _left(self) -> list[str]:
        """The attributes that are still where the copy had them."""
        return [name for name in self._tensors if name in self._table["_buffers"] and name not in self._table]


def is_bookkeeping(module: Any) -> bool:
    """Whether code is that of transformers, which installs hooks of its own when a model is first called and notes that
    it has, or of torch, whose recurrent layers list their weights: every copy does so anew."""
    return str(module).partition(".")[0] in ("torch", "transformers")


def may_leave(leaf: Any) -> bool:
    """Whether a value can leave the program in an attribute."""
    return isinstance(leaf, (torch.Tensor, Array, *OPEN)) or is_plain(leaf)


def _exchanged_names(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The names of what is another object now, was not there, or is not there any more."""
    return [name for name in {**before, **now} if now.get(name, MISSING) is not before.get(name, MISSING)]
