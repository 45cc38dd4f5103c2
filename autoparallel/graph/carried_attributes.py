"""Attributes that calls read and change, and entries of lists and dicts, as a table for the longest input so far, or a
count of the calls: a program is given them beside the arguments, and the call sets them to what it returns.

Before:
    model(x)                # if x.shape[1] > self.length: self.length, self.table = x.shape[1], make(x.shape[1])
After:
    self.length, self.table = program(x, self.length, self.table)

In what follows, an attribute is an entry (``stats['calls']``), too; ``graph.labels`` tells them apart.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autoparallel import _torch
from autoparallel._torch.numbers import OPEN
from autoparallel.graph.captured import Captured, InputSpec
from autoparallel.graph.changed_arguments import ENTRIES
from autoparallel.graph.errors import ReadAgainError
from autoparallel.graph.labels import is_entry, split_entry
from autoparallel.graph.leaves import Number
from autoparallel.graph.python_state import is_plain
from autoparallel.graph.records import is_held

_LEAST = 2
"""The size that stands for 0: one of 0 or 1 is never open."""

_LARGEST = 2**62
"""No tensor has a size that stands for a number much above."""


class _Constant:
    """A value that is no input of a graph: how the argument nests tells of it."""

    def __init__(self, value: Any) -> None:
        self.value = value


pytree.register_pytree_node(
    _Constant,
    lambda constant: ([], constant.value),
    lambda _, value: _Constant(value),
    flatten_with_keys_fn=lambda constant: ([], constant.value),
)


class ChangesAttributesError(ReadAgainError):
    """A call changes attributes that it reads, and that it is not given yet.

    Attributes:
        values: what it makes of them, by label.
        lines: at which it does.
        unseen: what finds the line of an entry, which nobody has seen change (see ``capture.python.changes``).
    """

    def __init__(self, text: str, changes: Mapping[str, tuple[Any, str]]) -> None:
        super().__init__(text)
        self.values = {label: _form_of(value) for label, (value, _) in changes.items()}
        self.lines = {label: line for label, (_, line) in changes.items()}
        self.unseen: Mapping[str, Any] = {}


def _form_of(value: Any) -> Any:
    """A value that does not belong to a trace."""
    if isinstance(value, torch.Tensor):
        return torch.empty([int(size) for size in value.shape], dtype=value.dtype, device="meta")
    if isinstance(value, torch.SymFloat):  # perhaps of another one that is open
        return 0.0
    if isinstance(value, torch.SymBool):
        return False
    if isinstance(value, torch.SymInt):
        return 0 if _torch.export.is_read(value) else int(value)
    return value


def may_be_carried(value: Any) -> bool:
    """Whether a call can be given a value: nothing, a bool, a number, which may be open, a string, an enum, a dtype, or
    a tensor that is no parameter."""
    if isinstance(value, torch.Tensor):
        return not isinstance(value, torch.nn.Parameter)
    return isinstance(value, OPEN) or is_plain(value) and not (type(value) is int and abs(value) >= _LARGEST)


def as_argument(attributes: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Attributes as a call is given them: whole numbers, and all others.

    A whole number comes as the sizes of a tensor without entries, the second one for what is below 0: a size is what a
    trace leaves open, and about which it may still be asked.
    """
    named = {_name_of(label): _Constant(x) if is_held(x) else x for label, x in attributes.items()}
    numbers = {name: x for name, x in named.items() if type(x) is int}
    sizes = {name: torch.empty((x + _LEAST, 0) if x >= 0 else (0, _LEAST - x)) for name, x in numbers.items()}
    return sizes, {name: x for name, x in named.items() if name not in sizes}


def _name_of(label: str) -> str:
    """The key of an attribute in the argument: torch writes it into a text of Python's, where it has both kinds of
    quotes around it."""
    return label.replace("'", "`")


def label_of(name: str) -> str:
    """The label of an attribute that has this key in the argument."""
    return name.replace("`", "'")


def by_label(values: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes by their labels, of those that have their keys in the argument."""
    constants = {name: value.value for name, value in values.items() if isinstance(value, _Constant)}
    return {label_of(name): value for name, value in {**values, **constants}.items()}


def describe_attributes(argument: tuple[Mapping[str, torch.Tensor], Mapping[str, Any]]) -> list[InputSpec | Any]:
    """The inputs that attributes are, as a call is given them; none has the batch as its first dim."""
    return [
        InputSpec(tuple(x.shape), x.dtype, x.requires_grad, 0, is_number=is_number)
        if isinstance(x, torch.Tensor)
        else x
        for values, is_number in zip(argument, (True, False), strict=True)
        for x in values.values()
        if not isinstance(x, _Constant)
    ]


def is_changed(label: str, names: Container[str]) -> bool:
    """Whether a call changes an attribute.

    Args:
        names: of what it sets.
    """
    return label in names or is_entry(label) and f"{split_entry(label)[0]}{ENTRIES}" in names


ELEMENTS = "elements of its arguments"
"""What a call sets that changes tensors which it is given."""


def computed_attributes(captured: Captured) -> list[str]:
    """What a call sets to tensors, or to numbers that it reads of them; the rest follows from what the call is given,
    whatever its rows are."""
    attributes = captured.attributes.items()
    computed = [name for name, (_, leaves) in attributes if any(isinstance(leaf, int | Number) for leaf in leaves)]
    return computed + [ELEMENTS] * bool(captured.written)


def number_of(shape: Sequence[int]) -> int:
    """The number that a tensor of this shape stands for."""
    over, under = shape
    return over - _LEAST if isinstance(over, torch.SymInt) or over else _LEAST - under
