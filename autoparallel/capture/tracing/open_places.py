"""Parts of tensors at places that values tell: ``queue[:, at:at + n]`` where ``at`` is read of a tensor, or drawn.

A trace knows how large such a part is, and not where it begins, which ``torch.export`` takes for a size that values
decide.  So the part is looked up, or written, by its indices, ``at + arange(n)``.  Where a slice would be cut short at
the end of the tensor, such a look-up raises.  Where values tell how far it reaches, the indices are cut.

Eager's part is a view: what is written to the part is written to its tensor, too, and a part that is read after its
tensor has changed is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
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
from autoparallel.capture.tracing.overlaps import overlaps
from autoparallel.capture.tracing.trace import refuse
from autoparallel.graph.errors import refusal
from autoparallel.graph.lines import line_of_frame

_ALL = slice(None)


class _LookedUp(NamedTuple):
    """What was looked up in the place of a view, and of what by which key."""

    part: Tensor
    source: Tensor
    key: Any


_NUMBERS = int | torch.SymInt
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8)


def _is_open(number: Any) -> bool:
    """Whether a number, or a tensor of one, is one that values tell."""
    if isinstance(number, Tensor):
        return number.ndim == 0 and number.dtype in _WHOLE
    return isinstance(number, torch.SymInt) and _torch.export.is_read(number)


def _span_of(item: Any) -> int | torch.SymInt | None:
    """How far a slice reaches whose beginning is open; None for all else."""
    if not isinstance(item, slice) or item.stop is None or not _is_open(item.start):
        return None
    if isinstance(item.start, Tensor) or isinstance(item.stop, Tensor):
        (first, begin), (second, end) = _origin_of(item.start), _origin_of(item.stop)
        span = end - begin if first == second else None
    else:
        span = item.stop - item.start
    if span is None or _is_open(span):
        return None
    fixed = span.node.expr if isinstance(span, torch.SymInt) else span
    if isinstance(fixed, int | sympy.Integer):
        goes_on = item.step is None or isinstance(item.step, int) and item.step > 0
        return int(fixed) if goes_on and fixed >= 0 else None  # x[n:n - 2] may begin at 0 or 1
    return span if item.step in (None, 1) else None


_SHIFTED: Any = WeakTensorKeyDictionary()
"""Places that are tensors, by a number behind others: which, and its version, and by how much."""

_ELEMENTS: Any = WeakTensorKeyDictionary()
"""Places that are elements of tensors: of which, its version, and by which key."""


def _shift(sign: int) -> Callable[..., Any]:
    """A handler of a sum, or a difference, of a place and a number."""

    def call(func: Any, *args: Any, **kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        x, by, *others = (*args, None, None)
        if (
            isinstance(x, Tensor)
            and _is_open(x)
            and isinstance(by, _NUMBERS)
            and not (_is_open(by) or any(others) or kwargs)
        ):
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


def _reaches_open(item: Any) -> bool:
    """Whether values tell how far a slice reaches."""
    return isinstance(item, slice) and _span_of(item) is None and (_is_open(item.start) or _is_open(item.stop))


def _opens(item: Any) -> bool:
    return _is_open(item) or _span_of(item) is not None or _reaches_open(item)


def _indices_of(x: Tensor, item: Any, dim: int) -> Tensor:
    """What an open item of a key names, of one dim."""
    if _reaches_open(item):
        return torch.arange(x.shape[dim], device=x.device)[item]
    span = _span_of(item)
    if span is None:
        first = end = torch.zeros(1, dtype=torch.int64, device=x.device) + item
        indices = first
    else:
        step = item.step or 1
        length = span if step == 1 else -(-span // step)
        first = torch.zeros(1, dtype=torch.int64, device=x.device) + item.start
        indices, end = first + torch.arange(length, device=x.device) * step, first + span  # type: ignore[arg-type]
    return torch.where(end < 0, indices + x.shape[dim], indices)


def _items_of(x: Tensor, key: Any) -> list[Any]:
    """The items of a key; a list of open places among them as a tensor."""
    return [
        torch.cat([torch.zeros(1, dtype=torch.int64, device=x.device) + place for place in item])
        if isinstance(item, list) and any(map(_is_open, item))
        else item
        for item in (key if isinstance(key, tuple) else (key,))
    ]


def _width_of(item: Any) -> int:
    """How many dims of a tensor an item of a key names."""
    if item is None or isinstance(item, bool):
        return 0
    is_mask = getattr(item, "dtype", None) in (torch.bool, torch.uint8) or getattr(item, "dtype", None) == "bool"
    return item.ndim if is_mask else 1


def _open_items(x: Tensor, items: Sequence[Any]) -> list[tuple[int, int]]:
    """The open items of a key, by their places in it and the dim that each names."""
    opened: list[tuple[int, int]] = []
    dim = 0
    for place, item in enumerate(items):
        if _opens(item):
            opened.append((place, dim))
        if item is Ellipsis:
            dim += x.ndim - sum(_width_of(other) for other in items if other is not Ellipsis)
        else:
            dim += _width_of(item)
    return opened


def _look_up(x: Tensor, items: Sequence[Any], place: int, dim: int) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """What an open item of a key names of ``x``, its indices, and the key by which the others go on from there."""
    item = items[place]
    indices = _indices_of(x, item, dim)
    part = x.index_select(dim, indices)
    if isinstance(item, slice):
        return part, indices, (*items[:place], _ALL, *items[place + 1 :])
    return part.squeeze(dim), indices, (*items[:place], *items[place + 1 :])


def _is_plain(item: Any) -> bool:
    """Whether an item of a key gives a view."""
    return item is None or item is Ellipsis or isinstance(item, slice | _NUMBERS) or _is_open(item)


def _parts_of(items: Sequence[Any], opened: Sequence[tuple[int, int]]) -> tuple[tuple[Any, ...], dict[int, Any]]:
    """A key that gives a view, without its open items, and these by the dim that each is of in that view: a number in
    front of it takes a dim away, None adds one."""
    rest = list(items)
    parts: dict[int, Any] = {}
    for place, dim in opened:
        before = rest[:place]  # of which those that are open have become slices
        new, numbers = sum(x is None for x in before), sum(isinstance(x, _NUMBERS) for x in before)
        parts[dim + new - numbers] = items[place]
        rest[place] = _ALL
    return tuple(rest), parts


def _get(func: Any, x: Tensor, key: Any) -> Any:
    items = _items_of(x, key)
    opened = _open_items(x, items)
    if not opened:
        out = func(x, _as_key(items, key))
        if _is_open(out) and all(isinstance(item, int) for item in items):
            _ELEMENTS[out] = x, x._version, key
        return out
    if not all(map(_is_plain, items)):  # of which none gives a view
        part, rest = x, tuple(items)
        for place, dim in reversed(opened):
            part, _, rest = _look_up(part, rest, place, dim)
        return func(part, rest)
    rest, parts = _parts_of(items, opened)
    part = func(x, rest)
    for dim, item in reversed(parts.items()):
        part = part.index_select(dim, _indices_of(part, item, dim))
        if _is_open(item):
            part = part.squeeze(dim)
    return _LookedUp(part, x, key)


def _set(func: Any, x: Tensor, key: Any, value: Any) -> Any:
    items = _items_of(x, key)
    opened = _open_items(x, items)
    if not opened:
        in_one = isinstance(value, Tensor) and _torch.tensors.share_storage(x, value)
        if in_one and all(map(_is_plain, items)):
            _require_apart(x[_as_key(items, key)], value)
        return func(x, _as_key(items, key), value)
    if len(opened) > 1 or not all(map(_is_plain, items)):
        ((place, dim), *_) = opened
        part, indices, rest = _look_up(x, items, place, dim)
        _set(func, part, rest or (Ellipsis,), value)
        x.index_copy_(dim, indices, part if isinstance(items[place], slice) else part.unsqueeze(dim))
        return None
    rest, parts = _parts_of(items, opened)
    ((dim, item),) = parts.items()
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


def _require_apart(written: Tensor, read: Tensor) -> None:
    if overlaps(written, read):
        raise refuse(
            "a part of a tensor is written to a part that it overlaps, where what eager reads depends on the order of "
            "its memory,",
            "clone() what is read",
        )


def _write_over(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    for other in args:
        if isinstance(x, Tensor) and isinstance(other, Tensor):
            _require_apart(x, other)
    return func(x, *args, **kwargs)


def _as_key(items: Sequence[Any], key: Any) -> Any:
    return tuple(items) if isinstance(key, tuple) else items[0]


def _key_of(x: Tensor, dim: int, item: Any) -> tuple[Any, ...]:
    return (*[_ALL] * (dim % x.ndim), item)


def _narrow(func: Any, *args: Any, **kwargs: Any) -> Any:
    x, dim, start, length = _bound(("input", "dim", "start", "length"), args, kwargs)
    if not _is_open(start) and not _is_open(length):
        return func(*args, **kwargs)
    end = _shift(1)(torch.add, start, length) if isinstance(start, Tensor) else start + length
    return _get(Tensor.__getitem__, x, _key_of(x, dim, slice(start, end)))


def _select(func: Any, *args: Any, **kwargs: Any) -> Any:
    x, dim, index = _bound(("input", "dim", "index"), args, kwargs)
    if not _is_open(index):
        return func(*args, **kwargs)
    return _get(Tensor.__getitem__, x, _key_of(x, dim, index))


def _roll(func: Any, *args: Any, **kwargs: Any) -> Tensor:
    x, shifts, dims = _bound(("input", "shifts", "dims"), args, kwargs)
    shifts, dims = (v if isinstance(v, tuple | list) else (v,) for v in (shifts, dims))
    if dims in ((), [], (None,)) and len(shifts) == 1 and _is_open(shifts[0]):
        return _roll(func, x.flatten(), shifts, 0).view(x.shape)
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
    **dict.fromkeys(
        (Tensor.copy_, Tensor.add_, Tensor.__iadd__, Tensor.mul_, Tensor.__imul__, Tensor.sub_, Tensor.__isub__),
        _write_over,
    ),
    **dict.fromkeys((Tensor.sub, Tensor.__sub__, torch.sub), _shift(-1)),
}


@dataclass
class _Part:
    """What was looked up, in the place of a view.

    Args:
        part: it, or a view of it, held so that no other tensor gets its id.
        source, key: of what it is a part; no key for a view of a part.
        version: of the source, when both held the same.
        line: where it was looked up.
    """

    part: Tensor
    source: Tensor
    key: Any
    version: int
    line: str


class OpenPlaces(TorchFunctionMode):
    """Inside, parts of tensors are looked up, and written, at places that values tell.

    It stands before what ``torch.export`` makes of slices.

    Raises:
        CaptureError: where such a part is read, or written through a view of it, after its tensor has changed: eager's
            part lies in the tensor's memory.

    Args:
        tensors: those of the model.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._parts: dict[int, _Part] = {}
        self._versions = {_torch.tensors.storage_mark(x): x._version for x in tensors}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if self._parts:
            self._require_current(func, args, kwargs)
        out = func(*args, **kwargs) if handler is None else handler(func, *args, **kwargs)
        name = getattr(func, "__name__", "")
        if isinstance(out, _LookedUp):
            self._parts[id(out.part)] = _Part(
                out.part, out.source, out.key, out.source._version, line_of_frame(sys._getframe(1))
            )
            return out.part
        part = self._parts.get(id(args[0])) if args and self._parts else None
        if part is not None and is_write(name):
            _set(Tensor.__setitem__, part.source, part.key, part.part)
            part.version = part.source._version
        elif part is not None and is_view(name):
            for x in out if isinstance(out, tuple | list) else (out,):
                if isinstance(x, Tensor) and id(x) not in self._parts:
                    self._parts[id(x)] = _Part(x, part.source, None, part.version, part.line)
        return out

    def require_current(self, results: Sequence[Any]) -> None:
        """Refuses results that are parts of tensors which have changed since, or of the model's own that the call
        changes: the next one will, too."""
        for x in results:
            part = self._parts.get(id(x))
            if part is not None and part.source._version != self._versions.get(
                _torch.tensors.storage_mark(part.source), part.version
            ):
                raise refusal(
                    "the model returns or keeps a part of a tensor, at a place that values tell, and changes the "
                    "tensor,",
                    part.line,
                    "clone() it",
                )

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
