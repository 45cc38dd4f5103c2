"""Labels of what a model holds: an attribute of a module, or of an object, or an entry of a list or dict that is one
(``layers.0.stats['train']['steps']``)."""

from __future__ import annotations

import ast
import functools
import re
from collections import deque
from collections.abc import Iterator
from typing import Any

_STEP = re.compile(r"\[((?:'[^']*'|[^'\[\]])*)\]|([^.\[]+)")

MOST_DEEP = 8
"""Of so many containers in containers the places are told."""


def is_key(key: Any) -> bool:
    """Whether the text of an entry's key tells which entry it is."""
    if type(key) is tuple:
        return all(map(is_key, key))
    return type(key) in (int, bool) or type(key) is str and repr(key) == f"'{key}'" and not {"'", "`"} & {*key}


def has_place(key: Any) -> bool:
    """Whether a buffer can have such an entry's label as its name, too: neither dots nor brackets are in the key."""
    return is_key(key) and not {".", "[", "]"} & {*repr(key)}


def label_in(path: str, name: str) -> str:
    """The label of what has a name in something, such as an attribute of a module; the model itself has no path."""
    return f"{path}.{name}" if path and name else path or name


def label_of_entry(label: str, key: Any) -> str:
    """The label of an entry of a container."""
    return f"{label}[{key!r}]"


@functools.cache  # each call reads and sets what it carries by these
def steps_of(label: str) -> tuple[tuple[bool, Any], ...]:
    """The way to what has a label: whether each step is to an entry, and the name or the key."""
    return tuple([(not name, name or ast.literal_eval(key)) for key, name in _STEP.findall(label)])


@functools.cache
def split_entry(label: str) -> tuple[str, Any]:
    """The label of a container, and the key of its entry that has this label."""
    *_, last = _STEP.finditer(label)
    return label[: last.start()], ast.literal_eval(last[1])


def is_entry(label: str) -> bool:
    """Whether a label is that of an entry, not of an attribute."""
    return label.endswith("]")


def step_from(holder: Any, is_to_entry: bool, key: Any) -> Any:
    """What stands at the next step; a dict makes no entry that is not there.

    Raises AttributeError or LookupError where nothing does.
    """
    if not is_to_entry:
        return getattr(holder, key)
    if isinstance(holder, dict) and key not in holder:
        raise KeyError(key)
    return holder[key]


def containers_in(value: Any, label: str, closed: type, outer: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """A list, dict, tuple, deque or set, and those in it, with their labels.

    Args:
        closed: what is not looked into.
    """
    if isinstance(value, list | dict | tuple | deque | set) and id(value) not in outer and len(outer) < MOST_DEEP:
        yield label, value
        if isinstance(value, (set, closed)):
            return
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            if is_key(key):
                yield from containers_in(entry, label_of_entry(label, key), closed, (*outer, id(value)))
