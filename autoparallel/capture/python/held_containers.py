"""The lists, dicts, sets and others that a copy of a model holds, and what a run changes in them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

from torch import nn

from autoparallel.capture.python.changes import (
    ContainerChangedError,
    StateChangedError,
    Written,
    entries_set,
    require_may_leave,
)
from autoparallel.capture.python.containers import BY_VALUE, entries_of, flat, holds, holds_the_same, is_same, refill
from autoparallel.capture.python.journals import CURE, KINDS, Journal, changes, journal_of
from autoparallel.capture.python.watched import Watched, is_bookkeeping
from autoparallel.graph.captured import refusal, refused_draw
from autoparallel.graph.changed_arguments import ENTRIES
from autoparallel.graph.generators import GENERATORS
from autoparallel.graph.plain_tensors import LOSS
from autoparallel.graph.python_state import freeze, is_plain, slots_of


class HeldContainers:
    """Those of one copy.

    Args:
        held: all of them.
        watched: the objects that hold them.
        journals: the labels of those for which a journal stands from now on.
    """

    def __init__(self, held: Iterable[Any], watched: Iterable[Watched], journals: Collection[str]) -> None:
        self.held, self._watched = list(held), list(watched)
        self._entries: list[tuple[Any, Any]] = []
        self._journals: list[tuple[Journal, list[tuple[Watched, str]]]] = []
        places = [(w, name) for w in self._watched for name in vars(w.copy)] if journals else []
        for container in {id(x): x for x in (vars(w.copy)[n] for w, n in places if w.label(n) in journals)}.values():
            alike = [(w, name) for w, name in places if vars(w.copy)[name] is container]
            first, name = alike[0]
            journal = journal_of(container, first.label(name))
            self._journals.append((journal, alike))
            for holder, name in alike:
                vars(holder.copy)[name] = journal

    def begin(self) -> None:
        """Notes what they hold before a run."""
        self._entries = [(container, entries_of(container)) for container in self.held]

    @property
    def has_journals(self) -> bool:
        """Whether journals stand for some."""
        return bool(self._journals)

    def holder_of_journal(self, watched: Watched, name: str) -> tuple[Watched, str] | None:
        """The first attribute through which a run has reached the journal that an attribute holds; None where that
        holds none."""
        of_all = (places for _, places in self._journals if any(w is watched and n == name for w, n in places))
        return next(((w, n) for places in of_all for w, n in places if n in w.reads), None)

    def taken(self, noted: dict[str, Written]) -> dict[str, Any]:
        """What a run has set in dicts, and added where journals stand, by the names under which a trace keeps that;
        what they were is put back.

        Args:
            noted: the attributes that the run has set, to which the entries of dicts are added.

        Raises:
            CaptureError: where it has changed one otherwise.
        """
        changed: dict[str, Any] = {}
        for number, (container, before) in enumerate(self._entries):
            if self.is_changed(number):
                entries = self._entries_set(container, before)
                if not entries:
                    raise self._refusal_of(number)
                changed |= {label: x.value for label, x in entries.items()}
                noted |= entries
                refill(container, before)
        for journal, places in self._journals:
            if change := journal.change():
                watched, name = self.holder_of_journal(*places[0]) or places[0]
                label, line, new = watched.label(name), "an unknown line", change[1]
                require_may_leave(new, label, line)
                if isinstance(new, dict) and not all(map(is_plain, new)):
                    raise refusal(changes(label, dict), line, "take numbers and strings as keys")
                changed[f"{label}{ENTRIES}"] = list(change)
        return changed

    def growing(self) -> ContainerChangedError | None:
        """The error of the first that a run has changed and for which a journal may stand."""
        refusals = (self._refusal_of(number) for number in range(len(self._entries)) if self.is_changed(number))
        return next((error for error in refusals if isinstance(error, ContainerChangedError)), None)

    def _entries_set(self, container: Any, before: Any) -> dict[str, Written]:
        """What a run has set in a dict that is an attribute of a module; nothing where it has changed a container
        otherwise."""
        entries = entries_set(before, container) if type(container) is dict else None
        places = ((w, name) for w in self._watched for name, x in vars(w.copy).items() if x is container)
        watched, name = next(places, (None, ""))
        if not entries or watched is None or not isinstance(watched.copy, nn.Module):
            return {}
        if watched.path.partition(".")[0] == LOSS:
            return {}
        table = vars(watched.original)[name]
        return {
            f"{watched.label(name)}[{key!r}]": Written(table, key, value, fills=False) for key, value in entries.items()
        }

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
        label = self._label_of(container, itself=True) if type(container) in KINDS else ""
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

    def _label_of(self, container: Any, itself: bool = False) -> str:
        """The label of an attribute that is a container, or holds it; empty where there is none.

        Args:
            itself: whether it must be it.
        """
        for watched in self._watched:
            for name, value in vars(watched.copy).items():
                may_hold = not itself and isinstance(value, list | tuple | dict) and not isinstance(value, Journal)
                if value is container or may_hold and holds(value, container):
                    return watched.label(name)
        return ""


def _is_of_bookkeeping(hook: Any) -> bool:
    return callable(hook) and is_bookkeeping(getattr(hook, "__module__", ""))
