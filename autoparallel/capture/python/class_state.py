"""What a run of a copy reads and changes of what its objects' classes hold, which are the user's own."""

from __future__ import annotations

import sys
from collections import deque
from typing import Any

from autoparallel.capture.python.containers import holds_the_same, refill
from autoparallel.capture.python.reads import note_read_of_class
from autoparallel.graph.generators import GENERATORS, set_state, state_of
from autoparallel.graph.lines import line_of_frame
from autoparallel.graph.python_state import LIBRARIES, PythonState, freeze


class ClassState:
    """Lists, dicts, sets and generators of random numbers of the classes, and which attributes are read of them.

    Attributes:
        containers_read: all that were read so far, and the lines, by ``Class.name``.
    """

    def __init__(self) -> None:
        self.containers_read: dict[str, tuple[Any, str]] = {}
        self._reads: set[tuple[type, str]] = set()
        self.begin()

    def begin(self) -> None:
        """A run begins."""
        self._containers: dict[tuple[type, str], tuple[Any, Any]] = {}
        self._generators: dict[str, tuple[Any, Any]] = {}
        self._changed_container = self._drawn_from = ""

    def end(self) -> None:
        """A run ends: what it has changed is noted, and put back."""
        self._changed_container, self._drawn_from = self.changed_container(), self.drawn_from()
        for generator, state in self._generators.values():
            set_state(generator, state)
        for container, entries in self._containers.values():
            if not holds_the_same(container, entries):
                refill(container, entries)

    def read(self, cls: type, name: str) -> None:
        """Notes that an attribute is read of a class itself."""
        self._reads.add((cls, name))
        self.look_at(cls, name)

    def look_at(self, cls: type, name: str) -> None:
        """Notes what a class's own list, dict or set holds before it is first read."""
        cls = next((c for c in cls.__mro__ if name in vars(c)), cls)
        value, label = vars(cls).get(name), f"{cls.__name__}.{name}"
        if isinstance(value, GENERATORS):
            self._generators.setdefault(label, (value, state_of(value)))
        elif isinstance(value, list | dict | set | deque) and cls.__module__.partition(".")[0] not in LIBRARIES:
            self._containers.setdefault((cls, name), (value, value.copy()))
            self.containers_read[label] = value, line_of_frame(sys._getframe(1))

    def changed_container(self) -> str:
        """A list, dict or set that the run has changed; empty for none."""
        pairs = self._containers.items()
        changed = (f"{cls.__name__}.{name}" for (cls, name), pair in pairs if not holds_the_same(*pair))
        return self._changed_container or next(changed, "")

    def drawn_from(self) -> str:
        """A generator that the run has drawn from; empty for none."""
        drawn = (name for name, (x, state) in self._generators.items() if freeze(state_of(x)) != freeze(state))
        return self._drawn_from or next(drawn, "")

    def add_to(self, state: PythonState) -> None:
        """Adds what was read."""
        for cls, name in sorted(self._reads, key=str):
            note_read_of_class(state, cls, name)
