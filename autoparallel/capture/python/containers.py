"""Lists, dicts, sets and objects without a ``__dict__``: what they hold, and whether that has changed."""

from __future__ import annotations

from array import array
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import is_
from typing import Any

import numpy as np

from autoparallel.graph.generators import GENERATORS
from autoparallel.graph.python_state import (
    MISSING,
    attributes_beside,
    freeze,
    is_data,
    is_plain,
    is_same,
    kind_of,
    slots_of,
)

BY_VALUE = (np.ndarray, array, bytearray, *GENERATORS)
"""What holds numbers, or draws them."""

_WHOLE = (list, dict, set, tuple, deque, *BY_VALUE)


def is_container(value: Any) -> bool:
    """Whether a value is compared as a whole, whatever is read of it."""
    is_held = isinstance(value, Mapping | UserList) or bool(slots_of(value))
    return isinstance(value, _WHOLE) or is_held and not is_data(value)


def may_change(value: Any) -> bool:
    """Whether a default can be another in another call, and is compared by what it holds."""
    return value is not None and (is_plain(value) or is_container(value) or is_data(value))


def is_remade(before: Any, now: Any) -> bool:
    """The same for a list, a tuple or a dict of such values as well (``self.anchors = [a.to(x) for a in
    self.anchors]``)."""
    if type(before) is not type(now) or type(now) not in (list, tuple, dict):
        return is_same(before, now)
    return len(before) == len(now) and all(map(is_remade, flat(before), flat(now)))


def entries_of(container: Any) -> Any:
    """A plain copy of a container; of an object without a ``__dict__``, its attributes; of numbers, what compares
    them."""
    if isinstance(container, BY_VALUE):
        return freeze(container)
    names = slots_of(container)
    return {name: getattr(container, name, MISSING) for name in names} if names else plain_copy(container)


def plain_copy(container: Any) -> Any:
    """A list, dict, set or deque of Python's own that holds the same; ``copy()`` of a user's class may make others."""
    kind = kind_of(container)
    return dict(kind.items(container)) if isinstance(container, dict) else kind(container)


def holds_the_same(container: Any, entries: Any) -> bool:
    """Whether two containers hold the very same objects in the same order, which most of a model's do."""
    if isinstance(container, dict):
        return len(container) == len(entries) and all(map(is_, flat(container), flat(entries)))
    return len(container) == len(entries) and all(map(is_, container, entries))


def flat(container: Any) -> Iterator[Any]:
    """What a container holds; of a dict the keys, too."""
    if isinstance(container, dict):
        for key, value in kind_of(container).items(container):
            yield key
            yield value
    else:
        yield from sorted(container, key=id) if isinstance(container, set) else container


def refill(container: Any, entries: Any) -> None:
    """Puts back what a container held."""
    kind = kind_of(container)
    kind.clear(container)
    (kind.extend if kind in (list, deque) else kind.update)(container, entries)


@contextmanager
def entries_exchanged(containers: Iterable[Any], exchanged: Mapping[int, Any]) -> Iterator[None]:
    """Inside, lists, dicts and sets hold other objects.

    Args:
        exchanged: what they hold instead, by the id of what they held before.
    """
    before: list[tuple[Any, Any]] = []
    for container in containers:
        if isinstance(container, list | dict | set | deque) and any(id(x) in exchanged for x in flat(container)):
            before.append((container, plain_copy(container)))
            entries = [exchanged.get(id(x), x) for x in flat(container)]
            refill(container, zip(*[iter(entries)] * 2, strict=True) if isinstance(container, dict) else entries)
    try:
        yield
    finally:
        for container, entries in before:
            refill(container, entries)


def everything_in(value: Any) -> Iterator[Any]:
    """A value, and what is in it: in lists and dicts, as attributes of objects of the user's, and in what a
    ``functools.partial`` comes with."""
    left, visited = [value], set[int]()
    while left:
        value = left.pop()
        if is_plain(value) or id(value) in visited:
            continue
        visited.add(id(value))
        yield value
        if isinstance(value, list | tuple | dict | set | deque):
            kind = kind_of(value)  # past what a user's class makes of iteration, or of its length, which may even raise
            left.extend(kind.values(value) if isinstance(value, dict) else kind.__iter__(value))
            left.extend([vars(value)] if attributes_beside(value) else ())
        elif isinstance(value, partial):
            left.extend((value.func, value.args, value.keywords))
        elif is_data(value) or isinstance(value, UserDict | UserList):
            left.extend(vars(value).values())


def objects_in(value: Any) -> Iterator[Any]:
    """A list or dict, and those in it, also as attributes of objects of the user's."""
    return (x for x in everything_in(value) if isinstance(x, list | tuple | dict | set | deque))


def leaves_of(value: Any) -> Iterator[Any]:
    """What lists, tuples and dicts hold in the end."""
    if isinstance(value, list | tuple):
        for x in value:
            yield from leaves_of(x)
    elif type(value) in (dict, OrderedDict, defaultdict):
        for x in value.values():
            yield from leaves_of(x)
    else:
        yield value
