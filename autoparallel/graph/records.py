"""Records: objects that hold tensors, in attributes or as entries (a batch of the user's own class, a detector's masked
images, a distribution), as containers.

How a record nests is told by its class, and by the names of what it holds; tensors and numbers in it are leaves. In a
call a record is another object of the same class, which is made without its ``__init__``.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import FunctionType, MemberDescriptorType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoparallel._torch.numbers import OPEN
from autoparallel.graph.caches import is_of_caches
from autoparallel.graph.python_state import is_plain

_OF_GRAPHS = (type(None), bool, int, float, str)
"""The types of the constants that a graph of torch's is given and returns."""


def is_held(value: Any) -> bool:
    """Whether a value is a constant that no graph of torch's is given or returns: a dtype, a device, an enum."""
    return is_plain(value) and type(value) not in _OF_GRAPHS


class _Form(NamedTuple):
    """How a record nests.

    Attributes:
        keys: those of its entries, where it is a dict, too.
        names: its attributes that are, or hold, leaves.
        constants: those that no graph is given, with their values.
        links: those that refer weakly to the record around it.
    """

    keys: tuple[Any, ...]
    names: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]
    links: tuple[str, ...]


_BASES = (object, dict, OrderedDict, SimpleNamespace)
"""The classes of Python's that a record's class may be built on."""

_IS_HEAP_TYPE = 1 << 9
"""The flag of classes that Python code has defined (``Py_TPFLAGS_HEAPTYPE``)."""

_LINK = object()
"""Stands for a weak reference to a record that is still to be made."""


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The attributes themselves of an object that may be a record."""
    if isinstance(value, torch.Tensor | nn.Module | type | ModuleType | FunctionType):
        return None
    return getattr(value, "__dict__", None)


def _is_slotted(value: Any) -> bool:
    """Whether a value is an object of a class of Python's that has ``__slots__`` in the place of ``__dict__``."""
    return not isinstance(value, type) and attributes_of(value) is None and bool(_slots_of(type(value)))


def fields_of(value: Any) -> dict[str, Any]:
    """What is in the slots of an object."""
    fields: dict[str, Any] = {}
    for name, slot in _slots_of(type(value)).items():
        with suppress(AttributeError):  # it is empty
            fields[name] = slot.__get__(value)
    return fields


def _find_slots(kind: type) -> dict[str, Any]:
    """The slots of a class, by the names that Python gives them."""
    if _base_of(kind) not in _BASES:
        return {}
    classes = [x for x in reversed(kind.__mro__) if x.__flags__ & _IS_HEAP_TYPE]
    return {name: x for c in classes for name, x in vars(c).items() if isinstance(x, MemberDescriptorType)}


_slots_of: Callable[[type], dict[str, Any]] = functools.cache(_find_slots)  # asked for each object at every call


def _held_in(value: Any) -> dict[str, Any]:
    """The attributes of an object, in its ``__dict__`` and in slots."""
    return {**fields_of(value), **(attributes_of(value) or {})}


def _set(value: Any, name: str, attribute: Any) -> None:
    """Sets an attribute past what the class does where one is set."""
    if (slot := _slots_of(type(value)).get(name)) is not None:
        slot.__set__(value, attribute)
    else:
        vars(value)[name] = attribute


def register_records(leaves: Iterable[Any]) -> bool:
    """Makes the classes of the records among leaves known to torch; whether there are some."""
    objects = [leaf for leaf in leaves if not _may_be_given(leaf)]
    unknown = dict.fromkeys(type(x) for leaf in objects if is_record(leaf) for x in _records_in(leaf))
    for kind in unknown:
        make = partial(_record_of, kind)
        pytree.register_pytree_node(kind, _take_apart, make, flatten_with_keys_fn=_take_apart_with_keys)
    return bool(unknown)


def is_record(value: Any) -> bool:
    """Whether a value is an object that holds tensors, and beside them only what a call may be given.

    A ``UserDict`` is one whatever it holds. Its attributes that no call may be given, such as a tokenizer's encodings,
    stay away.
    """
    if isinstance(value, UserDict):
        return True
    holds = False
    for leaf in _leaves_in(value, ()) if _may_hold(value) else ():
        holds = holds or isinstance(leaf, torch.Tensor)
        if not _may_be_given(leaf):
            return False  # at once: what is behind it may be the whole world
    return holds


def _may_be_given(leaf: Any) -> bool:
    return isinstance(leaf, (torch.Tensor, *OPEN)) or is_plain(leaf)


def _may_hold(value: Any) -> bool:
    """Whether an object has attributes or entries, and can be made without its ``__init__``."""
    if is_plain(value) or is_of_caches(value) or isinstance(value, OPEN):  # a member of an enum is itself alone
        return False
    if _is_slotted(value):
        return True
    attributes = attributes_of(value)
    has_parts = bool(attributes) or attributes is not None and isinstance(value, dict)
    return has_parts and _base_of(type(value)) in _BASES


def _base_of(kind: type) -> Any:
    """The class written in C that a class is built on."""
    return next(x for x in kind.__mro__ if not x.__flags__ & _IS_HEAP_TYPE)


def _parts_of(value: Any) -> list[Any]:
    """What is in an object, but for classes."""
    entries = value.values() if isinstance(value, dict) else ()
    return pytree.tree_leaves([*(x for x in _held_in(value).values() if not isinstance(x, type)), *entries])


def _records_in(value: Any) -> Iterator[Any]:
    """A record, and those in it whose classes torch does not know."""
    yield value
    for part in _parts_of(value):
        if isinstance(part, UserDict) or _may_hold(part):
            yield from _records_in(part)


def _leaves_in(value: Any, around: tuple[Any, ...]) -> Iterator[Any]:
    """The leaves of an object, but for weak references to the one around it."""
    inside = (*around, value)
    for part in _parts_of(value):
        if isinstance(part, weakref.ref) and around and part() is around[-1]:
            continue
        if _may_hold(part) and not any(part is x for x in inside):
            yield from _leaves_in(part, inside)
        else:
            yield part


def _take_apart(record: Any) -> tuple[list[Any], _Form]:
    entries = record if isinstance(record, dict) else {}
    constants, links, rest = [], [], {}
    attributes = _held_in(record)
    if isinstance(record, UserDict):
        entries = attributes.pop("data")
        attributes = {name: x for name, x in attributes.items() if _is_fit(x)}
    for name, value in attributes.items():
        if isinstance(value, weakref.ref):
            links.append(name)
        elif is_held(value) or isinstance(value, type):
            constants.append((name, value))
        else:
            rest[name] = value
    return [*entries.values(), *rest.values()], _Form(tuple(entries), tuple(rest), tuple(constants), tuple(links))


def _is_fit(attribute: Any) -> bool:
    """Whether a call may be given what an attribute holds."""
    return all(map(_may_be_given, _leaves_in(SimpleNamespace(attribute=attribute), ())))


def _take_apart_with_keys(record: Any) -> tuple[list[tuple[Any, Any]], _Form]:
    values, form = _take_apart(record)
    keys = [*map(pytree.MappingKey, form.keys), *map(pytree.GetAttrKey, form.names)]
    return list(zip(keys, values, strict=True)), form


def _record_of(kind: type, values: Iterable[Any], form: _Form) -> Any:
    values = list(values)
    count = len(form.keys)
    base = _base_of(kind)
    record = base.__new__(kind)
    entries = dict(zip(form.keys, values[:count], strict=True))
    if issubclass(kind, UserDict):
        vars(record)["data"] = entries
    else:
        for key, value in entries.items():
            base.__setitem__(record, key, value)
    links = [(name, _LINK) for name in form.links]
    for name, value in (*zip(form.names, values[count:], strict=True), *form.constants, *links):
        _set(record, name, value)
    _link(values, record)
    return record


def _link(values: Iterable[Any], record: Any) -> None:
    """Lets the records in a new one that refer to what is around them refer to it."""
    for value in values:
        for name, x in _held_in(value).items():
            if x is _LINK:
                _set(value, name, weakref.ref(record))
        if isinstance(value, dict):
            _link(value.values(), record)
        elif isinstance(value, list | tuple):
            _link(value, record)
