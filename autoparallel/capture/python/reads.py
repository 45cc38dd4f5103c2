"""What a run of a copy has read of its attributes, as the state of Python that its trace depends on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from functools import partial
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch import fx, nn

from autoparallel.capture.python.places import Place, masked
from autoparallel.capture.python.watched import Watched
from autoparallel.graph.labels import label_of_entry
from autoparallel.graph.python_state import (
    LIBRARIES,
    MISSING,
    Attributes,
    PythonState,
    is_data,
    is_installed,
    is_users,
    is_users_code,
    slots_of,
)


def note_read(
    state: PythonState,
    watched: Watched,
    name: str,
    left_out: Collection[str] = (),
    journals: Mapping[str, bool] = MappingProxyType({}),
) -> None:
    """Notes an attribute that a run has read of an object before it was written.

    Args:
        left_out, journals: what in it is no part of the trace (see ``places.masked``).
    """
    owner, label = watched.original, watched.label(name)
    table = vars(owner)
    if left_out or journals:
        in_buffers = type(table[name]) is dict and isinstance(owner, nn.Module)
        read = _entries_reader(watched, name) if in_buffers else partial(table.get, name)
        state.watch(label, lambda: masked(read(), label, left_out, journals), (id(table), name))
        return
    if isinstance(owner, nn.Module) and name not in table:
        if name in table["_buffers"]:
            state.watch(label, _tensor_reader(table["_buffers"], name), (id(table), name))
            return
        if name in table["_parameters"] or name in table["_modules"]:
            return  # a kind of call depends on which there are, whether they are read or not
    is_tensor = isinstance(table.get(name), torch.Tensor) and not hasattr(type(owner), name)
    if is_tensor and isinstance(owner, nn.Module):  # the program reads it; of other objects it holds the tensor
        state.watch(label, _tensor_reader(table, name), (id(table), name))
    elif type(table.get(name)) is dict and isinstance(owner, nn.Module):
        state.watch(label, _entries_reader(watched, name), (id(table), name))
    elif name in slots_of(owner):
        state.watch(label, partial(getattr, owner, name, MISSING), (id(table), name))
    elif is_settings(table.get(name)):
        state.watch(label, _settings_reader(partial(table.get, name)), (id(table), name), deep=True)
    elif name in table or not hasattr(type(owner), name):
        state.add(label, table, name)
    else:  # an attribute of the class, until the object has one of this name
        state.add(label, table, name)
        if isinstance(owner, fx.GraphModule) and name == "forward":  # a copy makes the class's function anew
            state.add(watched.label("code"), table, "_code")
        else:
            note_read_of_class(state, type(owner), name)


def note_names(state: PythonState, watched: Watched) -> None:
    """Notes which attributes an object has, and in which order."""
    table = vars(watched.original)
    state.watch(watched.label("__dict__"), partial(list, table), (id(table), "__dict__"))


def note_shared(state: PythonState, places: Sequence[Place]) -> None:
    """Notes that one container stands in several places."""
    first, *others = places
    for place in others:
        holder = vars(place.watched.original)
        state.watch(place.label, partial(_are_one, first, place), (id(holder), place.name, place.entry, "shared"))


def _are_one(first: Place, other: Place) -> bool:
    return first.of_original() is other.of_original()


def note_read_of_class(state: PythonState, cls: type, name: str) -> None:
    """Notes an attribute of a class, which is one of the classes that it is derived from. An object there is the
    user's own, also for a copy: nobody is told what is read of it."""
    cls = next((c for c in cls.__mro__ if name in vars(c)), cls)
    label, value = f"{cls.__module__}.{cls.__qualname__}.{name}", vars(cls).get(name)
    if is_settings(value):
        state.watch(label, _settings_reader(partial(vars(cls).get, name)), (id(cls), name), deep=True)
    else:
        state.add(label, vars(cls), name, deep=is_data(value), owner=cls)


def is_settings(value: Any) -> bool:
    """Whether a value is a class or a module of the user's own, whose attributes may be what a model reads
    (``self.config = Config``)."""
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] not in LIBRARIES and not is_installed(str(vars(value).get("__file__")))
    return isinstance(value, type) and is_users_code(value) and not issubclass(value, Enum | nn.Module | torch.Tensor)


def _settings_reader(read: Callable[[], Any]) -> Callable[[], Any]:
    """Reads a class or a module with its attributes, and those of classes and modules in it."""

    def settings_of(value: Any, outer: tuple[Any, ...] = ()) -> Any:
        if not is_settings(value) or value in outer:
            return value
        classes = value.__mro__ if isinstance(value, type) else ()
        tables = [vars(c) for c in classes if is_users(c)] or [vars(value)]
        held = {name: x for table in reversed(tables) for name, x in table.items() if not name.startswith("__")}
        outer = (*outer, value)
        attributes = {name: settings_of(x, outer) for name, x in held.items() if not hasattr(x, "__get__")}
        return Attributes({"__class__": value} | attributes)

    return lambda: settings_of(read())


def _entries_reader(watched: Watched, name: str) -> Callable[[], Any]:
    """Reads a dict; of the tensors in it whose values a program reads when it runs, what it must know of them."""
    table, buffers = vars(watched.original), vars(watched.copy)["_buffers"]
    keys = {key for key in table[name] if label_of_entry(name, key) in buffers}

    def form_of(key: Any, value: Any) -> Any:
        is_read = key in keys and isinstance(value, torch.Tensor)
        return (tuple(value.shape), value.dtype, value.requires_grad) if is_read else value

    def read() -> Any:
        value = table.get(name)
        return {key: form_of(key, x) for key, x in value.items()} if type(value) is dict else value

    return read


def _tensor_reader(table: Mapping[str, Any], name: str) -> Callable[[], Any]:
    """Reads what a program must know of a tensor whose values it reads when it runs."""

    def read() -> Any:
        value = table.get(name)
        return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value

    return read
