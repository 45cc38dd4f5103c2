"""Lists, dicts and sets of a model to which a call only adds: ``self.losses.append(loss)``, ``self.stats["norm"] = x``.

What they held before is no part of a trace then, and what is new leaves the program as the attributes do that a call
sets.  In a copy of the model a journal stands for such a container, without its entries: to read one that the call has
not added is refused, where it is read.  What reads past Python's methods meets an object that is nothing.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from autoparallel.graph.changed_arguments import Container, Entries
from autoparallel.graph.errors import CaptureError, refusal
from autoparallel.graph.lines import line_of_frame

CURE = (
    "return what is collected as an output, or keep it in a registered buffer; numbers and detached tensors can be "
    "attributes of their own (self.calls += 1), entries of a plain dict (self.stats['calls'] += 1), or the last few in "
    "a deque(maxlen=8); a table for each length can be one attribute, for the longest so far (self.table = ...)"
)
"""What to do instead of changing a container and reading it."""


class JournalReadError(CaptureError):
    """A call reads what a container held to which it adds.

    Attributes:
        label: where the model has it.
    """

    def __init__(self, text: str, label: str) -> None:
        super().__init__(text)
        self.label = label


class EarlierEntry:
    """Stands for what a list held before; torch's errors tell of it by its name."""


_EARLIER = EarlierEntry()


def changes(label: str, kind: type) -> str:
    """What a call does that changes a container."""
    return f"a call changes {label}, a {kind.__name__} that outlives it,"


def _reads_all(kind: type, names: Iterable[str]) -> Callable[[type[Journal]], type[Journal]]:
    """Has methods of a journal refuse to read what was there before."""

    def read_by(name: str) -> Callable[..., Any]:
        method = getattr(kind, name)

        def read(self: Journal, *args: Any, **kwargs: Any) -> Any:
            self.require(self.has_all())
            return method(self, *args, **kwargs)

        return read

    def decorate(journal: type[Journal]) -> type[Journal]:
        for name in names:
            setattr(journal, name, read_by(name))
        journal.kind = kind
        return journal

    return decorate


class Journal:
    """A container to which a call adds.

    Attributes:
        kind: what it stands for.
        label: where the model has that.
        keeps: whether what was there before is still there.
        reads_keys: whether the call counts on which keys there were before.
    """

    kind: type
    label: str
    keeps: bool
    reads_keys = False

    def begin(self, label: str, container: Any) -> Journal:
        """Stands for the container with this label from now on."""
        self.label, self.keeps = label, True
        return self

    def has_all(self) -> bool:
        """Whether all that the container holds by now is the call's."""
        return not self.keeps

    def require(self, holds: bool) -> None:
        """Refuses a read of what was there before, unless something holds."""
        if not holds:
            what = f"{changes(self.label, self.kind)} and reads what it held before,"
            raise JournalReadError(str(refusal(what, line_of_frame(sys._getframe(2)), CURE)), self.label)

    def clear(self: Any) -> None:
        super().clear()  # type: ignore[misc]
        self.keeps = False

    def added(self) -> Container:
        """What the call has added that is still there."""
        raise NotImplementedError

    def change(self) -> Entries | None:
        """What the call has changed; None where it has changed nothing."""
        added = self.added()
        return ([] if self.keeps else None, added) if added or not self.keeps else None


_SEQUENCE = (
    "__delitem__", "__iter__", "__len__", "__contains__", "__eq__", "__ne__", "__lt__", "__le__",
    "__gt__", "__ge__", "__add__", "__mul__", "__imul__", "__rmul__", "__reversed__", "__repr__", "index", "count",
    "copy", "pop", "remove", "reverse", "insert",
)  # fmt: skip


class _Sequence(Journal):
    def begin(self: Any, label: str, container: Any) -> Journal:
        self.append(_EARLIER)
        return super().begin(label, container)

    def __getitem__(self: Any, place: Any) -> Any:
        """An entry that the call has added, counted from the end; all of them where it has emptied the list."""
        is_own = isinstance(place, int) and -self.kind.__len__(self) < place < 0
        self.require(is_own or not self.keeps)
        return self.kind.__getitem__(self, place)

    def added(self: Any) -> Container:
        return [entry for entry in self.kind.__iter__(self) if entry is not _EARLIER]


@_reads_all(list, (*_SEQUENCE, "sort"))
class _List(_Sequence, list[Any]):
    """By places: what the call has set it may read; and all, where it has set all that was there before.

    Attributes:
        earlier: how many entries there were.
        exchanged: what the call has set in the place of one of those.
    """

    def begin(self, label: str, container: Any) -> Journal:
        self.earlier, self.exchanged, self.reads_keys = len(container), dict[int, Any](), False
        return super().begin(label, container)

    def _earlier_place(self, place: Any) -> int | None:
        """Which of the entries that there were has a place; None for another."""
        if not self.keeps or type(place) is not int:
            return None
        index = place if place >= 0 else self.earlier + list.__len__(self) - 1 + place
        return index if 0 <= index < self.earlier else None

    def __setitem__(self, place: Any, value: Any) -> None:
        index = self._earlier_place(place)
        if index is None:
            self.require(self.has_all())
            list.__setitem__(self, place, value)
        else:
            self.exchanged[index], self.reads_keys = value, True

    def __getitem__(self, place: Any) -> Any:
        index = self._earlier_place(place)
        if index is None or index not in self.exchanged:
            self.has_all()
            return super().__getitem__(place)
        return self.exchanged[index]

    def has_all(self) -> bool:
        if self.keeps and 0 < len(self.exchanged) == self.earlier:
            entries = [*(self.exchanged[i] for i in range(self.earlier)), *self.added()]
            self.clear()
            self.extend(entries)
            self.reads_keys = True
        return super().has_all()

    def change(self) -> Entries | None:
        if not self.keeps or not self.exchanged:
            return super().change()
        return [], {**self.exchanged, **dict(enumerate(self.added(), self.earlier))}


@_reads_all(deque, (*_SEQUENCE, "__setitem__", "appendleft", "extendleft", "popleft", "rotate"))
class _Deque(_Sequence, deque[Any]):
    pass


@_reads_all(
    dict,
    (
        "__iter__", "__len__", "__eq__", "__ne__", "__or__", "__ror__", "__reversed__", "__repr__", "keys", "values",
        "items", "copy", "popitem",
    ),
)  # fmt: skip
class _Dict(Journal, dict[Any, Any]):
    """By keys: what the call has set it may read; and all, where it has set all that was there before.

    Attributes:
        earlier: the keys that there were.
        gone: those that the call has taken out, perhaps to set them again.
    """

    def begin(self, label: str, container: Any) -> Journal:
        self.earlier, self.gone, self.reads_keys = tuple(container), dict[Any, None](), False
        return super().begin(label, container)

    def has_all(self) -> bool:
        if self.keeps and all(dict.__contains__(self, key) or key in self.gone for key in self.earlier):
            self.reads_keys = True
            in_order = [key for key in self.earlier if dict.__contains__(self, key) and key not in self.gone]
            entries = {key: dict.__getitem__(self, key) for key in dict.fromkeys((*in_order, *dict.keys(self)))}
            dict.clear(self)
            dict.update(self, entries)
        return not self.keeps or self.reads_keys

    def update(self, *entries: Any, **more: Any) -> None:
        super().update(dict(*entries, **more))

    def __ior__(self, entries: Any) -> Any:  # type: ignore[misc]
        self.update(entries)
        return self

    def added(self) -> Container:
        return dict(dict.items(self))

    def change(self) -> Entries | None:
        change = super().change()
        gone = list(self.gone) if self.keeps else None
        return (gone, self.added()) if gone or change else None


def _reads_key(name: str) -> Callable[..., Any]:
    method = getattr(dict, name)

    def read(self: _Dict, key: Any, *rest: Any) -> Any:
        self.require(not self.keeps or dict.__contains__(self, key) or key in self.gone)
        if name in ("__delitem__", "pop") and dict.__contains__(self, key):
            self.gone[key] = None
        return method(self, key, *rest)

    return read


for _name in ("__getitem__", "__contains__", "__delitem__", "get", "pop", "setdefault"):
    setattr(_Dict, _name, _reads_key(_name))


@_reads_all(
    set,
    (
        "__iter__", "__len__", "__contains__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__or__",
        "__and__", "__sub__", "__xor__", "__ror__", "__rand__", "__rsub__", "__rxor__", "__iand__", "__isub__",
        "__ixor__", "__repr__", "copy", "pop", "remove", "discard", "union", "intersection", "difference",
        "symmetric_difference", "intersection_update", "difference_update", "symmetric_difference_update", "isdisjoint",
        "issubset", "issuperset",
    ),
)  # fmt: skip
class _Set(Journal, set[Any]):
    def added(self) -> Container:
        return sorted(set.__iter__(self), key=repr)  # alike on all ranks


KINDS: Mapping[type, type[Journal]] = {list: _List, deque: _Deque, dict: _Dict, set: _Set}
"""The kinds of containers for which a journal may stand."""


def without_journals(value: Any) -> Any:
    """What a call returns, with plain containers in the places of journals, which it must have emptied."""
    if isinstance(value, Journal):
        value.require(value.has_all())
    elif type(value) not in (list, tuple, dict):
        return value
    kind = getattr(value, "kind", type(value))
    if isinstance(value, dict):
        return {key: without_journals(entry) for key, entry in value.items()}
    return kind(map(without_journals, value))


def journal_of(container: Any, label: str) -> Journal:
    """What stands for a container of one of these kinds."""
    kind: Any = KINDS[type(container)]
    journal: Journal = kind(maxlen=container.maxlen) if isinstance(container, deque) else kind()
    return journal.begin(label, container)
