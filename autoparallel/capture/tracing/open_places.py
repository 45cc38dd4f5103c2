"""Parts of tensors at places that values tell: ``queue[:, at:at + n]`` where ``at`` is read of a tensor, or drawn.

A trace knows how large such a part is, and not where it begins, which ``torch.export`` takes for a size that values
decide.  So the part is looked up, or written, by its indices, ``at + arange(n)``.  Where a slice would be cut short at
the end of the tensor, or counts from there, such a look-up raises.

Eager's part is a view: what is written to the part is written to its tensor, too, and a part that is read after its
tensor has changed is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import sympy
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from autoparallel import _torch
from autoparallel.capture.refusals.data_access import is_view, is_write
from autoparallel.graph.errors import refusal
from autoparallel.graph.lines import line_of_frame

_ALL = slice(None)


class _LookedUp(NamedTuple):
    """What was looked up in the place of a view, and of what by which key."""

    part: Tensor
    source: Tensor
    key: Any


_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8)


def _is_open(number: Any) -> bool:
    """Whether a number, or a tensor of one, is one that values tell."""
    if isinstance(number, Tensor):
        return number.ndim == 0 and number.dtype in _WHOLE
    return isinstance(number, torch.SymInt) and _torch.export.is_read(number)


def _length_of(item: Any) -> int | torch.SymInt | None:
    """How many elements a slice has whose beginning is open; None for all else."""
    if not isinstance(item, slice) or item.step not in (None, 1) or item.stop is None:
        return None
    if not _is_open(item.start):
        return None
    if isinstance(item.start, Tensor) or isinstance(item.stop, Tensor):
        (first, begin), (second, end) = _origin_of(item.start), _origin_of(item.stop)
        return end - begin if first == second else None
    length = item.stop - item.start
    if _is_open(length):
        return None
    fixed = length.node.expr if isinstance(length, torch.SymInt) else length
    return int(fixed) if isinstance(fixed, int | sympy.Integer) else length


_SHIFTED: Any = WeakTensorKeyDictionary()
"""Places that are tensors, by a number behind others: which, and its version, and by how much."""

_ELEMENTS: Any = WeakTensorKeyDictionary()
"""Places that are elements of tensors: of which, its version, and by which key."""


def _shift(sign: int) -> Callable[..., Any]:
    """A handler of a sum, or a difference, of a place and a number."""

    def call(func: Any, *args: Any, **kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        x, by, *others = (*args, None, None)
        if isinstance(x, Tensor) and _is_open(x) and isinstance(by, int) and not (any(others) or kwargs):
            _SHIFTED[out] = x, x._version, sign * by
        return out

    return call


def _origin_of(place: Any) -> tuple[tuple[Any, ...], int]:
    """What a place is counted from, the same for the same place, and how far it is from there."""
    distance = 0
    while isinstance(place, Tensor) and place in _SHIFTED:
        before, version, by = _SHIFTED[place]
        if before._version != version:
            break
        place, distance = before, distance + by
    if isinstance(place, Tensor) and place in _ELEMENTS:
        source, version, key = _ELEMENTS[place]
        if source._version == version:
            return (id(source), version, key), distance
    return (id(place),), distance


def _indices_of(x: Tensor, item: Any, dim: int) -> Tensor:
    """What an open item of a key names, of one dim."""
    length = _length_of(item)
    if length is not None:
        return torch.arange(length, device=x.device) + item.start  # type: ignore[arg-type]
    index = torch.zeros(1, dtype=torch.int64, device=x.device) + item
    return torch.where(index < 0, index + x.shape[dim], index)


def _parts_of(x: Tensor, key: Any) -> tuple[tuple[Any, ...], dict[int, Any]]:
    """A key without its open items, and these by the dim that each is of, in what the key without them names."""
    items = key if isinstance(key, tuple) else (key,)
    if not any(_is_open(item) or _length_of(item) is not None for item in items):
        return (), {}
    if not all(x is None or x is Ellipsis or isinstance(x, slice | int | torch.SymInt) or _is_open(x) for x in items):
        return (), {}
    opened: dict[int, Any] = {}
    rest: list[Any] = []
    dim = 0
    for item in items:
        is_open = _is_open(item) or _length_of(item) is not None
        if is_open:
            opened[dim] = item
        rest.append(_ALL if is_open else item)
        if item is Ellipsis:
            dim += x.ndim - sum(other is not None and other is not Ellipsis for other in items)
        elif is_open or item is None or isinstance(item, slice):
            dim += 1
    return tuple(rest), opened


def _get(func: Any, x: Tensor, key: Any) -> Any:
    rest, opened = _parts_of(x, key)
    if not opened:
        out = func(x, key)
        if _is_open(out) and all(isinstance(item, int) for item in (key if isinstance(key, tuple) else (key,))):
            _ELEMENTS[out] = x, x._version, key
        return out
    part = func(x, rest)
    for dim, item in reversed(opened.items()):
        part = part.index_select(dim, _indices_of(part, item, dim))
        if _is_open(item):
            part = part.squeeze(dim)
    return _LookedUp(part, x, key)


def _set(func: Any, x: Tensor, key: Any, value: Any) -> Any:
    rest, opened = _parts_of(x, key)
    if len(opened) != 1:
        return func(x, key, value)
    ((dim, item),) = opened.items()
    whole = x[rest]
    indices = _indices_of(whole, item, dim)
    shape = [*whole.shape[:dim], indices.shape[0], *whole.shape[dim + 1 :]]
    source = value if isinstance(value, Tensor) else torch.full((), value, dtype=x.dtype, device=x.device)
    source = source.to(x.device, x.dtype)
    behind = whole.ndim - 1 - dim
    if _is_open(item) and source.ndim > behind:  # which lacks the dim
        source = source.unsqueeze(source.ndim - behind)
    whole.index_copy_(dim, indices, source.expand(shape))
    return None


def _key_of(x: Tensor, dim: int, item: Any) -> tuple[Any, ...]:
    return (*[_ALL] * (dim % x.ndim), item)


def _narrow(func: Any, *args: Any, **kwargs: Any) -> Any:
    x, dim, start, length = _bound(("input", "dim", "start", "length"), args, kwargs)
    if not _is_open(start):
        return func(*args, **kwargs)
    return _get(Tensor.__getitem__, x, _key_of(x, dim, slice(start, start + length)))


def _select(func: Any, *args: Any, **kwargs: Any) -> Any:
    x, dim, index = _bound(("input", "dim", "index"), args, kwargs)
    if not _is_open(index):
        return func(*args, **kwargs)
    return _get(Tensor.__getitem__, x, _key_of(x, dim, index))


def _roll(func: Any, *args: Any, **kwargs: Any) -> Tensor:
    x, shifts, dims = _bound(("input", "shifts", "dims"), args, kwargs)
    shifts, dims = (v if isinstance(v, tuple | list) else (v,) for v in (shifts, dims))
    if not any(map(_is_open, shifts)) or len(shifts) != len(dims) or not all(isinstance(d, int) for d in dims):
        return func(*args, **kwargs)
    for shift, dim in zip(shifts, dims, strict=True):
        size = x.shape[dim]
        x = x.index_select(dim, (torch.arange(size, device=x.device) - shift) % size)
    return x


def _bound(names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments of a function of torch in their order; None for one that is not given."""
    named = {"input": kwargs.get("self"), **kwargs}
    return [args[i] if i < len(args) else named.get(name) for i, name in enumerate(names)]


_HANDLERS: dict[Any, Callable[..., Any]] = {
    Tensor.__getitem__: _get,
    Tensor.__setitem__: _set,
    Tensor.narrow: _narrow,
    torch.narrow: _narrow,
    Tensor.select: _select,
    torch.select: _select,
    Tensor.roll: _roll,
    torch.roll: _roll,
    **dict.fromkeys((Tensor.add, Tensor.__add__, Tensor.__radd__, torch.add), _shift(1)),
    **dict.fromkeys((Tensor.sub, Tensor.__sub__, torch.sub), _shift(-1)),
}


@dataclass
class _Part:
    """What was looked up, in the place of a view.

    Args:
        part: it, or a view of it, held so that no other tensor gets its id.
        source, key: of what it is a part; no key for a view of a part.
        version: of the source, when both held the same.
    """

    part: Tensor
    source: Tensor
    key: Any
    version: int


class OpenPlaces(TorchFunctionMode):
    """Inside, parts of tensors are looked up, and written, at places that values tell.

    It stands before what ``torch.export`` makes of slices.

    Raises:
        CaptureError: where such a part is read, or written through a view of it, after its tensor has changed: eager's
            part lies in the tensor's memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self._parts: dict[int, _Part] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if self._parts:
            self._require_current(func, args, kwargs)
        out = func(*args, **kwargs) if handler is None else handler(func, *args, **kwargs)
        name = getattr(func, "__name__", "")
        if isinstance(out, _LookedUp):
            self._parts[id(out.part)] = _Part(out.part, out.source, out.key, out.source._version)
            return out.part
        part = self._parts.get(id(args[0])) if args and self._parts else None
        if part is not None and is_write(name):
            _set(Tensor.__setitem__, part.source, part.key, part.part)
            part.version = part.source._version
        elif part is not None and is_view(name):
            for x in out if isinstance(out, tuple | list) else (out,):
                if isinstance(x, Tensor) and id(x) not in self._parts:
                    self._parts[id(x)] = _Part(x, part.source, None, part.version)
        return out

    def _require_current(self, func: Any, args: Any, kwargs: Any) -> None:
        name = getattr(func, "__name__", "")
        for i, x in enumerate(pytree.arg_tree_leaves(*args, **kwargs)):
            part = self._parts.get(id(x))
            if part is None:
                continue
            if part.source._version != part.version:
                raise refusal(
                    "the model reads a part of a tensor, at a place that values tell, after the tensor has changed,",
                    line_of_frame(sys._getframe(2)),
                    "read it again, or clone() it before",
                )
            if i == 0 and part.key is None and is_write(name):
                raise refusal(
                    "the model writes through a view of a part of a tensor, at a place that values tell,",
                    line_of_frame(sys._getframe(2)),
                    "write to the tensor itself (x[:, i:i + n] = value)",
                )
