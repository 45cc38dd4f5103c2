"""What operators make on meta tensors, looked up: a dry run meets few kinds of calls, and each of them very often.

Torch works out the shape of a sum or of a product in Python, which takes longer than all else that a dry run does for
it.  A result that is new, and no view of what a call reads, depends on the shapes of that and the default dtype alone.
What is no operator of torch's own may depend on more, such as a collective on the mesh that its group belongs to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from autoparallel import _torch

_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype})


class _Tensor(NamedTuple):
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def make(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


class _Plain(NamedTuple):
    kind: type  # 1, 1.0 and True are equal, and are no equal arguments
    value: Any


@dataclass(frozen=True, eq=False)
class CallKind:
    """Calls of one operator on alike arguments; there is one object for each kind.

    Attributes:
        result: the one new tensor that they make; None where they make anything else.
    """

    result: _Tensor | None


def kind_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallKind | None:
    """The kind of a call; None for an operator, or arguments, that cannot be looked up."""
    if func.namespace != "aten" or "out" in kwargs:
        return None
    try:
        return _kind(func, _describe(args), _describe(list(kwargs.items())), torch.get_default_dtype())
    except TypeError:
        return None


def call_on_meta(kind: CallKind | None, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an operator makes of its arguments, as ``func(*args, **kwargs)`` does; ``out`` must have its shape."""
    if "out" in kwargs:
        return kwargs["out"]
    return func(*args, **kwargs) if kind is None or kind.result is None else kind.result.make()


def _describe(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return _Plain(kind, value)
    if kind in _TENSORS and value.is_meta:
        return _Tensor(value.shape, value.stride(), value.dtype)
    if isinstance(value, list | tuple):
        return tuple([_describe(each) for each in value])
    if isinstance(value, torch.Tensor):
        raise TypeError("only plain meta tensors are looked up")
    return _Plain(kind, value)


def _made_of(described: Any) -> Any:
    if isinstance(described, _Tensor):
        return described.make()
    return described.value if isinstance(described, _Plain) else [_made_of(each) for each in described]


@lru_cache(maxsize=1 << 14)
def _kind(func: Any, args: Any, kwargs: Any, default_dtype: torch.dtype) -> CallKind:
    """The kind of a call under a default dtype."""
    if func._schema.is_mutable:
        return CallKind(None)
    positional, named = _made_of(args), dict(_made_of(kwargs))
    try:
        result = func(*positional, **named)
    except NotImplementedError:  # torch has no shapes of a few backwards, such as multi_margin_loss's
        if not func._schema.name.endswith("_backward"):
            raise
        result = torch.empty_like(positional[1])  # they are given the gradient, and then what theirs is for
    if type(result) is not torch.Tensor or not result.is_meta or result.storage_offset():
        return CallKind(None)
    arguments = _torch.tensors.tensors_in((positional, named))
    if _torch.tensors.storage_mark(result) in _torch.tensors.storage_marks(arguments):
        return CallKind(None)
    described = _Tensor(result.shape, result.stride(), result.dtype)
    alike = described.make().untyped_storage().nbytes() == result.untyped_storage().nbytes()
    return CallKind(described if alike else None)
