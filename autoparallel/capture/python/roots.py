"""Places outside of a model that its functions load from: globals, closure cells, and attributes of what is there."""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

from autoparallel.capture.python.closures import contents_of
from autoparallel.capture.python.containers import refill
from autoparallel.graph.generators import GENERATORS, set_state, state_of
from autoparallel.graph.python_state import freeze


class Cell:
    """A closure's cell as a place: nothing else of ours holds it."""

    def __init__(self, cell: types.CellType) -> None:
        self.cell = cell

    def read(self) -> Any:
        return contents_of(self.cell)

    def write(self, value: Any) -> None:
        self.cell.cell_contents = value

    def is_left(self) -> bool:
        """Whether no function has it any more, as is so for locals of a call that is over."""
        return sys.getrefcount(self.cell) <= 2  # ours, and the argument


class Root:
    """A place that a function loads from: a global, a cell, or an attribute of what is there.

    Attributes:
        key: tells it from others.
        label: for messages.
        read: reads what is there now.
        write: puts a value there.
        now: what the run has made of it, in short.
        table: the globals, where it is one of them.
        cell: where it is one.
        line: of the function that loads it.
    """

    def __init__(
        self,
        key: Hashable,
        label: str,
        read: Callable[[], Any],
        write: Callable[[Any], None],
        table: Any,
        cell: Cell | None,
        line: str,
    ) -> None:
        self.line = line
        self.key, self.label, self.read, self.write, self.table = key, label, read, write, table
        self.cell = cell
        self.now = ""
        self.value = read()
        self.frozen: Hashable = freeze(self.value, deep=True)
        self.content: Any = None
        if isinstance(self.value, GENERATORS):
            self.content = state_of(self.value)
        elif isinstance(self.value, list | dict | set | deque):
            self.content = self.value.copy()

    def changed(self) -> bool:
        return freeze(self.read(), deep=True) != self.frozen

    def restore(self) -> None:
        """Puts back what was there, as far as it goes: a container's entries, a generator's state, or the value."""
        if self.read() is not self.value:
            self.write(self.value)
        if isinstance(self.value, GENERATORS):
            set_state(self.value, self.content)
        elif self.content is not None:
            refill(self.value, self.content)
