"""Python state that a trace depends on: attributes, globals and closures that a call reads.

A trace holds the values that Python had when it was made.  What was read belongs to the kind of call: it is compared at
every call, and a value that has changed makes another kind.
"""

from __future__ import annotations

import enum
import itertools
import operator
import sys
import threading
import types
from argparse import Namespace
from array import array
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributions import Distribution
from torch.nn.attention.flex_attention import BlockMask

from autoparallel import _torch
from autoparallel.graph.arrays import Array
from autoparallel.graph.generators import GENERATORS, state_of
from autoparallel.graph.input_values import ValuesRead
from autoparallel.graph.labels import is_key, label_of_entry
from autoparallel.operators.opaque import CONSTANTS

MISSING: Any = object()
"""Stands for an attribute or a global that is not there."""

_PLAIN = (*CONSTANTS, range, slice, np.generic)
OPAQUE = (
    types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, type, nn.Module, property,
    staticmethod, classmethod, cached_property, type(cache(len)),
)  # fmt: skip
"""What is compared by identity: what is in it is looked at where it is read."""


WITH_STATE = (Distribution, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, threading.Event)
"""What of libraries has a state that a model may read, such as a learning rate."""

_HOLDERS = (Mapping, list, tuple, set, frozenset, deque, UserList)
"""What is compared by what it holds, also where it is of a user's class."""

_SIMPLE = frozenset((bool, int, float, str, bytes, type(None)))
_KINDS: tuple[Any, ...] = (OrderedDict, dict, list, tuple, set, frozenset, deque)
_BUILTIN = frozenset(_KINDS) - {OrderedDict}

_HEAP_TYPE = 1 << 9  # of a class that is made at run time, as all are that are written in Python
_DEEPEST = 8  # objects in objects whose attributes are compared
LIBRARIES = frozenset((*sys.stdlib_module_names, "torch", "numpy", "sympy", "triton", "autoparallel")) - {"__main__"}
"""Top-level packages whose own state is no model's."""


class Attributes(dict[str, Any]):
    """What a module or a class has, by name."""


class Same:
    """An object that is compared by identity, and kept alive so that another cannot take its place."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def is_plain(value: Any) -> bool:
    """Whether a value cannot change in place and is compared by what it is."""
    return isinstance(value, _PLAIN)


def is_same(before: Any, now: Any) -> bool:
    """Whether a value is the same object, or a plain one that is equal."""
    return before is now or type(before) is type(now) and is_plain(now) and freeze(before) == freeze(now)


def _cannot_change(value: Any) -> bool:
    """Whether nothing in a value can change in place, as in sizes."""
    return is_plain(value) or type(value) is tuple and all(map(_cannot_change, value))


def freeze(value: Any, deep: bool = False, outer: tuple[int, ...] = ()) -> Hashable:
    """What a value is compared by: containers and arrays by what is in them, others by identity.

    Args:
        deep: compares objects by their attributes, too.
    """
    kind = type(value)
    if kind in _SIMPLE and (kind is not float or value and value == value):
        return kind, value  # as below: a container may hold thousands of them, and is compared at every call
    if isinstance(value, float | complex) and (value != value or not value):
        return kind, repr(value)  # 0.0 is equal to -0.0
    if isinstance(value, np.generic):
        return kind, value.tobytes()  # also where it is no number
    if is_plain(value):
        return kind, str(value) if isinstance(value, slice) else value
    if isinstance(value, torch.Tensor):
        return Same(value)
    if id(value) in outer:
        return "again", outer.index(id(value))
    outer = (*outer, id(value))
    beside = freeze(attributes, True, outer) if deep and (attributes := attributes_beside(value)) else None
    if isinstance(value, tuple | list | deque | UserList):
        return type(value), tuple([freeze(x, deep, outer) for x in value]), beside
    if isinstance(value, Mapping) and not isinstance(value, OPAQUE):
        items = tuple([(freeze(k, deep, outer), freeze(v, deep, outer)) for k, v in value.items()])
        return type(value), items, beside
    if isinstance(value, set | frozenset):
        return type(value), frozenset([freeze(x, deep, outer) for x in value]), beside
    if isinstance(value, array | bytearray):
        return type(value), bytes(value)
    if isinstance(value, GENERATORS):
        return Same(value), freeze(state_of(value))
    if isinstance(value, np.ndarray):
        return "array", value.shape, value.dtype.str, hash(value.tobytes())
    if isinstance(value, partial):
        return "partial", freeze((value.func, value.args, value.keywords), deep, outer)
    if slots_of(value) and not is_data(value):
        return Same(value), tuple([freeze(getattr(value, name, MISSING), deep, outer) for name in slots_of(value)])
    if not deep or isinstance(value, OPAQUE) or not is_data(value) or len(outer) > _DEEPEST:
        return Same(value)
    return Same(value), tuple([(name, freeze(x, deep, outer)) for name, x in vars(value).items()])


def is_data(value: Any) -> bool:
    """Whether an object is one of a user's class, whose attributes are its state."""
    cls: Any = type(value)
    if cls in (types.SimpleNamespace, Namespace, BlockMask) or isinstance(value, WITH_STATE):
        return True
    return not isinstance(value, (torch.Tensor, OPAQUE)) and is_users(cls) and _has_table(cls)


@cache
def _has_table(cls: Any) -> bool:
    """Whether the ``__dict__`` of objects is where their attributes are, and not what their class makes of that."""
    table = next((vars(c)["__dict__"] for c in cls.__mro__ if "__dict__" in vars(c)), None)
    return isinstance(table, types.GetSetDescriptorType)


def kind_of(container: Any) -> Any:
    """The class of Python's whose methods look at a container, or change it, and nothing else, as a class of the user's
    may; the class of any other object."""
    return next((kind for kind in _KINDS if isinstance(container, kind)), type(container))


def is_users(cls: type) -> bool:
    """Whether a class is written in Python, and not of a library whose state is no model's."""
    return bool(cls.__flags__ & _HEAP_TYPE) and cls.__module__.partition(".")[0] not in LIBRARIES


def attributes_beside(value: Any) -> dict[str, Any]:
    """The attributes that a list, a dict or a set of a class in the user's own code has beside its entries."""
    cls: Any = type(value)
    if cls in _BUILTIN or not is_users_code(cls) or not isinstance(value, _HOLDERS) or not is_data(value):
        return {}
    if isinstance(value, UserDict | UserList):
        return {name: x for name, x in vars(value).items() if name != "data"}
    entries = value if isinstance(value, dict) else {}
    return {name: x for name, x in vars(value).items() if dict.get(entries, name, MISSING) is not x}


@cache
def is_users_code(cls: type) -> bool:
    """Whether a class is written in the user's own code, and not in an installed package."""
    file = str(getattr(sys.modules.get(cls.__module__), "__file__", ""))
    return is_users(cls) and not is_installed(file)


def slots_of(value: Any) -> tuple[str, ...]:
    """The attributes that an object of a user's class has by ``__slots__``."""
    cls: Any = type(value)
    return () if isinstance(value, (torch.Tensor, OPAQUE)) else _slots(cls)


@cache
def _slots(cls: Any) -> tuple[str, ...]:
    return tuple(
        name
        for c in filter(is_users, cls.__mro__)
        for name, x in vars(c).items()
        if isinstance(x, types.MemberDescriptorType)
    )


@dataclass(frozen=True)
class Guard:
    """One value that a trace has read.

    Attributes:
        read: reads it now; ``MISSING`` where it is gone.
        value: what it was, frozen.
        shown: the same, in short.
        deep: whether objects are compared by their attributes.
        entries: what a list or a dict of simple values and tensors held, with its class: the very same, of which there
            may be thousands, need not be frozen again.
    """

    read: Callable[[], Any]
    value: Hashable
    shown: str
    deep: bool
    entries: tuple[type, list[Any]] | None = None

    @classmethod
    def of(cls, read: Callable[[], Any], deep: bool) -> Guard:
        """That of what is read now."""
        value = read()
        entries = _entries_of(value)
        is_simple = all(type(x) in _SIMPLE or isinstance(x, torch.Tensor) for x in entries or ())
        noted = (type(value), entries) if entries and is_simple else None
        return cls(read, freeze(value, deep), shown(value), deep, noted)

    def holds(self) -> bool:
        """Whether the value is what it was."""
        now = self.read()
        if self.entries is not None and type(now) is self.entries[0]:
            entries = _entries_of(now) or []
            if len(entries) == len(self.entries[1]) and all(map(operator.is_, entries, self.entries[1])):
                return True
        return freeze(now, self.deep) == self.value


def _entries_of(value: Any) -> list[Any] | None:
    """What a list, a tuple or a dict of Python's own holds, keys and values; None for any other value."""
    if type(value) is dict:
        return [*value, *value.values()]
    return list(value) if type(value) in (list, tuple) else None


@dataclass
class PythonState:
    """Everything that a trace has read of Python.

    Attributes:
        attributes: values in the ``__dict__`` of an object or a module that do not change in place, by label: the dict,
            the name, the value.
        guards: all others.
        places: of each label where its value stands. Two places have two labels, also where the model calls both alike.
        around: of values around the model what has them looked after, and then gives their labels (see
            ``surroundings``).
        inputs: what was read of the inputs' values.
    """

    attributes: dict[str, tuple[Mapping[str, Any], str, Any]] = field(default_factory=dict)
    guards: dict[str, Guard] = field(default_factory=dict)
    places: dict[str, Hashable] = field(default_factory=dict)
    around: dict[str, Callable[[], str | None]] = field(default_factory=dict)
    inputs: list[ValuesRead] = field(default_factory=list)

    def changed(self, leaves: Sequence[Any]) -> str | None:
        """The label of a value that is not what it was; None where all are.

        Args:
            leaves: the inputs of a call.
        """
        return next(self.changes(leaves), None)

    def changes(self, leaves: Sequence[Any]) -> Iterator[str]:
        """The labels of all values that are not what they were."""
        for label, (table, name, value) in self.attributes.items():
            now = table.get(name, MISSING)
            if now is not value and freeze(now) != freeze(value):
                yield label
        for label, guard in self.guards.items():
            if not guard.holds():
                yield label
        reads = (reads.changed(leaves) for reads in self.inputs)
        yield from (str(read) for read in reads if read is not None)

    def read_of(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """The inputs of a call of which values were read, with None in the place of the others."""
        places = {place for reads in self.inputs for place in reads.places}
        return tuple([leaf if place in places else None for place, leaf in enumerate(leaves)])

    def describe(self, label: str) -> tuple[str, str, str]:
        """The label of a value that has changed, or of the first entry in it that has; what it was, and what it is."""
        if label in self.attributes:
            table, name, value = self.attributes[label]
            before, now = shown(value), shown(table.get(name, MISSING))
        else:
            guard = self.guards[label]
            value, before = guard.read(), guard.shown
            now = shown(value)
            frozen = guard.value
            for _ in range(_DEEPEST):  # a list may be in itself
                entry = next(_entries_changed(frozen, value, label, guard.deep), None)
                if entry is None:
                    break
                label, frozen, value = entry
                before, now = _shown_frozen(frozen, value), shown(value)
        return label, before, now if now != before else f"another {now.removeprefix('a ')}"

    def numbers_of(self, label: str) -> dict[str, tuple[Any, Any]]:
        """The numbers that a value is, or that lists and dicts hold, and that have changed: what they were and what
        they are now, by label."""
        if label in self.attributes:
            table, name, before = self.attributes[label]
            return _numbers_changed(freeze(before), table.get(name, MISSING), label)
        guard = self.guards.get(label)  # none is of values of inputs
        return {} if guard is None else _numbers_changed(guard.value, guard.read(), label)

    def add(
        self, label: str, table: Mapping[str, Any], name: str, deep: bool = False, owner: object | None = None
    ) -> str:
        """Notes a value that is looked up in a dict; ``deep`` as for ``freeze``. The label that it has got.

        Args:
            owner: whose dict that is, where it makes another one each time.
        """
        value, place = table.get(name, MISSING), (id(table if owner is None else owner), name)
        is_object = not deep and is_data(value) and not isinstance(value, _HOLDERS)
        if not (value is MISSING or _cannot_change(value) or isinstance(value, OPAQUE) or is_object):
            return self.watch(label, partial(table.get, name, MISSING), place, deep)
        label = self._label_at(place, label)
        self.attributes[label] = table, name, value
        return label

    def watch(self, label: str, read: Callable[[], Any], place: Hashable, deep: bool = False) -> str:
        """Notes a value that a function reads at a place, which it keeps alive. The label that it has got."""
        label = self._label_at(place, label)
        self.guards[label] = Guard.of(read, deep)
        return label

    def merge(self, other: PythonState) -> None:
        """Notes what another trace has read, too."""
        labels = {label: self._label_at(place, label) for label, place in other.places.items()}
        self.attributes.update({labels[label]: read for label, read in other.attributes.items()})
        self.guards.update({labels[label]: guard for label, guard in other.guards.items()})
        self.around.update({labels[label]: reach for label, reach in other.around.items()})
        self.inputs += other.inputs

    def _label_at(self, place: Hashable, label: str) -> str:
        """The label of a place: this one, with a number where it is that of another place."""
        labels = itertools.chain([label], (f"{label} ({number})" for number in itertools.count(2)))
        return next(x for x in labels if self.places.setdefault(x, place) == place)

    def __iter__(self) -> Iterator[str]:
        return iter((*self.attributes, *self.guards))


def _numbers_changed(before: Hashable, now: Any, label: str) -> dict[str, tuple[Any, Any]]:
    """See ``PythonState.numbers_of``.

    Args:
        before: what the value was, frozen.
    """
    if not isinstance(before, tuple) or freeze(now) == before:
        return {}
    kind = kind_of_number(type(now))
    if kind is not None and kind is kind_of_number(before[0]):
        return {label: (_frozen_number(*before), now)}
    if before[0] is not type(now):
        return {}
    changes: dict[str, tuple[Any, Any]] = {}
    for place, inner, x in () if isinstance(now, Attributes) else _entries_changed(before, now, label):
        changes |= _numbers_changed(inner, x, place)
    return changes


def kind_of_number(cls: Any) -> type | None:
    """The class of Python's that numbers of a class are open as, which may be one of numpy; None for no number."""
    if cls in (int, float):
        return cls
    kinds = {np.floating: float, np.integer: int}
    return next((kinds[of] for of in kinds if isinstance(cls, type) and issubclass(cls, of)), None)


def _frozen_number(kind: Any, value: Any) -> int | float:
    """The number that was frozen, of Python's own kind."""
    if not issubclass(kind, np.generic):
        return kind(value)
    if isinstance(value, bytes):
        return np.frombuffer(value, kind)[0].item()
    return float("nan") if "nan" in value else 0.0


def _entries_changed(before: Hashable, now: Any, label: str, deep: bool = False) -> Iterator[tuple[str, Hashable, Any]]:
    """The entries of a list, a dict or a tuple that have changed: their labels, what they were, and what they are.

    Args:
        before: what the value was, frozen.
        deep: as for ``freeze``.
    """
    values: Mapping[Hashable, Hashable] = {}
    entries: list[tuple[Any, Any]] = []
    if not isinstance(before, tuple) or before[0] is not type(now):
        return
    if isinstance(now, dict):
        values, entries = dict(before[1]), list(now.items())
    elif isinstance(now, list | tuple) and len(before[1]) == len(now):
        values, entries = {freeze(i): value for i, value in enumerate(before[1])}, list(enumerate(now))
    for key, x in entries:
        old = values.get(freeze(key))
        if is_key(key) and freeze(x, deep) != old:
            yield f"{label}.{key}" if isinstance(now, Attributes) else label_of_entry(label, key), old, x


def shown(value: Any) -> str:
    """A value in a message, in short."""
    if value is MISSING:
        return "nothing"
    if isinstance(value, Sized) and not is_plain(value) and not isinstance(value, torch.Tensor | Array):
        return f"a {type(value).__name__} of {kind_of(value).__len__(value)}"  # a user's class may have none
    text = repr(value) if is_plain(value) else getattr(value, "__name__", None) or f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _shown_frozen(value: Hashable, now: Any) -> str:
    """What a value was that is frozen, None where there was none; where that cannot be told, what such a value is
    now."""
    kind, *content = value if isinstance(value, tuple) else (value,)
    if isinstance(kind, Same) or kind is None:
        return shown(MISSING if kind is None else kind.value)
    if kind in _SIMPLE:
        return str(content[0]) if kind is float else repr(content[0])
    return f"a {kind.__name__} of {len(content[0])}" if len(content) == 2 else shown(now)  # with what is beside it


def _installed_as(filename: str) -> str | None:
    """The package or module of a file that an installer put there; None for any other file."""
    parts = filename.replace("\\", "/").split("/")
    places = [i for i, part in enumerate(parts[:-1]) if part in ("site-packages", "dist-packages")]
    return parts[places[0] + 1].removesuffix(".py") if places else None


@cache
def is_installed(filename: str) -> bool:
    """Whether a file of Python is of an installed package, and not of the user's own code."""
    return _installed_as(filename) is not None


@cache
def is_library(filename: str) -> bool:
    """Whether a file of Python is of a library whose state is no model's."""
    package = _installed_as(filename)
    if package is not None:
        return package in LIBRARIES
    return filename.startswith(_PREFIXES) or is_generated(filename)


def is_generated(filename: str) -> bool:
    """Whether a library has generated what is said to be in a file."""
    return filename.startswith("<") and not filename.startswith(_TYPED)


def is_users_file(filename: str) -> bool:
    """Whether a file of Python is of the user's own code, neither of a library nor of another installed package."""
    return not is_library(filename) and not is_installed(filename)


def is_tracers_file(filename: str) -> bool:
    """Whether a file of Python is torch's or ours, which trace models and know what stands for values."""
    return filename.startswith((_torch.export.FOLDER, OURS))


OURS = __file__.rpartition("/graph/")[0] + "/"
"""Where our own Python lies."""

_TYPED = "<stdin>", "<input>", "<console>", "<python-input", "<ipython-input", "<doctest ", "<torch_package_"
"""The files of what is typed at a prompt or in a notebook; what libraries generate has others, ``<string>`` mostly."""

_PREFIXES = tuple({enum.__file__.rpartition("/")[0] + "/", _torch.export.FOLDER, OURS})
