"""Nested values: what a model is given and returns, as leaves."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autoparallel.graph.caches import grows, hold
from autoparallel.graph.python_state import is_plain


def flatten(values: Any, caches: list[Any] | None = None) -> tuple[list[Any], pytree.TreeSpec]:
    """The leaves of nested values.

    Dataclasses of tensors and ``UserDict``s, as transformers' ``BatchEncoding`` is, are made known to torch at their
    first sight, and caches of generation are containers, so that their tensors are leaves.

    Args:
        caches: takes the caches, which are numbered then (see ``caches.hold``).
    """
    leaves, spec = pytree.tree_flatten(values)
    if any(map(grows, leaves)):
        return flatten(hold(values, caches))
    unknown = {type(leaf) for leaf in leaves if _holds_tensors(leaf)}
    for kind in unknown:
        if issubclass(kind, UserDict):
            make = partial(_mapping_of, kind)
            pytree.register_pytree_node(kind, _items_of, make, flatten_with_keys_fn=_keyed_items_of)
        else:
            torch.export.register_dataclass(kind)
    return flatten(values, caches) if unknown else (leaves, spec)


class _Held:
    """A constant that has no leaves: how values nest tells of it."""

    def __init__(self, value: Any) -> None:
        self.value = value


pytree.register_pytree_node(_Held, lambda held: ([], held.value), lambda _, value: value)

_OF_GRAPHS = (type(None), bool, int, float, str)
"""The types of the constants that a graph of torch's is given and returns."""


def is_held(value: Any) -> bool:
    """Whether a value is a constant that no graph of torch's is given or returns: a dtype, a device, an enum."""
    return is_plain(value) and type(value) not in _OF_GRAPHS


def flatten_results(values: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """The same for what a model returns and sets, without the constants that no graph returns (dtypes, devices, enums),
    which ``pytree.tree_unflatten`` puts back."""

    leaves, spec = flatten(values)
    if not any(map(is_held, leaves)):
        return leaves, spec
    return flatten(pytree.tree_map(lambda leaf: _Held(leaf) if is_held(leaf) else leaf, values))


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


def _holds_tensors(leaf: Any) -> bool:
    if isinstance(leaf, UserDict):
        return True
    if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
        return False
    values = [getattr(leaf, field.name) for field in dataclasses.fields(leaf)]
    return any(isinstance(x, torch.Tensor) or _holds_tensors(x) for x in pytree.tree_leaves(values))


def _items_of(mapping: UserDict[Any, Any]) -> tuple[list[Any], tuple[Any, ...]]:
    return list(mapping.values()), tuple(mapping)


def _keyed_items_of(mapping: UserDict[Any, Any]) -> tuple[list[Any], tuple[Any, ...]]:
    return [(pytree.MappingKey(key), value) for key, value in mapping.items()], tuple(mapping)


def _mapping_of(kind: type, values: Iterable[Any], keys: tuple[Any, ...]) -> Any:
    return kind(dict(zip(keys, values, strict=True)))
