"""The objects and containers of a copy of a model, each beside that of the model which it was copied from."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from types import MethodType
from typing import Any

from torch import nn

from autoparallel.capture.python.containers import BY_VALUE
from autoparallel.capture.python.watched import Watched, WatchedVariables
from autoparallel.graph.labels import is_key, label_in, label_of_entry
from autoparallel.graph.python_state import is_data, is_plain, slots_of


def copied_objects(
    modules: Mapping[str, tuple[nn.Module, nn.Module]], around: WatchedVariables, memo: dict[int, Any]
) -> list[Watched]:
    """The modules of a copy, and the objects of the user's that they hold, or that are held by nobody.

    Args:
        modules: the model and its loss, each before its copy, by what the paths of their modules begin with.
        around: what variables around the model hold.
        memo: that of ``copy.deepcopy``.
    """
    objects: dict[int, Watched] = {id(vars(around.copy)): around}

    def add(path: str, original: Any, twin: Any) -> None:
        objects.setdefault(id(vars(twin)), Watched(path, original, twin))

    for prefix, (theirs, ours) in modules.items():
        for path, module in ours.named_modules(remove_duplicate=False):
            add(label_in(prefix, path), theirs.get_submodule(path), module)
    originals = {id(twin): original for original, twin in _pairs_in(memo) if is_data(original)}
    held = [(w.label(name), x) for w in objects.values() for name, x in vars(w.copy).items()]
    for label, twin in _objects_held(held, originals):
        add(label, originals[id(twin)], twin)
    for original in originals.values():
        add(type(original).__name__, original, memo[id(original)])
    return [*objects.values()]


def copied_containers(objects: Collection[Watched], memo: dict[int, Any]) -> list[tuple[Any, Any]]:
    """The lists, dicts, sets and others of a model, each before that of its copy, but for the tables of objects."""
    tables = {id(vars(w.original)) for w in objects}
    modules = [w.original for w in objects if isinstance(w.original, nn.Module)]
    tables |= {id(vars(module)[kind]) for module in modules for kind in ("_buffers", "_parameters")}
    kinds = (list, dict, set, deque, *BY_VALUE)
    return [(x, twin) for x, twin in _pairs_in(memo) if id(x) not in tables and (isinstance(x, kinds) or slots_of(x))]


def _pairs_in(memo: dict[int, Any]) -> Iterator[tuple[Any, Any]]:
    """What ``copy.deepcopy`` has made a copy of, with that."""
    for original in memo.get(id(memo), ()):
        if memo.get(id(original), original) is not original:
            yield original, memo[id(original)]


def _objects_held(held: Iterable[tuple[str, Any]], objects: Container[int]) -> Iterator[tuple[str, Any]]:
    """Objects that modules hold, also in lists and dicts and by their methods, and then what those hold, with their
    places (``a.b[0].c``).

    Args:
        held: what modules hold, with its places.
        objects: the ids of what counts.
    """
    places = deque(sorted(held, key=lambda place: place[0].count(".")))
    visited: set[int] = set()
    while places:
        label, value = places.popleft()
        if isinstance(value, MethodType):  # a hook, perhaps
            label, value = f"{label}.__self__", value.__self__
        is_object, is_container = id(value) in objects, isinstance(value, list | tuple | dict | deque)
        if id(value) in visited or not (is_object or is_container):
            continue
        visited.add(id(value))
        if is_object:
            yield label, value
            places.extend((f"{label}.{name}", x) for name, x in vars(value).items())
        else:
            entries = value.items() if isinstance(value, dict) else enumerate(value)
            places.extend((label_of_entry(label, key), x) for key, x in entries if not is_plain(x) and is_key(key))
