"""The leaves of a call's output: tensors, numbers, sizes and constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from autoparallel import _torch


@dataclass(frozen=True)
class Constant:
    """A leaf of the output that is no tensor."""

    value: Any


@dataclass(frozen=True)
class Size:
    """A leaf of the output that is a size, or a number or a truth value made of sizes, as an expression of symbols."""

    expression: sympy.Basic
    kind: type = int


@dataclass(frozen=True)
class Number:
    """A leaf of the output that is the value of a tensor of no dims, by its index among the graph's outputs.

    Where its type follows from values, too (``min(1, n)`` is 1 or a float), the tensor is a pair: the value, exact up
    to 2**53, and the number of the type among ``TYPES``.
    """

    index: int
    kind: type


TYPES: tuple[type, ...] = (float, int, bool, type(None))
"""What a number may be whose type follows from values."""

Leaf = int | Constant | Size | Number
"""One leaf of the output; a tensor as its index among the graph's outputs."""


def leaf_value(leaf: Leaf, results: Sequence[Any], sizes: Mapping[Any, int | float]) -> Any:
    """One leaf of a call's output, from the graph's outputs and the values of the traced symbols."""
    if isinstance(leaf, Constant):
        return leaf.value
    if isinstance(leaf, Number):
        value = results[leaf.index]
        if not isinstance(value, torch.Tensor):  # what a call does not keep says so
            return value
        if not value.ndim:
            return leaf.kind(value)
        number, place = value.tolist()
        kind = TYPES[int(place)]
        return None if kind is type(None) else kind(number)
    return leaf.kind(_torch.numbers.evaluator(leaf.expression)(sizes)) if isinstance(leaf, Size) else results[leaf]
