"""Where a copy of a model has lists and dicts: attributes of what it holds, and entries of containers there."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autoparallel.capture.python.journals import Journal
from autoparallel.capture.python.watched import INTERNAL, Watched
from autoparallel.graph.labels import containers_in, label_of_entry, step_from, steps_of
from autoparallel.graph.python_state import MISSING


@dataclass(frozen=True)
class Place:
    """One of the places of a container.

    Attributes:
        watched, name: the attribute through which a run reaches it.
        entry: the way from there to it, as its label tells it; empty for the attribute itself.
    """

    watched: Watched
    name: str
    entry: str = ""

    @property
    def label(self) -> str:
        return self.watched.label(self.name) + self.entry

    @property
    def is_read(self) -> bool:
        """Whether a run has read the attribute."""
        return self.name in self.watched.reads

    def is_in(self, watched: Watched, name: str) -> bool:
        """Whether a run reaches it through an attribute."""
        return self.watched is watched and self.name == name

    def of_original(self) -> Any:
        """What the model has there now; ``MISSING`` where nothing is."""
        value = vars(self.watched.original).get(self.name, MISSING)
        try:
            for step in steps_of(self.entry):
                value = step_from(value, *step)
        except (LookupError, TypeError):
            return MISSING
        return value

    def put(self, value: Any) -> None:
        """Puts something else there in the copy."""
        holder, key = self._stands_in()
        holder[key] = value

    @property
    def may_be_put(self) -> bool:
        """Whether something else can be put there."""
        return not isinstance(self._stands_in()[0], tuple)

    def _stands_in(self) -> tuple[Any, Any]:
        holder, keys = vars(self.watched.copy), [self.name, *[key for _, key in steps_of(self.entry)]]
        for key in keys[:-1]:
            holder = holder[key]
        return holder, keys[-1]


def places_of(watched: Iterable[Watched]) -> Iterator[tuple[Place, Any]]:
    """The places of all containers, with the containers."""
    for holder in watched:
        for name, value in vars(holder.copy).items():
            for entry, container in containers_in(value, "", Journal) if name not in INTERNAL else ():
                yield Place(holder, name, entry), container


def masked(value: Any, label: str, left_out: Collection[str], journals: Mapping[str, bool]) -> Any:
    """What a trace depends on of a container, of which some entries are no part of it.

    Args:
        label: that of the container.
        left_out: the labels of entries that calls are given.
        journals: the labels of containers to which a call only adds, and whether their keys are a part.
    """
    if label in left_out:
        return "given"
    if label in journals:
        keys = value if isinstance(value, dict) else (len(value),)
        return (type(value), *keys) if journals[label] else type(value)
    if not any(other.startswith(f"{label}[") for other in (*left_out, *journals)):
        return value
    if not isinstance(value, list | dict | tuple) and not hasattr(value, "maxlen"):
        return value
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    return type(value), [(key, masked(x, label_of_entry(label, key), left_out, journals)) for key, x in entries]
