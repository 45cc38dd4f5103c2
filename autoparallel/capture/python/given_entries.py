"""Entries of lists and dicts that calls read and change (``self.stats["calls"] += 1``): a copy is given them, as it is
given attributes (see ``graph.carried_attributes``)."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from autoparallel.capture.python.changes import is_first_value
from autoparallel.capture.python.containers import leaves_of, plain_copy, refill
from autoparallel.capture.python.places import Place
from autoparallel.capture.python.watched import may_leave
from autoparallel.graph.carried_attributes import may_be_carried
from autoparallel.graph.changed_arguments import Container, Entries, entries_changed
from autoparallel.graph.labels import has_place, is_key, label_of_entry, split_entry
from autoparallel.graph.python_state import MISSING

KINDS = (dict, list, deque, defaultdict, OrderedDict, Counter)
"""The containers of which a call can be given entries."""

MOST_ENTRIES = 8
"""Each new one is another kind of call."""

_LONGEST = 16
"""A deque has another length, and each length another kind of call, until it is full."""


class GivenEntries:
    """The entries that a run of a copy is given.

    Attributes:
        places: where it finds them, each with the label of the entry there.
    """

    def __init__(self) -> None:
        self.places: list[tuple[Place, str]] = []
        self._entries: list[tuple[Any, Any, Any, str]] = []  # the container, the key, what is there now, the label
        self._alike: dict[int, list[Place]] = {}
        self._before: dict[int, tuple[Any, Any]] = {}
        self._replaced: list[tuple[Place, Any]] = []

    def give(self, entries: Mapping[str, Any], places: Sequence[tuple[Place, Any]]) -> None:
        """Puts them into the containers of the copy.

        Args:
            entries: by their labels.
            places: of all containers.
        """
        self.places.clear()
        self._entries.clear()
        self._alike.clear()
        containers = {place.label: container for place, container in reversed(places)}
        new: dict[int, Any] = {}  # tuples
        for label, value in entries.items():
            of_container, key = split_entry(label)
            container = containers.get(of_container)
            if container is None:  # a call without a target has no loss function
                continue
            alike = [place for place, x in places if x is container]
            if isinstance(container, tuple):
                fields = [*new.get(id(container), container)]
                fields[key] = value
                new[id(container)] = made_of(type(container), fields)
            else:
                self._before.setdefault(id(container), (container, plain_copy(container)))
                container[key] = value
            self._entries.append((container, key, value, label))
            self._alike[id(container)] = alike
            self.places += [(place, label_of_entry(place.label, key)) for place in alike]
        for place, container in places:
            if id(container) in new and place.may_be_put:
                place.put(new[id(container)])
                self._replaced.append((place, container))

    def put_back(self) -> None:
        """Puts back what stood there."""
        for container, entries in self._before.values():
            refill(container, entries)
        for place, container in self._replaced:
            place.put(container)
        self._before.clear()
        self._replaced.clear()

    def alike(self) -> Iterator[list[Place]]:
        """For each container its places."""
        yield from self._alike.values()

    def has(self, container: Any) -> bool:
        """Whether entries of a container are given."""
        return id(container) in self._alike

    def label_of(self, container: Any, key: Any) -> str:
        """The label of an entry that was given; empty for another."""
        return next((label for there, k, _, label in self._entries if there is container and k == key), "")

    def keys(self, container: Any) -> set[Any]:
        """The keys of those entries."""
        return {key for there, key, _, _ in self._entries if there is container}


def made_of(kind: Any, fields: Sequence[Any]) -> Any:
    """A tuple of a type, which may have names for its fields."""
    return kind(*fields) if hasattr(kind, "_fields") else kind(fields)


def changes_of(
    container: Any, before: Any, given_keys: Collection[Any], in_buffers: bool
) -> tuple[Entries, dict[Any, Any]] | None:
    """What a run has changed in a container, and those of its entries that it must be given, which it is not yet, with
    what it makes of them; None where it has done what no program can.

    Args:
        before: its entries before the run.
        given_keys: the keys of those that it was given.
        in_buffers: whether tensors in it are read when a program runs, given or not.
    """
    if type(container) not in KINDS:
        return None
    _, new = changed = entries_changed(before, container)
    keys = container if isinstance(container, dict) else range(len(container))
    most = _LONGEST if isinstance(container, deque) else MOST_ENTRIES
    grows = len(container) > max(most, len(before))
    if not all(map(is_key, keys)) or grows or not all(map(_may_be_kept, leaves_of(_values(new)))):
        return None
    places = before if isinstance(before, dict) else dict(enumerate(before))
    if not isinstance(new, dict):  # they have moved
        if not (isinstance(container, deque) and container.maxlen):  # it may grow without end
            return None
        new = places
    read_anyway = {key for key, x in new.items() if in_buffers and has_place(key) and _are_tensors(places.get(key), x)}
    to_give = _to_give(places, new, {*given_keys, *read_anyway})
    return None if to_give is None else (changed, to_give)


def only_sets(before: Mapping[Any, Any], gone: Sequence[Any] | None, new: Container) -> bool:
    """Whether a run has only set entries of a dict, as of a cache for each device: new ones, and tensors in the place
    of others, whose values are read when the program runs."""
    return (
        gone == []
        and isinstance(new, dict)
        and all(
            has_place(key) and (_are_tensors(before[key], x) if key in before else is_first_value(MISSING, x))
            for key, x in new.items()
        )
    )


def changes_of_remade(before: Any, now: Any, given_keys: Collection[Any]) -> dict[Any, Any] | None:
    """The same of a list, a tuple or a dict that a run has made anew, with other entries in the same places
    (``self.state = self.state._replace(step=self.state.step + 1)``)."""
    if type(before) is not type(now) or not isinstance(now, (tuple, *KINDS)) or len(before) != len(now):
        return None
    gone, new = entries_changed(before, now)
    places = before if isinstance(before, dict) else dict(enumerate(before))
    return _to_give(places, new, given_keys) if gone == [] and isinstance(new, dict) and all(map(is_key, new)) else None


def _to_give(before: Mapping[Any, Any], new: Mapping[Any, Any], given_keys: Collection[Any]) -> dict[Any, Any] | None:
    """Those entries that a run must be given, of the ones that it makes anew; None where it cannot be given one."""
    to_give = {key: x for key, x in new.items() if key in before and key not in given_keys}
    return to_give if all(may_be_carried(before[key]) and may_be_carried(x) for key, x in to_give.items()) else None


def _are_tensors(*values: Any) -> bool:
    return all(isinstance(value, torch.Tensor) for value in values)


def _values(new: Any) -> list[Any]:
    return [*new.values()] if isinstance(new, dict) else list(new)


def _may_be_kept(leaf: Any) -> bool:
    """Whether a value may be in a container when a call ends, and be read by the next one."""
    return may_leave(leaf)
