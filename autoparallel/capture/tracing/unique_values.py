"""``unique()`` and ``unique_consecutive()`` of which the number of values is known before.

torch has no operators for these whose results have a size in a trace, as ``nonzero_static`` is for ``nonzero``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def unique_values(x: Tensor, sorts: bool, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The values that a tensor holds, for each of its elements which one it is, and how often each of them occurs.

    Args:
        sorts: whether equal elements are one value wherever they stand; else, where they stand side by side.
        count: how many values there are, which is at least one.
    """
    elements, order = x.reshape(-1).sort(stable=True) if sorts else (x.reshape(-1), None)
    is_first = torch.cat([torch.ones_like(elements[:1], dtype=torch.bool), elements[1:] != elements[:-1]])
    places = torch.nonzero_static(is_first, size=count)[:, 0]
    numbers = is_first.cumsum(0) - 1
    inverse = numbers if order is None else torch.zeros_like(numbers).scatter(0, order, numbers)
    counts = numbers.new_zeros(count).index_add(0, numbers, torch.ones_like(numbers))
    return elements[places], inverse.reshape(x.shape), counts


def count_of(func: Any, x: Tensor) -> int:
    """How many values there are."""
    return int(func(x).shape[0])


def _of_all(
    input: Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False, dim: Any = None
) -> tuple[Tensor, Any, bool, bool]:
    return input, dim, return_inverse, return_counts


def _of_neighbours(
    input: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: Any = None
) -> tuple[Tensor, Any, bool, bool]:
    return input, dim, return_inverse, return_counts


UNIQUE: dict[Any, Callable[..., tuple[Tensor, Any, bool, bool]]] = {
    torch.unique: _of_all, Tensor.unique: _of_all,
    torch.unique_consecutive: _of_neighbours, Tensor.unique_consecutive: _of_neighbours,
}  # fmt: skip
"""The functions, with what tells their tensor, their dim, and which of both results beside the values are wanted."""
