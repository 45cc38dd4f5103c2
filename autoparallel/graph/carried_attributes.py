"""Attributes that calls read and change, as a table for the longest input so far, or a count of the calls: a program is
given them beside the arguments, and the call sets them to what it returns.

Before:
    model(x)                # if x.shape[1] > self.length: self.length, self.table = x.shape[1], make(x.shape[1])
After:
    self.length, self.table = program(x, self.length, self.table)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autoparallel.graph.captured import CaptureError, InputSpec

CARRIED = "attributes that calls change"
"""The name of the argument that holds them."""

_LEAST = 2
"""The size that stands for 0: one of 0 or 1 is never open."""

_LARGEST = 2**62
"""No tensor has a size that stands for a number much above."""


class ChangesAttributesError(CaptureError):
    """A call changes attributes that it reads, and that it is not given yet.

    Attributes:
        values: what it makes of them, by label.
        lines: at which it does.
    """

    def __init__(self, text: str, changes: Mapping[str, tuple[Any, str]]) -> None:
        RuntimeError.__init__(self, text)  # the ranks go on, so none of them is told of it
        self.values = {label: _form_of(value) for label, (value, _) in changes.items()}
        self.lines = {label: line for label, (_, line) in changes.items()}


def _form_of(value: Any) -> Any:
    """A value that does not belong to a trace."""
    if isinstance(value, torch.Tensor):
        return torch.empty([int(size) for size in value.shape], dtype=value.dtype, device="meta")
    if isinstance(value, torch.SymFloat):  # perhaps of another one that is open
        return 0.0
    return int(value) if isinstance(value, torch.SymInt) else value


def may_be_carried(value: Any) -> bool:
    """Whether a call can be given a value: nothing, a bool, a number, which may be open, a string, or a tensor without
    gradient."""
    if isinstance(value, torch.Tensor):
        return not value.requires_grad
    return (
        value is None
        or isinstance(value, bool | str | float | torch.SymInt | torch.SymFloat)
        or (type(value) is int and abs(value) < _LARGEST)
    )


def as_argument(attributes: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Attributes as a call is given them: whole numbers, and all others.

    A whole number comes as the sizes of a tensor without entries, the second one for what is below 0: a size is what a
    trace leaves open, and about which it may still be asked.
    """
    numbers = {label: x for label, x in attributes.items() if type(x) is int}
    sizes = {label: torch.empty((x + _LEAST, 0) if x >= 0 else (0, _LEAST - x)) for label, x in numbers.items()}
    return sizes, {label: x for label, x in attributes.items() if label not in sizes}


def describe_attributes(argument: tuple[Mapping[str, torch.Tensor], Mapping[str, Any]]) -> list[InputSpec | Any]:
    """The inputs that attributes are, as a call is given them; none has the batch as its first dim."""
    return [
        InputSpec(tuple(x.shape), x.dtype, False, 0, is_number=is_number) if isinstance(x, torch.Tensor) else x
        for values, is_number in zip(argument, (True, False), strict=True)
        for x in values.values()
    ]


def without_attributes(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keyword arguments of a call, and the attributes that stand behind them, by label."""
    arguments = dict(kwargs)
    numbers, others = arguments.pop(CARRIED, ({}, {}))
    return arguments, {label: number_of(x.shape) for label, x in numbers.items()} | others


def attributes_in(leaves: Sequence[Any], in_spec: pytree.TreeSpec) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """What of something that there is for each input is for attributes, by label: whole numbers, and all others."""
    return pytree.tree_unflatten(leaves, in_spec)[1].get(CARRIED, ({}, {}))


def number_of(shape: Sequence[int]) -> int:
    """The number that a tensor of this shape stands for."""
    over, under = shape
    return over - _LEAST if isinstance(over, torch.SymInt) or over else _LEAST - under
