"""What a run of a copy reads and changes of what its objects' classes hold, which are the user's own."""

from __future__ import annotations

import sys
from collections import deque
from functools import partial
from typing import Any

from autoparallel.capture.python.reads import note_read_of_class
from autoparallel.capture.python.roots import Root
from autoparallel.graph.generators import GENERATORS
from autoparallel.graph.lines import line_of_frame
from autoparallel.graph.python_state import LIBRARIES, MISSING, PythonState, is_data, is_users


class ClassState:
    """Lists, dicts, sets, objects and generators of random numbers of the classes, and which attributes are read of
    them.

    Attributes:
        containers_read: all but generators that were read so far, and the lines, by ``Class.name``.
    """

    def __init__(self) -> None:
        self.containers_read: dict[str, tuple[Any, str]] = {}
        self._reads: set[tuple[type, str]] = set()
        self.begin()

    def begin(self) -> None:
        """A run begins."""
        self._roots: dict[tuple[type, str], Root] = {}
        self._changed: list[Root] = []
        self._tables: dict[type, dict[str, Any]] = {}  # what classes had before code was given them
        self._set: list[tuple[type, str]] = []  # what of that code has set

    def now(self) -> dict[str, Any]:
        """What the run has changed until now, by label."""
        changed = {root.label: root.read() for root in self._roots.values() if root.changed()}
        return changed | {f"{cls.__name__}.{name}": vars(cls).get(name, MISSING) for cls, name in self._set_by_code()}

    def end(self) -> None:
        """A run ends: what it has changed is noted, and put back."""
        self._changed = [root for root in self._roots.values() if root.changed()]
        for root in reversed(self._changed):
            root.restore()
        self._set = self._set_by_code()
        for cls, name in self._set:
            before = self._tables[cls]
            setattr(cls, name, before[name]) if name in before else delattr(cls, name)

    def read(self, cls: type, name: str) -> None:
        """Notes that an attribute is read of a class itself."""
        self._reads.add((cls, name))
        self.look_at(cls, name)

    def read_all(self, cls: type) -> None:
        """Notes that code is given a class itself: it may read all of it, and set what it likes."""
        for c in filter(is_users, cls.__mro__):
            self._tables.setdefault(c, dict(vars(c)))
            for name, value in vars(c).items():
                if not name.startswith("__") and not hasattr(value, "__get__"):
                    self.read(c, name)

    def look_at(self, cls: type, name: str) -> None:
        """Notes what a class's own list, dict, set or object holds before it is first read."""
        cls = next((c for c in cls.__mro__ if name in vars(c)), cls)
        value, label = vars(cls).get(name), f"{cls.__name__}.{name}"
        is_generator = isinstance(value, GENERATORS)
        may_change = isinstance(value, list | dict | set | deque) or is_data(value)
        if not is_generator and (not may_change or cls.__module__.partition(".")[0] in LIBRARIES):
            return
        line = line_of_frame(sys._getframe(1))
        if (cls, name) not in self._roots:
            read = partial(vars(cls).get, name, MISSING)
            self._roots[cls, name] = Root((cls, name), label, read, line, partial(setattr, cls, name))
        if not is_generator:
            self.containers_read[label] = value, line

    def changed_container(self) -> str:
        """A list, dict, set or object that the run has changed; empty for none."""
        return next((root.label for root in self._changes() if not isinstance(root.value, GENERATORS)), "")

    def changed_attribute(self) -> str:
        """An attribute that code has set which was given its class; empty for none."""
        return next((f"{cls.__name__}.{name}" for cls, name in self._set or self._set_by_code()), "")

    def _set_by_code(self) -> list[tuple[type, str]]:
        return [
            (cls, name)
            for cls, before in self._tables.items()
            for name in {**before, **vars(cls)}
            if name[:2] != "__" and before.get(name, MISSING) is not vars(cls).get(name, MISSING)
        ]

    def drawn_from(self) -> str:
        """A generator that the run has drawn from; empty for none."""
        return next((root.label for root in self._changes() if isinstance(root.value, GENERATORS)), "")

    def _changes(self) -> list[Root]:
        return self._changed or [root for root in self._roots.values() if root.changed()]

    def add_to(self, state: PythonState) -> None:
        """Adds what was read."""
        for cls, name in sorted(self._reads, key=str):
            note_read_of_class(state, cls, name)
