"""Values of a call's inputs that Python has read while a trace was made: ``grid.tolist()``, ``lengths.max().item()``.

Each is noted with the calls of torch that it follows from, so that it can be computed of the inputs of any call: a
trace serves those in which Python would read the same.  Values are computed on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autoparallel import _torch

OF_VALUES = "what Python reads of"
"""How the label of such a value begins."""


@dataclass(frozen=True)
class Input:
    """An input of the call, by its place among the leaves."""

    place: int


@dataclass(frozen=True, eq=False)
class Held:
    """A buffer of the model, an attribute that is a tensor, or a tensor that it finds elsewhere.

    Attributes:
        label: its name in the model.
        find: gives the one that the model has.
    """

    label: str
    find: Callable[[], Tensor]

    @classmethod
    def by_reference(cls, label: str, tensor: Tensor) -> Held:
        """One that the model has as long as the trace serves its calls."""
        return cls(label, lambda: tensor)


def is_flag(buffer: Tensor) -> bool:
    """Whether a tensor is one number, 0 or 1."""
    with _torch.export.unwatched():
        return buffer.numel() == 1 and not buffer.is_meta and buffer.detach().cpu().view(-1)[0].item() in (0, 1)


@dataclass(frozen=True, eq=False)
class Step:
    """A call of torch, of which all tensors follow from inputs.

    Attributes:
        number: after those of the calls that it depends on.
        function: that is called.
        args, kwargs: of the call, with what they follow from in the place of tensors.
        writes: whether it writes to its first argument, which is then its result.
    """

    number: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    writes: bool

    def run(self, value_of: Callable[[Source], Tensor]) -> list[Any]:
        """The leaves of what the call gives."""
        args, kwargs = mapped((self.args, self.kwargs), lambda x: value_of(x) if isinstance(x, Source) else x)
        if self.writes:
            args = (args[0].clone(), *args[1:])
        result = self.function(*args, **kwargs)
        leaves = [args[0]] if self.writes else pytree.tree_leaves(result)
        return [leaf.cpu() if isinstance(leaf, Tensor) else leaf for leaf in leaves]


@dataclass(frozen=True)
class Result:
    """A tensor that a step makes, by its place among the leaves of what it gives."""

    step: Step
    place: int


Source = Input | Held | Result
"""What a tensor is that follows from inputs alone, and from what the model holds."""


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Nested arguments with their leaves changed; the bounds of slices are leaves, too."""
    if isinstance(value, slice):
        return slice(*[mapped(x, change) for x in (value.start, value.stop, value.step)])
    if type(value) in (tuple, list):
        return type(value)([mapped(x, change) for x in value])
    if type(value) is dict:
        return {key: mapped(x, change) for key, x in value.items()}
    return change(value)


def sources_in(value: Any) -> list[Source]:
    """What some arguments follow from."""
    sources: list[Source] = []
    mapped(value, lambda x: sources.append(x) if isinstance(x, Source) else None)
    return sources


def written_over(
    values: Tensor,
    layout: tuple[tuple[int, ...], tuple[int, ...], int],
    part: Tensor,
    part_layout: tuple[tuple[int, ...], tuple[int, ...], int],
) -> Tensor:
    """The values of a tensor after a write to another one that lies in the same memory.

    Args:
        values: before the write.
        part: the values of what is written to, after it.
        layout, part_layout: sizes, strides and offset of both.
    """
    ends = [
        offset + sum((n - 1) * stride for n, stride in zip(*lay, strict=True)) for *lay, offset in (layout, part_layout)
    ]
    numbers = torch.arange(max(*ends, 0) + 1)
    places, memory = numbers.as_strided(*layout), values.new_empty(len(numbers))
    memory[places] = values
    memory[numbers.as_strided(*part_layout)] = part
    return memory[places]


class Values:
    """Tensors that follow from the inputs of one call, each computed once.

    Args:
        leaves: the inputs.
    """

    def __init__(self, leaves: Sequence[Any]) -> None:
        self._leaves = leaves
        self._inputs: dict[int, Tensor] = {}
        self._results: dict[Step, list[Any]] = {}

    def of(self, source: Source) -> Tensor:
        """The values of a tensor, which nobody may change."""
        with _torch.export.unwatched(), torch.no_grad(), torch.autocast("cpu", enabled=False):
            for step in sorted(_steps_before(source, self._results), key=lambda step: step.number):
                self._results[step] = step.run(self._value)
            return self._value(source)

    def _value(self, source: Source) -> Tensor:
        if isinstance(source, Result):
            return self._results[source.step][source.place]
        if isinstance(source, Held):
            return source.find().detach().cpu()
        if source.place not in self._inputs:
            self._inputs[source.place] = self._leaves[source.place].detach().cpu()
        return self._inputs[source.place]


def _steps_before(source: Source, left_out: Collection[Step] = ()) -> Iterator[Step]:
    """The steps that a tensor follows from."""
    sources, visited = [source], set(left_out)
    while sources:
        last = sources.pop()
        if isinstance(last, Result) and last.step not in visited:
            visited.add(last.step)
            yield last.step
            sources += sources_in((last.step.args, last.step.kwargs))


def places_of(source: Source) -> set[int]:
    """The inputs that a tensor follows from."""
    return {first.place for first in _beginnings_of(source) if isinstance(first, Input)}


def buffers_of(source: Source) -> set[str]:
    """The buffers, and attributes that are tensors, that a tensor follows from."""
    return {first.label for first in _beginnings_of(source) if isinstance(first, Held)}


def is_constant(source: Source) -> bool:
    """Whether a tensor follows from numbers alone, which a trace has."""
    return all(isinstance(first, Result) for first in _beginnings_of(source))


def _beginnings_of(source: Source) -> list[Source]:
    sources = [source]
    for step in _steps_before(source):
        sources += sources_in((step.args, step.kwargs))
    return sources


@dataclass(frozen=True)
class ValueRead:
    """One value that Python has read.

    Attributes:
        source: the tensor.
        read: gives Python the value of a tensor, in a form that can be compared.
        value: what it was.
        line: that reads it.
    """

    source: Source
    read: Callable[[Tensor], Hashable]
    value: Hashable
    line: str

    def __str__(self) -> str:
        inputs = ["the inputs"] * bool(places_of(self.source))
        return f"{OF_VALUES} {' and '.join([*inputs, *sorted(buffers_of(self.source))])} at {self.line}"


class ValuesRead:
    """What one trace has read of the inputs; it says nothing of inputs of shapes that the trace does not serve.

    Args:
        reads: in their order.
        shapes: that it serves, None for an input that is no tensor; None for all.
    """

    def __init__(self, reads: Sequence[ValueRead], shapes: Sequence[torch.Size | None] | None) -> None:
        self.reads, self._shapes = tuple(reads), None if shapes is None else tuple(shapes)

    def changed(self, leaves: Sequence[Any]) -> ValueRead | None:
        """The first value that Python would not read again in a call with these inputs."""
        if not self.reads or self._shapes not in (None, shapes_of(leaves)):
            return None
        values = Values(leaves)
        return next((read for read in self.reads if _value_now(read, values) != read.value), None)

    @property
    def places(self) -> set[int]:
        """The inputs that values follow from."""
        return {place for read in self.reads for place in places_of(read.source)}


def _value_now(read: ValueRead, values: Values) -> Hashable:
    try:
        return read.read(values.of(read.source))
    except Exception:  # noqa: BLE001 - what torch cannot compute of these inputs is not what it was
        return None


def shapes_of(leaves: Sequence[Any]) -> tuple[torch.Size | None, ...]:
    return tuple([leaf.shape if isinstance(leaf, Tensor) else None for leaf in leaves])
