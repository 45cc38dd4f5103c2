"""Nested values: what a model is given and returns, as leaves."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autoparallel.graph.caches import grows, hold
from autoparallel.graph.errors import CaptureError
from autoparallel.graph.records import is_held, register_records


def flatten(values: Any, caches: list[Any] | None = None) -> tuple[list[Any], pytree.TreeSpec]:
    """The leaves of nested values.

    Objects that hold tensors are made known to torch at their first sight (see ``records``), and caches of generation
    are containers, so that their tensors are leaves.

    Args:
        caches: takes the caches, which are numbered then (see ``caches.hold``).
    """
    try:
        leaves, spec = pytree.tree_flatten(values)
    except RecursionError:
        raise CaptureError(
            "an argument, or what the model returns, holds itself (a.parent.child is a), and nobody comes to its end\n"
            "What to change: pass and return objects without the way back, or make it a weak one (weakref.ref(parent))."
        ) from None
    if any(map(grows, leaves)):
        return flatten(hold(values, caches))
    return flatten(values, caches) if register_records(leaves) else (leaves, spec)


def flatten_by_names(values: Any) -> list[tuple[list[Any], Any]]:
    """The leaves of nested values, each with the keys, indices and names that lead to it."""
    leaves, spec = flatten(values)
    paths, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(range(len(leaves)), spec))
    return [([_name_of(key) for key in path], leaves[place]) for path, place in paths]


def _name_of(key: Any) -> Any:
    names = (getattr(key, name, None) for name in ("key", "idx", "name"))
    return next((name for name in names if name is not None), key)


def map_tensors(function: Callable[[torch.Tensor], Any], values: Any) -> Any:
    """Nested values with what a function makes of their tensors, of those in objects, too."""
    flatten(values)  # from now on torch looks into the objects
    return pytree.tree_map(
        lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, values,
        is_leaf=lambda value: isinstance(value, torch.Size),
    )  # fmt: skip


def cast_floats(values: Any, dtype: torch.dtype | None) -> Any:
    """Nested values with their floating tensors in another dtype; None leaves them as they are."""
    if dtype is None:
        return values
    return map_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, values)


class _Held:
    """A constant that has no leaves: how values nest tells of it."""

    def __init__(self, value: Any) -> None:
        self.value = value


pytree.register_pytree_node(_Held, lambda held: ([], held.value), lambda _, value: value)


class _Sizes:
    """Stands for a ``torch.Size``, of which torch would make a tuple."""

    def __init__(self, sizes: torch.Size) -> None:
        self.sizes = list(sizes)


def _sizes_of(sizes: Iterable[Any], _: None) -> tuple[Any, ...]:
    """The ``torch.Size`` of its numbers; of what is kept of each result, a tuple."""
    sizes = tuple(sizes)
    return torch.Size(sizes) if all(isinstance(size, int) for size in sizes) else sizes


pytree.register_pytree_node(_Sizes, lambda held: (held.sizes, None), _sizes_of)


def flatten_results(values: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """The same for what a model returns and sets, without the constants that no graph returns (dtypes, devices, enums),
    which ``pytree.tree_unflatten`` puts back, as it does a ``torch.Size``."""

    leaves, spec = flatten(values)
    if not any(map(is_held, leaves)) and not _has_sizes(spec):
        return leaves, spec
    return flatten(pytree.tree_map(_as_container, values, is_leaf=lambda value: isinstance(value, torch.Size)))


def _has_sizes(spec: pytree.TreeSpec) -> bool:
    return spec.type is torch.Size or any(map(_has_sizes, spec.children()))


def _as_container(leaf: Any) -> Any:
    """What stands for a leaf that has none of its own."""
    if isinstance(leaf, torch.Size):
        return _Sizes(leaf)
    return _Held(leaf) if is_held(leaf) else leaf


def unflatten(leaves: Iterable[Any], spec: pytree.TreeSpec) -> Any:
    """Nested values of their leaves; what is a dict and a dataclass, as outputs of transformers are, has its entries in
    the order in which they were set."""
    value = pytree.tree_unflatten(leaves, spec)
    _sort_entries(value, spec)
    return value


def _sort_entries(value: Any, spec: pytree.TreeSpec) -> None:
    children = spec.children()
    parts: Iterable[Any] = ()
    if isinstance(value, OrderedDict) and dataclasses.is_dataclass(value):
        entries = dict(value.items())
        for key in spec.context:
            if key in entries:  # a field that is None is no entry
                value.move_to_end(key)
        parts = [entries.get(key) for key in spec.context]
    elif isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, list | tuple):
        parts = value
    for part, child in zip(parts, children, strict=False):
        _sort_entries(part, child)
