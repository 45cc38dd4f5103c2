"""Places outside of a model that its functions load from: globals, closure cells, and attributes of what is there."""

from __future__ import annotations

import copy
from array import array
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from autoparallel.capture.python.containers import everything_in, holds_the_same, plain_copy, refill
from autoparallel.graph.generators import GENERATORS, set_state, state_of
from autoparallel.graph.python_state import MISSING, WITH_STATE, freeze, is_data, slots_of
from autoparallel.graph.surroundings import SCRIPT, TRACED, Surroundings
from autoparallel.graph.variables import Variable

Finder = Callable[[], Sequence[Variable]]
"""Finds the variables that have an object."""


def find_nothing() -> Sequence[Variable]:
    """For an object that no variable has."""
    return ()


def holds_settings(value: Any) -> bool:
    """Whether an object is a mapping, or like one whose entries are its attributes, too: a configuration; or an
    optimizer and its like."""
    is_mapping = all(hasattr(type(value), name) for name in ("__getattr__", "__getitem__"))
    return is_mapping or isinstance(value, (Mapping, *WITH_STATE))


def attribute_of(value: Any, name: str) -> Any:
    """An attribute; ``MISSING`` where there is none, which an object with a ``__getattr__`` may tell by any error."""
    try:
        return getattr(value, name, MISSING)
    except Exception:  # noqa: BLE001 - whatever the class of a configuration raises
        return MISSING


class Root:
    """A place that a function loads from: a global, a cell, or an attribute of what is there.

    Attributes:
        key: tells it from others.
        label: for messages.
        read: reads what is there now.
        write: puts a value there; None where what a run has changed is left as it is.
        now: what the run has made of it, in short.
        variable: where it is one itself.
        find: finds the variables that it is reached by.
        line: of the function that loads it.
    """

    def __init__(
        self,
        key: Hashable,
        label: str,
        read: Callable[[], Any],
        line: str,
        write: Callable[[Any], None] | None = None,
        find: Finder = find_nothing,
        variable: Variable | None = None,
    ) -> None:
        self.line = line
        self.key, self.label, self.read, self.write = key, label, read, write
        self.variable, self.find = variable, find
        self.now = ""
        self.value = read()
        self.frozen: Hashable = freeze(self.value, deep=True)
        self._contents = [(x, _content_of(x)) for x in everything_in(self.value)]

    def look_after(self, surroundings: Surroundings) -> str | None:
        """Has its value, a number, looked after from now on; the label that it has then, or None where no variable has
        it, or one that holds too much to be copied for each trace."""
        variables, rest = self.find(), self.label.partition(".")[2]
        if not variables or not all(_is_copied_soon(variable.read()) for variable in variables):
            return None
        for variable in variables:
            surroundings.add(variable)
        path = f"{SCRIPT}.{surroundings.name_of(variables[0])}"
        return path if not rest or variables[0].read() is self.read() else f"{path}.{rest}"

    def changed(self) -> bool:
        return freeze(self.read(), deep=True) != self.frozen

    def restore(self) -> None:
        """Puts back what was there: the value, entries of containers, attributes of objects, states of generators."""
        if self.write is not None and self.read() is not self.value:
            self.write(self.value)
        for value, content in self._contents:
            if content is not None:
                _put_back(value, content)


def _is_copied_soon(value: Any) -> bool:
    """Whether ``copy.deepcopy`` makes a copy of a value, without much work."""
    memo: dict[int, Any] = {id(TRACED): TRACED}
    for count, x in enumerate(everything_in(value)):
        if isinstance(x, torch.Tensor | nn.Module):
            memo[id(x)] = x
        if count > _MOST_COPIED:
            return False
    try:
        copy.deepcopy(value, memo)
    except Exception:  # noqa: BLE001 - whatever an object that has a file or a lock raises
        return False
    return True


_MOST_COPIED = 1000
"""So many lists and objects may be in what is copied for a number."""


def _content_of(value: Any) -> Any:
    """A copy of what may change in a value itself; None for nothing."""
    if isinstance(value, GENERATORS):
        return state_of(value)
    if isinstance(value, list | dict | set | deque):
        return plain_copy(value)
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, array | bytearray):
        return value[:]
    slots = {name: getattr(value, name, MISSING) for name in slots_of(value)}
    return (dict(vars(value)) if is_data(value) else {}, slots) if is_data(value) or slots else None


def _put_back(value: Any, content: Any) -> None:
    """Puts back what was in a value, where it has changed: other threads may have it, too."""
    if isinstance(value, GENERATORS):
        set_state(value, content)
    elif isinstance(value, np.ndarray):
        if value.flags.writeable:
            value[...] = content
    elif isinstance(value, array | bytearray):
        value[:] = content
    elif isinstance(content, tuple):
        content, slots = content
        attributes = vars(value) if is_data(value) else {}
        for name in attributes.keys() - content.keys():
            del attributes[name]
        attributes.update({name: x for name, x in content.items() if attributes.get(name, MISSING) is not x})
        for name, x in slots.items():
            if x is not getattr(value, name, MISSING):
                delattr(value, name) if x is MISSING else object.__setattr__(value, name, x)
    elif not holds_the_same(value, content):
        refill(value, content)
