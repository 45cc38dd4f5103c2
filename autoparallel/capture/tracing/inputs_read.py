"""Python that reads values of the inputs: ``grid.tolist()``, ``range(int(lengths.max()))``.

A trace runs on tensors without values.  Where a tensor of whole numbers follows from the inputs of the call alone, its
values are computed of these, Python is told them, and they belong to the kind of call (see ``graph.input_values``).
A single number (``int(batch.max())``) may be read where sizes are open.  More of them are the last resort, which fixes
the batch and all lengths; each other value is another trace.  So are the values of buffers, and of attributes that are
tensors, unless each call changes them.

[Note: flags] A buffer of one element that is 0 or 1 tells many models whether their first call has set them up
(``if self.initialized: ...``).  Python's question goes both ways, as others do; where the two cannot be one program, as
the one draws numbers or sets parameters, Python is told what these buffers hold before it is told of others.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autoparallel import _torch
from autoparallel.capture.tracing.unique_values import UNIQUE, count_of, unique_values
from autoparallel.graph.errors import CaptureError
from autoparallel.graph.input_values import (
    Held,
    Input,
    Result,
    Source,
    Step,
    ValueRead,
    Values,
    ValuesRead,
    buffers_of,
    is_constant,
    is_flag,
    mapped,
    places_of,
    shapes_of,
    sources_in,
    written_over,
)
from autoparallel.graph.lines import line_of_frame
from autoparallel.graph.python_state import freeze

_MADE_OF_NOTHING = frozenset((
    torch.arange, torch.tensor, torch.as_tensor, torch.empty, torch.zeros, torch.ones, torch.full, torch.eye,
    torch.linspace, torch.scalar_tensor, torch.div,
))  # fmt: skip
"""The functions whose results follow from numbers."""

MADE_LIKE = frozenset((
    torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, Tensor.new_empty, Tensor.new_zeros,
    Tensor.new_ones, Tensor.new_full,
))  # fmt: skip
"""The functions whose results follow from the sizes and the dtype of a tensor, and from numbers."""

_CASTS = frozenset((Tensor.to, Tensor.type_as))
"""The functions whose results follow from a tensor and from the dtype of another one."""

_OF_MEMORY = frozenset((
    torch.as_strided, torch.as_strided_, Tensor.as_strided, Tensor.as_strided_, Tensor.set_, Tensor.resize_,
    Tensor.resize_as_,
))  # fmt: skip
"""The functions whose results are what lies in a memory beside a tensor's values."""

_PLAIN = (
    bool, int, float, complex, str, type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout,
    torch.memory_format,
)  # fmt: skip


_AROUND = "a tensor around the model"

_MOST_NUMBERS, _MOST_ANSWERS = 16, 256
"""That are read one by one, in calls of any sizes: of more, as of all tokens, each call would have others. Answers are
what a loop over classes asks, such as whether one is among the labels."""


class _NotOfInputsError(Exception):
    """A value does not follow from the inputs alone."""


class CounterReadError(CaptureError):
    """Python has read numbers of buffers that each call changes, so that each would have a trace of its own.

    Attributes:
        labels: of the buffers.
    """

    def __init__(self, labels: Set[str]) -> None:
        super().__init__(f"Python reads {', '.join(sorted(labels))}, which each call changes")
        self.labels = labels


class InputsRead:
    """The tensors of one run of the model that follow from inputs alone, and what Python has read of them.

    Args:
        leaves: the inputs, with their values; None for one whose values this rank does not have.
        only_numbers: whether Python may read inputs of one element alone, in calls of any sizes.
        only_flags: whether it may read those buffers alone that are flags.
        counters: the labels of buffers whose values Python is not told.
        ahead: what buffers hold in this run instead of what those of the model do, by label.

    Attributes:
        changed: what the run has left in buffers of which Python has read numbers, by label, where they held something
            else; None for what nobody knows.
    """

    def __init__(
        self,
        leaves: Sequence[Any],
        *,
        only_numbers: bool = False,
        only_flags: bool = False,
        counters: Collection[str] = (),
        ahead: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._leaves, self._values, self._only_numbers = leaves, Values(leaves), only_numbers
        self._only_flags, self._counters, self._ahead = only_flags, counters, ahead or {}
        self.changed: dict[str, Tensor | None] = {}
        self._buffers: list[tuple[Tensor, int, Held]] = []  # with the versions that they have at first
        self._sources: dict[int, tuple[Tensor, int, Source]] = {}  # by id: with the version of which it is true
        self._memories: dict[int, dict[int, Tensor]] = defaultdict(dict)  # by a storage: what lies in it, by id
        self._steps = 0
        self._draws = False
        self._reads: list[ValueRead] = []

    def note_inputs(self, tensors: Sequence[Any]) -> None:
        """Notes what stands for the inputs in this run."""
        for place, (tensor, leaf) in enumerate(zip(tensors, self._leaves, strict=True)):
            if isinstance(tensor, Tensor) and isinstance(leaf, Tensor) and not self._only_flags:
                self._note(tensor, Input(place))

    def note_held(self, tensors: Sequence[tuple[Tensor, Held]]) -> None:
        """Notes what stands for buffers in this run."""
        for tensor, held in tensors:
            if held.label in self._ahead:
                held = Held.by_reference(held.label, self._ahead[held.label])
            elif self._only_flags and not is_flag(held.find()):
                continue
            if held.label not in self._counters:
                self._note(tensor, held)
                self._buffers.append((tensor, _torch.tensors.version_of(tensor), held))

    def note_changes(self, bound: Mapping[str, Any]) -> None:
        """Notes what the run has changed of the buffers that Python has read numbers of.

        Args:
            bound: what the run has bound to buffers in the place of these, by label.
        """
        of_numbers = [read.source for read in self._reads if not isinstance(read.value, bool)]
        labels = {label for source in of_numbers for label in buffers_of(source)}
        for tensor, version, held in self._buffers:
            now = bound.get(held.label, tensor)
            if held.label in labels and not (now is tensor and _torch.tensors.version_of(tensor) == version):
                with _torch.export.unwatched():
                    value = self._values.of(self._sources[id(now)][2]) if self._is_of_inputs(now) else None
                    if value is None or not torch.equal(value, self._values.of(held)):
                        self.changed[held.label] = value

    def _note(self, tensor: Tensor, source: Source) -> None:
        self._sources[id(tensor)] = tensor, _torch.tensors.version_of(tensor), source
        self._memories[_torch.tensors.memory_mark(tensor)][id(tensor)] = tensor

    def _find_views(self, tensor: Any) -> list[Tensor]:
        """What lies in the memory of a tensor, itself among it, and follows from inputs."""
        mark = _torch.tensors.memory_mark(tensor) if isinstance(tensor, Tensor) else 0
        memory = self._memories.get(mark, {}) if mark else {}
        return [x for x in memory.values() if self._is_of_inputs(x)]

    def _source(self, value: Any) -> Any:
        """What stands for one argument of a call in a step."""
        if isinstance(value, _PLAIN) or isinstance(value, torch.Size) and all(type(size) is int for size in value):
            return value
        is_new = not self._only_flags and id(value) not in self._sources
        if is_new and _torch.export.is_real(value) and not value.requires_grad:
            self._note(value, Held.by_reference(_AROUND, value))
        if not self._is_of_inputs(value):
            raise _NotOfInputsError
        return self._sources[id(value)][2]

    def _is_of_inputs(self, value: Any) -> bool:
        entry = self._sources.get(id(value))
        return entry is not None and entry[1] == _torch.tensors.version_of(value)

    def follow(self, func: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call of torch; what it follows from is noted.

        Args:
            func: what the model calls.
            call: what is called instead.
        """
        as_tuple = kwargs.get("as_tuple", func is torch.where)
        if func in _NONZERO and len(args) == 1 and not {*kwargs} - {"as_tuple"}:
            positions = self._positions(args[0])
            if positions is not None:
                return positions if as_tuple else self.follow(torch.stack, torch.stack, (positions, 1), {})
        if func in UNIQUE:
            result = self._unique(func, *UNIQUE[func](*args, **kwargs))
            if result is not None:
                return result
        args, kwargs = self._with_numbers(func, args, kwargs)
        first = args[0] if args and isinstance(args[0], Tensor) else None
        tensors = [x for x in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(x, Tensor)]
        versions, views = [_torch.tensors.version_of(x) for x in tensors], self._find_views(first)
        sources = self._sources_of(func, args, kwargs)
        result = call(*args, **kwargs)
        written = [x for x, version in zip(tensors, versions, strict=True) if _torch.tensors.version_of(x) != version]
        writes = any(x is first for x in written)
        in_one = first is not None and all(_torch.tensors.share_storage(first, x) for x in written)
        if sources is None or written and not (writes and in_one):
            for x in written:  # nobody follows it, or it writes to others than its first operand
                self._forget(x)
            return result
        step = self._step(func, *sources, writes=writes)
        for place, tensor in enumerate([first] if writes else pytree.tree_leaves(result)):
            # What a cast of autocast makes of it is not followed.
            cast = isinstance(tensor, Tensor) and tensor.is_floating_point() and _torch.export.autocasts()
            if isinstance(tensor, Tensor) and (writes or tensor is not first) and not cast:
                self._note(tensor, Result(step, place))
        if writes:
            self._write(first, [x for x in views if x is not first])
        return result

    def _sources_of(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """What the arguments of a call follow from, where that is inputs alone."""
        try:
            if func in MADE_LIKE and args and not self._is_of_inputs(args[0]):
                like = self._step(torch.empty, (self._source(args[0].shape),), {"dtype": args[0].dtype})
                first, sources = [Result(like, 0)], mapped((args[1:], kwargs), self._source)
                return (*first, *sources[0]), sources[1]
            if func in _CASTS and len(args) > 1 and isinstance(args[1], Tensor):
                args = args[0], args[1].dtype, *args[2:]
            sources = mapped((args, kwargs), self._source)
        except _NotOfInputsError:
            return None
        follows = sources_in(sources) or func in _MADE_OF_NOTHING
        return sources if follows and func not in _OF_MEMORY and "out" not in kwargs else None

    def _step(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], writes: bool = False) -> Step:
        self._steps += 1
        return Step(self._steps, func, args, dict(kwargs), writes)

    def _write(self, written: Any, views: list[Tensor]) -> None:
        """Notes what a write to a tensor makes of those that lie in its memory."""
        source, part = self._sources.get(id(written), (None, 0, None))[2], _layout(written)
        for tensor in views:
            before, layout = self._sources[id(tensor)][2], _layout(tensor)
            if source is None or part is None or layout is None or tensor.dtype != written.dtype:
                del self._sources[id(tensor)]
            else:
                arguments = before, layout, source, part
                self._note(tensor, Result(self._step(written_over, arguments, {}), 0))

    def _forget(self, written: Tensor) -> None:
        """Notes that nobody knows what lies in the memory of a tensor."""
        for number in self._memories.pop(_torch.tensors.memory_mark(written), ()):
            self._sources.pop(number, None)

    def _positions(self, mask: Tensor) -> tuple[Tensor, ...] | None:
        """Where a mask selects, by as many positions as it selects in this call."""
        count = self.read(_count, mask)
        if count is None:
            return None
        positions = self.follow(torch.nonzero_static, torch.nonzero_static, (mask,), {"size": count})
        return tuple(self.follow(Tensor.unbind, Tensor.unbind, (positions, 1), {}))

    def _unique(self, func: Any, tensor: Tensor, dim: Any, *beside: bool) -> Any:
        """As many values as a tensor holds in this call, and which of the results ``beside`` them are wanted."""
        count = self.read(partial(count_of, func), tensor) if dim is None else None
        if not count:
            return None
        arguments = tensor, UNIQUE[func] is UNIQUE[torch.unique], count
        values, *others = self.follow(unique_values, unique_values, arguments, {})
        wanted = [x for x, is_wanted in zip(others, beside, strict=True) if is_wanted]
        return (values, *wanted) if wanted else values

    def _with_numbers(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call with numbers where torch itself would read sizes from tensors."""
        if func in _SIZED_BY_REPEATS and "output_size" not in kwargs:
            repeats = kwargs.get("repeats", args[min(1, len(args) - 1)] if args else None)
            if isinstance(repeats, Tensor) and (total := self.read(_sum, repeats)) is not None:
                if repeats.numel() == 1 and len(args) + ("repeats" in kwargs) > 1:  # one for all
                    return mapped((args, kwargs), lambda value: total if value is repeats else value)
                return args, {**kwargs, "output_size": total}
        if func in _SIZED_BY_LARGEST and args:
            count, name = _SIZED_BY_LARGEST[func]
            largest = self.read(_largest, args[0]) if len(args) <= count and name not in kwargs else None
            return args, kwargs if largest is None else {**kwargs, name: largest + 1}
        if func in _MADE_OF_SIZES:
            return mapped((args, kwargs), self._number)
        if func in _SIZED:
            return (args[0], *mapped(args[1:], self._number)), mapped(kwargs, self._number)
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            keys = args[1] if isinstance(args[1], tuple) else (args[1],)
            return (args[0], tuple(self._keys(keys)), *args[2:]), kwargs
        return args, kwargs

    def _keys(self, keys: tuple[Any, ...]) -> Iterator[Any]:
        """The keys of an index, of which masks that follow from inputs select as many rows as in this call."""
        for key in keys:
            is_mask = isinstance(key, Tensor) and key.dtype == torch.bool and key.ndim > 0
            positions = self._positions(key) if is_mask else None
            if positions is not None:
                yield from positions
            else:
                yield mapped(key, self._number) if isinstance(key, slice) else key

    def _number(self, value: Any) -> Any:
        number = self.read(Tensor.item, value) if isinstance(value, Tensor) and value.ndim == 0 else None
        return value if number is None else number

    def read(self, function: Callable[..., Any], tensor: Any) -> Any:
        """What a function reads of a tensor's values; None where they do not follow from inputs alone, or follow from
        some and are no whole numbers, of which there is another one in each batch."""
        try:
            source = self._source(tensor)
        except _NotOfInputsError:
            return None
        of_inputs = bool(places_of(source))
        in_any_size = self._only_numbers and of_inputs
        if in_any_size and (any(size != 1 for size in tensor.shape) or len(self._reads) >= _MOST_ANSWERS):
            return None
        with _torch.export.unwatched():
            state = torch.default_generator.get_state()
            try:
                value = self._values.of(source)
            except Exception:  # noqa: BLE001 - then nobody knows it
                return None
            if not torch.equal(state, torch.default_generator.get_state()):
                torch.default_generator.set_state(state)
                self._draws = True  # what was drawn is another number at the next call
            if self._draws:
                return None
            answer = function(value.clone())
        if of_inputs and not _is_whole(answer):
            return None
        if in_any_size and len(self._reads) >= _MOST_NUMBERS and not isinstance(answer, bool):
            return None
        if isinstance(answer, np.ndarray):
            answer.flags.writeable = False  # what is written to it would not reach the tensor

        def read(values: Tensor) -> Hashable:
            return freeze(function(values))

        if not is_constant(source):
            self._reads.append(ValueRead(source, read, freeze(answer), line_of_frame(sys._getframe(1))))
        return answer

    def taken(self) -> ValuesRead:
        """All that was read."""
        return ValuesRead(self._reads, None if self._only_numbers else shapes_of(self._leaves))


def _layout(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int] | None:
    """How a tensor lies in its memory; None where its numbers are not what lies there, or nobody knows its size."""
    size, stride, offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
    if tensor.is_complex() or tensor.is_neg() or not all(type(number) is int for number in (*size, *stride, offset)):
        return None
    return size, stride, int(offset)


def _is_whole(answer: Any) -> bool:
    if isinstance(answer, list | tuple):
        return all(map(_is_whole, answer))
    if isinstance(answer, np.ndarray | np.generic):
        return answer.dtype.kind in "iub"
    return isinstance(answer, int | str)


def _count(mask: Tensor) -> int:
    return int(mask.count_nonzero())


def _sum(repeats: Tensor) -> int:
    return int(repeats.sum())


def _largest(classes: Tensor) -> int:
    return int(classes.max()) if classes.numel() else -1


_MADE_OF_SIZES = frozenset((torch.arange, torch.empty, torch.zeros, torch.ones, torch.full))
_SIZED = frozenset((
    Tensor.view, Tensor.reshape, torch.reshape, Tensor.expand, Tensor.repeat, Tensor.split, torch.split,
    Tensor.unflatten, torch.unflatten, Tensor.narrow, torch.narrow, Tensor.new_empty, Tensor.new_zeros,
    Tensor.new_ones, Tensor.new_full, torch.nn.functional.interpolate,
))  # fmt: skip
"""Functions behind whose first argument sizes stand, which may be tensors."""
_NONZERO = frozenset((torch.where, torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere))
_SIZED_BY_LARGEST = {
    torch.bincount: (2, "minlength"), Tensor.bincount: (2, "minlength"), torch.nn.functional.one_hot: (1, "num_classes")
}  # fmt: skip
"""What has as many entries as the largest number says, by the arguments that stand before the one that says so, too."""
_SIZED_BY_REPEATS = frozenset((torch.repeat_interleave, Tensor.repeat_interleave))
