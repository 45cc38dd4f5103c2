"""What a call changes of containers that are not its own: of those that it is given (``batch.pop("labels")``,
``batch["h"] = h``, ``batch.h = h``), and of those that the model keeps (``self.log.append(h)``).

The change is described by nested lists, of which the tensors are outputs of the program like any others, and is made to
the user's own containers after the call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autoparallel._torch.tensors import share_storage
from autoparallel.graph.errors import CaptureError
from autoparallel.graph.python_state import is_plain, is_same
from autoparallel.graph.records import attributes_of, fields_of

ARGUMENTS = "entries of its arguments"
"""The name under which a trace keeps the changes, beside the attributes that a call sets."""

ENTRIES = "[:]"
"""How the name of a container of the model ends under which a trace keeps what a call changes in it."""

Container = dict[Any, Any] | list[Any]

Entries = tuple[list[Any] | None, Container]
"""The keys that are gone (of a list how many entries are left), or None for all of them; and what is new, of a list by
its place where some of that takes the place of another."""


ATTRIBUTES = "__dict__"
"""The step of a path from an object to the dict of its attributes."""

SLOTS = "__slots__"
"""The same to those that are in slots, where it has some."""


@dataclass(frozen=True)
class NotedContainer:
    """A container among the arguments of a call, and its entries before the call.

    Attributes:
        path: leads to it from ``(args, kwargs)``.
        container: a dict, a list or a deque, the dict of an object's attributes, or an object that has slots.
    """

    path: tuple[Any, ...]
    container: Any
    entries: Container

    @property
    def entries_now(self) -> Container:
        if self.path[-1] == SLOTS:
            return fields_of(self.container)
        return list(self.container) if isinstance(self.entries, list) else self.container


def note_containers(args: Sequence[Any], kwargs: dict[str, Any]) -> list[NotedContainer]:
    """The containers among the arguments of a call, with their entries."""
    return list(_containers_in((args, kwargs), ()))


def require_apart(args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raises ValueError where a call is given one container twice: a trace is given two, of which it changes one."""
    containers = [x.container for x in note_containers(args, kwargs)]
    if len({*map(id, containers)}) < len(containers):
        raise ValueError(
            "one container is given twice to a call that changes what it is given\n"
            "What to change: give it once, or give a copy (copy.copy(batch))."
        )


def _containers_in(value: Any, path: tuple[Any, ...]) -> Iterator[NotedContainer]:
    if isinstance(value, dict | list | deque) and len(path) > 1:  # keyword arguments are a dict of the call's own
        yield NotedContainer(path, value, dict(value) if isinstance(value, dict) else list(value))
    if isinstance(value, dict | list | deque | tuple):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _containers_in(entry, (*path, key))
    if type(value) not in pytree.SUPPORTED_NODES:
        return
    if (attributes := attributes_of(value)) is not None:
        yield from _containers_in(attributes, (*path, ATTRIBUTES))
    if fields := fields_of(value):
        yield NotedContainer((*path, SLOTS), value, fields)
        yield from _containers_in(tuple(fields.values()), (*path, SLOTS))


def describe_changes(noted: Sequence[NotedContainer]) -> list[Any]:
    """What a call has changed: for each container its path, the keys that are gone or stand elsewhere, and the entries
    that are new; of a list or a deque how many entries are left, and those from the first one on that is another.

    Raises:
        CaptureError: for keys that are neither numbers nor strings.
    """
    changes: list[Any] = []
    for x in noted:
        now, before = x.entries_now, x.entries
        if isinstance(now, list):
            same = next((i for i, (a, b) in enumerate(zip(now, before, strict=False)) if a is not b), None)
            first = min(len(now), len(before)) if same is None else same
            if first < max(len(now), len(before)):
                changes.append([list(x.path), [first], now[first:]])
            continue
        assert isinstance(before, dict)
        moved = _moved_keys(before, now)
        new = {key: x for key, x in now.items() if key in moved or key not in before or before[key] is not x}
        gone = [key for key in before if key in moved or key not in now]
        if (new or gone) and x.path[-1] == SLOTS:
            raise CaptureError(
                f"the model changes a {type(x.container).__name__} that it is given, in its __slots__\n"
                "What to change: work on a copy (copy.copy(batch), dataclasses.replace(batch, x=h)), and return "
                "what is new."
            )
        if new or gone:
            changes.append([list(x.path), gone, new])
    for path, gone, new in changes:
        if not all(map(is_plain, (*path, *gone, *(new if isinstance(new, dict) else ())))):
            raise CaptureError(
                "the model changes a dict that it is given, whose keys are neither numbers nor strings\n"
                "What to change: work on a copy (batch = dict(batch)), and return what is new."
            )
    return changes


def _moved_keys(before: dict[Any, Any], now: Container) -> set[Any]:
    """The keys of a dict that stand behind others than before, as those of entries do that are taken out and put back:
    all from the first such one on."""
    in_order = [key for key in before if key in now]
    place = next((i for i, (key, moved) in enumerate(zip(in_order, now, strict=False)) if key != moved), len(in_order))
    return {*in_order[place:]}


def require_writable(leaves: Sequence[Any], places: Collection[int], others: Sequence[torch.Tensor]) -> None:
    """Raises ValueError where a call may not write into what it is given: a trace shows neither the parts of a
    ``DTensor``, nor who else reads the memory.

    Args:
        leaves: the inputs, as the user has them.
        places: of those that are written to.
        others: the model's own tensors that the call reads.
    """
    for place in places:
        written = leaves[place]
        if isinstance(written, DTensor):
            raise ValueError(f"the call changes an input in place that is a DTensor\n{_COPY}")
        sharing = [x for x in (*leaves, *others) if isinstance(x, torch.Tensor) and x is not written]
        if any(share_storage(x, written) for x in sharing):
            raise ValueError(
                "the call changes an input in place that shares its memory with another input, or with a tensor of the "
                f"model\n{_COPY}"
            )


_COPY = "What to change: give it a copy (x.clone()), or have the model work on one."


def make_changes(changes: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Makes the changes to the arguments themselves, which are found before any of them changes."""
    containers = [_container_at(path, args, kwargs) for path, _, _ in changes]
    for container, (_, gone, new) in zip(containers, changes, strict=True):
        change_entries(container, gone, new)


def _container_at(path: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    container: Any = (args, kwargs)
    for key in path:
        if key == SLOTS:
            container = tuple(fields_of(container).values())
        else:
            container = vars(container) if key == ATTRIBUTES else container[key]
    return container


def shown_changes(names: Collection[str]) -> str:
    """What a call sets and changes beside its outputs, in words.

    Args:
        names: those under which a trace keeps it.
    """
    containers = [name.removesuffix(ENTRIES) for name in names if name.endswith(ENTRIES)]
    others = [name for name in names if not name.endswith(ENTRIES)]
    parts = [f"sets {', '.join(others)}"] * bool(others)
    parts += [f"changes the entries of {', '.join(containers)}"] * bool(containers)
    return " and ".join(parts)


def change_entries(container: Any, gone: list[Any] | None, new: Container) -> None:
    """Makes one change (see ``Entries``) to a container itself."""
    if gone is None:
        container.clear()
    elif isinstance(container, dict):
        for key in gone:
            container.pop(key, None)
    elif gone:
        while len(container) > gone[0]:
            container.pop()
    if isinstance(new, dict):
        for key, entry in new.items():  # a Counter's update() adds
            if isinstance(container, list) and key == len(container):
                container.append(entry)
            else:
                container[key] = entry
    else:
        (container.update if isinstance(container, set) else container.extend)(new)


def entries_changed(before: Any, now: Any) -> Entries:
    """What has changed in a container of the same type: what is new by its keys, in a sequence by its places, where
    nothing else has moved."""
    if isinstance(now, dict):
        new = {key: x for key, x in now.items() if key not in before or not is_same(before[key], x)}
        left = [key for key in before if key in now]
        is_in_order = list(now)[: len(left)] == left
        return ([key for key in before if key not in now], new) if is_in_order else (None, dict(now))
    if len(now) != len(before):
        return None, list(now)
    return [], {i: x for i, (x, was) in enumerate(zip(now, before, strict=True)) if not is_same(was, x)}
