"""The lists, dicts, sets and others that a copy of a model holds, and what a run changes in them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

from torch import nn

from autoparallel.capture.python.changes import (
    ContainerChangedError,
    StateChangedError,
    Written,
    require_may_leave,
)
from autoparallel.capture.python.containers import BY_VALUE, entries_of, everything_in, flat, holds_the_same, refill
from autoparallel.capture.python.given_entries import GivenEntries, changes_of, only_sets
from autoparallel.capture.python.journals import CURE, KINDS, Journal, changes, journal_of
from autoparallel.capture.python.places import Place, places_of
from autoparallel.capture.python.watched import Watched, is_bookkeeping
from autoparallel.graph.changed_arguments import ENTRIES
from autoparallel.graph.errors import CaptureError, refusal, refused_draw
from autoparallel.graph.generators import GENERATORS
from autoparallel.graph.labels import label_of_entry, split_entry
from autoparallel.graph.plain_tensors import LOSS
from autoparallel.graph.python_state import freeze, is_plain, is_same, slots_of


class HeldContainers:
    """Those of one copy.

    Args:
        held: all of them, each behind that of the model.
        watched: the objects that hold them.
        journals: the labels of those for which a journal stands from now on.
        read: the labels of those that a call reads and changes, so that no journal may stand for them.

    Attributes:
        changes: the entries that the last run has changed and must be given, by label: what it makes of each, and the
            refusal where it cannot be.
        originals: the labels of the model's containers that the last run has changed in its copy, by their ids.
    """

    def __init__(
        self,
        held: Sequence[tuple[Any, Any]],
        watched: Iterable[Watched],
        journals: Collection[str],
        read: Collection[str] = (),
    ) -> None:
        self._originals = {id(twin): original for original, twin in held}
        self.held, self._watched, self._read = [twin for _, twin in held], list(watched), read
        self._entries: list[tuple[Any, Any]] = []
        self._journals: list[tuple[Journal, list[Place]]] = []
        self._inputs = GivenEntries()
        self.changes: dict[str, tuple[Any, CaptureError]] = {}
        self.originals: dict[Hashable, str] = {}
        for label in journals:
            places = self.places
            container = next((x for place, x in places if place.label == label), None)
            if container is not None and not isinstance(container, Journal):
                alike = [place for place, x in places if x is container and place.may_be_put]
                journal = journal_of(container, label)
                self._journals.append((journal, alike))
                self._originals[id(journal)] = self._originals.get(id(container))
                for place in alike:
                    place.put(journal)
                self.__dict__.pop("places", None)

    @cached_property
    def places(self) -> list[tuple[Place, Any]]:
        """Where the copy has its containers."""
        return list(places_of(self._watched))

    def begin(self) -> None:
        """Notes what they hold before a run."""
        self._entries = [(container, entries_of(container)) for container in self.held]

    @contextmanager
    def giving(self, entries: Mapping[str, Any]) -> Iterator[None]:
        """Inside, containers hold the entries that a call is given, by label."""
        try:
            if entries:
                self._inputs.give(entries, self.places)
            yield
        finally:
            self._inputs.put_back()

    def given_in(self, label: str) -> set[Any]:
        """The keys of the entries that the run was given, of the container with a label."""
        entries = [split_entry(entry) for _, entry in self._inputs.places]
        return {key for container, key in entries if container == label}

    @property
    def has_journals(self) -> bool:
        """Whether journals stand for some."""
        return bool(self._journals)

    def leads_to_journal(self, watched: Watched, name: str) -> bool:
        """Whether an attribute is a journal, or holds one."""
        return any(place.is_in(watched, name) for _, places in self._journals for place in places)

    def read_of(self, watched: Watched, name: str) -> tuple[list[str], dict[str, bool]]:
        """What in an attribute is no part of a trace: the labels of entries that the run was given, and of journals, of
        which the keys may be."""
        given_entries = [label for place, label in self._inputs.places if place.is_in(watched, name)]
        read = [(x.label, journal.reads_keys) for journal, places in self._journals for x in places
                if x.is_in(watched, name)]  # fmt: skip
        return given_entries, dict(read)

    def shared(self) -> Iterator[list[Place]]:
        """The places, as far as they were read, of each container of which not all is part of a trace."""
        for places in (*(places for _, places in self._journals), *self._inputs.alike()):
            read = [place for place in places if place.is_read]
            if len(read) > 1:
                yield read

    def taken(self, noted: dict[str, Written]) -> dict[str, Any]:
        """What a run has added where journals stand, and made of entries that it was given, by the names under which a
        trace keeps that; what containers held is put back.

        Args:
            noted: the attributes that the run has set, to which the entries that it has set in dicts are added.

        Raises:
            CaptureError: where it has changed one otherwise.
        """
        changed: dict[str, Any] = {}
        self.changes.clear()
        self.originals.clear()
        for number, (container, before) in enumerate(self._entries):
            if self.is_changed(number):
                changed |= self._changed_entries(number, noted)
                refill(container, before)
                self.originals[id(self._originals[id(container)])] = self._label_of(container)
        for journal, places in self._journals:
            if change := journal.change():
                label = _label_read(places)
                line, new = "an unknown line", change[1]
                require_may_leave(new, label, line)
                if isinstance(new, dict) and not all(map(is_plain, new)):
                    raise refusal(changes(label, dict), line, "take numbers and strings as keys")
                if isinstance(journal, set) and not all(map(is_plain, new)):
                    raise refusal(changes(label, set), line, "add numbers and strings")
                changed[f"{label}{ENTRIES}"] = list(change)
                self.originals[id(self._originals[id(journal)])] = label
        return changed

    def _changed_entries(self, number: int, noted: dict[str, Written]) -> dict[str, Any]:
        """What a run has changed in a container of which entries can be given to a call; what it has only set in a dict
        that is an attribute of a module is noted instead.

        Raises:
            CaptureError: where they cannot.
        """
        container, before = self._entries[number]
        places = self._places_of(container)
        if not places:
            raise self._refusal_of(number)
        first, label = places[0], _label_read(places)
        in_buffers = type(container) is dict and isinstance(first.watched.copy, nn.Module) and not first.entry
        change = changes_of(container, before, self._inputs.keys(container), in_buffers)
        if in_buffers and change and only_sets(before, *change[0]) and first.watched.path.partition(".")[0] != LOSS:
            entries, table = dict(change[0][1]), vars(first.watched.original)[first.name]
            noted |= {label_of_entry(label, key): Written(table, key, x, fills=False) for key, x in entries.items()}
            return {}
        is_read = type(container) not in KINDS or self._inputs.has(container)
        is_read |= any(place.label in self._read for place in places)
        is_read |= not any(place.may_be_put for place in places)  # nor a journal, in a tuple
        if not is_read or change is None:
            raise self._refusal_of(number)
        difference, to_give = change
        gone, new = difference
        if to_give:
            refused = self._refusal_of(number)
            self.changes |= {label_of_entry(label, key): (now, refused) for key, now in to_give.items()}
        if gone == [] and isinstance(new, dict):
            return {self._inputs.label_of(container, key) or label_of_entry(label, key): x for key, x in new.items()}
        return {f"{label}{ENTRIES}": [gone, new]}

    def now(self) -> dict[str, Any]:
        """What those hold that the run has changed until now, by any name, and what it has added where journals
        stand."""
        changed = {f"container {i}": x for i, (x, _) in enumerate(self._entries) if self.is_changed(i)}
        contents = {
            name: freeze(x) if isinstance(x, BY_VALUE) else [*flat(entries_of(x))] for name, x in changed.items()
        }
        return contents | {journal.label: journal.change() for journal, _ in self._journals}

    def growing(self) -> ContainerChangedError | None:
        """The error of the first that a run has changed and for which a journal may stand."""
        refusals = (self._refusal_of(number) for number in range(len(self._entries)) if self.is_changed(number))
        return next((error for error in refusals if isinstance(error, ContainerChangedError)), None)

    def _refusal_of(self, number: int) -> StateChangedError:
        """The refusal of what a run has changed; perhaps a journal may stand for it."""
        container = self._entries[number][0]
        what = self._label_of(container) or "a container of the model"
        if isinstance(container, GENERATORS):
            drawn = f"{what}, a {type(container).__name__}"
            return StateChangedError(partial(refused_draw, drawn), lambda r, _: r.containers.is_changed(number))
        refused = StateChangedError.refusing(
            changes(what, type(container)), CURE, lambda r, _: r.containers.is_changed(number)
        )
        labels = (place.label for place in self._places_of(container) if place.may_be_put)
        label = next(labels, "") if type(container) in KINDS else ""
        return ContainerChangedError(refused, label) if label else refused

    def is_changed(self, number: int) -> bool:
        """Whether the run has changed one of them."""
        container, entries = self._entries[number]
        if isinstance(container, BY_VALUE):
            return freeze(container) != entries
        if slots_of(container):
            container = entries_of(container)
        if not container and not entries or holds_the_same(container, entries):
            return False
        if isinstance(container, OrderedDict):  # hooks, among others
            container = {k: f for k, f in container.items() if k in entries or not _is_of_bookkeeping(f)}
        return len(container) != len(entries) or not all(map(is_same, flat(container), flat(entries)))

    def _places_of(self, container: Any) -> list[Place]:
        return [place for place, x in self.places if x is container]

    def _label_of(self, container: Any) -> str:
        """Where a container is, or else the label of an attribute that holds it; empty where there is none."""
        if places := self._places_of(container):
            return places[0].label
        for watched in self._watched:
            for name, value in vars(watched.copy).items():
                if any(x is container for x in everything_in(value)):
                    return watched.label(name)
        return ""


def _label_read(places: Sequence[Place]) -> str:
    """Where a run has reached what stands in some places; if it has not, the first of them."""
    return next((place for place in places if place.is_read), places[0]).label


def _is_of_bookkeeping(hook: Any) -> bool:
    return callable(hook) and is_bookkeeping(getattr(hook, "__module__", ""))
