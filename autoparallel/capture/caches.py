"""The caches of generation that a model of transformers makes in every call, unless its configuration forbids it.

A step of training or evaluation needs none.  Where a call does not ask for a cache, the traced copy of a model makes
none; one that a model returns all the same is left out, as if ``use_cache=False`` had been passed.  One that is asked
for is carried out where it can be (see ``graph.caches``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from autoparallel.graph.nesting import unflatten

ASKING = ("use_cache", "cache", "past_key_values", "cache_params")
"""The arguments by which a call asks for a cache, or brings one."""

CURE = (
    "a DynamicCache without sliding windows is carried out, any other is left to a plain copy of the model: call this "
    "one without use_cache=True and past_key_values"
)

_LIBRARIES = ("transformers.", "peft.")


def asks_for_cache(forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of ``forward`` asks for a cache, or brings one."""
    try:
        bound = inspect.signature(forward).bind_partial(*args, **kwargs).arguments
    except TypeError:  # which calling it says better
        return False
    return any({**bound, **kwargs}.get(name) not in (None, False) for name in ASKING)


def make_no_caches(copied: nn.Module) -> None:
    """Lets the copy of a model of transformers make no caches, by its configuration; a model of the user's that calls
    one may read them, and keeps them."""
    if not _is_of(type(copied), _LIBRARIES):
        return
    for module in copied.modules():
        config: Any = vars(module).get("config")
        if getattr(config, "use_cache", False) is True and _is_of(type(config), _LIBRARIES):
            config.use_cache = False


def without_caches(outputs: Any) -> Any:
    """The outputs of a call without the caches among them: a field becomes None, a member of a tuple is gone."""

    def gone(value: Any) -> Any:
        return tuple([x for x in value if not _is_cache(x)]) if _holds_cache(value) else None

    def is_leaf(value: Any) -> bool:
        return _is_cache(value) or _holds_cache(value)

    leaves, spec = pytree.tree_flatten(outputs, is_leaf=is_leaf)
    return unflatten([gone(x) if is_leaf(x) else x for x in leaves], spec) if any(map(is_leaf, leaves)) else outputs


def _holds_cache(value: Any) -> bool:
    return type(value) is tuple and any(_is_cache(x) for x in value)


def _is_cache(value: Any) -> bool:
    """Whether a value is of a class of transformers that is called a cache."""
    return any(c.__name__.endswith("Cache") and _is_of(c, _LIBRARIES[:1]) for c in type(value).__mro__)


def _is_of(cls: type, libraries: tuple[str, ...]) -> bool:
    return any(base.__module__.startswith(libraries) for base in cls.__mro__)
