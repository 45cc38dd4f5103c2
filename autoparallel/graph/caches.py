"""Caches of generation of transformers, as containers of tensors.

A cache is handed in and grows in the call, or is made there; which of its layers hold something, and of which class
they are, is how it nests, and their keys and values are leaves.  In a call a cache that is handed in is another object,
which has its number; what is returned with that number is what the caller's object becomes.

Only caches that grow by concatenation are carried out: others have their state in Python numbers, which a trace fixes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

PLACE = "_autoparallel_place"
"""The attribute of a cache in a call that is the number of the one that was handed in."""


@dataclass(frozen=True)
class Form:
    """How a cache nests.

    Attributes:
        kind: its class.
        layers: the classes of its layers, and whether each holds keys and values; none of one that consists of parts.
        place: its number among those that are handed in; None for one that is made in the call.
    """

    kind: type
    layers: tuple[tuple[type, bool], ...] = ()
    place: int | None = None


class HeldCache:
    """A cache as a container: its keys and values one behind the other, or its parts.

    Args:
        leaves: tensors, or caches.
    """

    def __init__(self, form: Form, leaves: Sequence[Any]) -> None:
        self.form, self.leaves = form, list(leaves)


pytree.register_pytree_node(
    HeldCache,
    lambda cache: (cache.leaves, cache.form),
    lambda leaves, form: HeldCache(form, [*leaves]),
    flatten_with_keys_fn=lambda cache: ([(pytree.SequenceKey(i), x) for i, x in enumerate(cache.leaves)], cache.form),
)


def hold(values: Any, caches: list[Any] | None = None) -> Any:
    """Nested values with containers in place of caches.

    Args:
        caches: takes the caches, which get their numbers in it.
    """

    def container(value: Any) -> Any:
        if not grows(value):
            return value
        cache = _container_of(value)
        if caches is None:
            return cache
        caches.append(value)
        return HeldCache(replace(cache.form, place=len(caches) - 1), cache.leaves)

    return pytree.tree_map(container, values)


def release(values: Any, originals: Sequence[Any] = ()) -> Any:
    """Nested values with caches in place of containers.

    Args:
        originals: the caches that were handed in; each becomes what was made of it, and is returned itself.
    """

    def released(value: Any) -> Any:
        if not isinstance(value, HeldCache):
            return value
        cache, place = _cache_of(value), value.form.place
        if place is None or not originals:
            return cache
        _become(originals[place], cache)
        return originals[place]

    return pytree.tree_map(released, values, is_leaf=lambda x: isinstance(x, HeldCache))


def caches_in(values: Any) -> Iterator[Any]:
    """The caches among nested values."""
    yield from (x for x in pytree.tree_leaves(values) if grows(x))


def tensors_in(cache: Any) -> list[torch.Tensor]:
    """The keys and values of a cache."""
    return [leaf for leaf in pytree.tree_leaves(_container_of(cache)) if isinstance(leaf, torch.Tensor)]


def is_of_caches(value: Any) -> bool:
    """Whether a value is a cache of transformers, or a layer of one: also of those that keep numbers of Python."""
    library = sys.modules.get("transformers.cache_utils")
    if library is None:
        return False
    kinds = [getattr(library, name, None) for name in ("Cache", "EncoderDecoderCache", "CacheLayerMixin")]
    return isinstance(value, tuple(kind for kind in kinds if kind is not None))


def grows(value: Any) -> bool:
    """Whether a value is a cache that is carried out."""
    if not is_of_caches(value):
        return False
    library: Any = sys.modules["transformers.cache_utils"]
    if type(value) is library.EncoderDecoderCache:
        return grows(value.self_attention_cache) and grows(value.cross_attention_cache)
    layers = getattr(value, "layers", None)  # of transformers from 4.54 on
    if type(value) is not library.DynamicCache or layers is None or getattr(value, "offloading", False):
        return False
    return all(type(layer) is library.DynamicLayer for layer in layers)


def _container_of(cache: Any) -> HeldCache:
    place = vars(cache).get(PLACE)
    if hasattr(cache, "self_attention_cache"):
        parts = [cache.self_attention_cache, cache.cross_attention_cache]
        return HeldCache(Form(type(cache), place=place), [_container_of(part) for part in parts])
    layers = tuple([(type(layer), bool(layer.is_initialized)) for layer in cache.layers])
    leaves = [x for layer in cache.layers if layer.is_initialized for x in (layer.keys, layer.values)]
    return HeldCache(Form(type(cache), layers, place), leaves)


def _cache_of(held: HeldCache) -> Any:
    """A cache of a form."""
    form = held.form
    if not form.layers and any(isinstance(leaf, HeldCache) for leaf in held.leaves):
        cache = form.kind(*map(_cache_of, held.leaves))
    else:
        cache, leaves = form.kind(), iter(held.leaves)
        cache.layers = [_layer(kind, next(leaves), next(leaves)) if full else kind() for kind, full in form.layers]
    if form.place is not None:
        setattr(cache, PLACE, form.place)
    return cache


def _layer(kind: type, keys: Any, values: Any) -> Any:
    layer: Any = kind()
    layer.keys, layer.values, layer.is_initialized = keys, values, True
    if isinstance(keys, torch.Tensor):  # and not what says why it was not kept
        layer.dtype, layer.device = keys.dtype, keys.device
    return layer


def _become(cache: Any, new: Any) -> None:
    """Makes a cache of the caller's what it has become in a call."""
    if hasattr(cache, "self_attention_cache"):
        _become(cache.self_attention_cache, new.self_attention_cache)
        _become(cache.cross_attention_cache, new.cross_attention_cache)
        cache.is_updated = new.is_updated
        return
    for layer, grown in zip(cache.layers, new.layers, strict=False):
        vars(layer).update(vars(grown))
    cache.layers.extend(new.layers[len(cache.layers) :])
