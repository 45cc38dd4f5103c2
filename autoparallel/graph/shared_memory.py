"""Results of a call that lie in the memory of a tensor that the call is given: a buffer that is returned, a part of one
that an attribute is set to, an argument.

A program makes a new tensor of what a call changes.  So the result is taken of the user's own tensor when the call has
changed it, and changes with it from then on, as eager's view does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoparallel import _torch
from autoparallel._torch.tensors import storage_mark

_Number = Any  # of Python's, or an expression of sympy's


@dataclass(frozen=True)
class SharedMemory:
    """How a result lies in the memory of a tensor.

    Attributes:
        owner: the name of a buffer or a parameter, or the place of an input among the leaves.
        size, stride, offset: of the result, from the tensor's first element on; numbers, or expressions of the trace's
            symbols.
        is_whole: whether it is all of the tensor, as it lies.
    """

    owner: str | int
    size: tuple[_Number, ...]
    stride: tuple[_Number, ...]
    offset: _Number
    is_whole: bool

    def of(self, base: torch.Tensor, values: Mapping[Any, int | float]) -> torch.Tensor | None:
        """The result as a part of the user's tensor; None where that does not lie as it did in the trace.

        Args:
            values: of the trace's symbols.
        """
        if self.is_whole:
            return base.detach()
        if not base.is_contiguous():
            return None
        size, stride = ([_value_of(x, values) for x in numbers] for numbers in (self.size, self.stride))
        return base.detach().as_strided(size, stride, base.storage_offset() + _value_of(self.offset, values))


def memory_of(
    results: Mapping[int | str, Any], tensors: Mapping[str, Any], inputs: Sequence[Any]
) -> dict[int | str, SharedMemory]:
    """Which results of a trace lie in the memory of a tensor of the model, by its name, or of an input, by its place.

    Args:
        results: leaves by their places, and what buffers are bound to, by the names of these.
        tensors: of the model, which the call leaves where they are.
    """
    owners: dict[int, tuple[str | int, torch.Tensor]] = {}
    bound = {key: x for key, x in results.items() if isinstance(key, str)}
    candidates: list[tuple[str | int, Any]] = [*tensors.items(), *enumerate(inputs), *bound.items()]
    for owner, tensor in candidates:
        if isinstance(tensor, torch.Tensor):
            owners.setdefault(storage_mark(tensor), (owner, tensor))
    shared: dict[int | str, SharedMemory] = {}
    for key, leaf in results.items():
        owner, tensor = owners.get(storage_mark(leaf), ("", None)) if isinstance(leaf, torch.Tensor) else ("", None)
        if owner == key or tensor is None or leaf.dtype != tensor.dtype or leaf.is_conj() or leaf.is_neg():
            continue
        numbers = (*leaf.shape, *leaf.stride(), leaf.storage_offset())
        if any(isinstance(x, torch.SymInt) and _torch.export.is_read(x) for x in numbers):
            continue
        (size, stride, offset), (*its, begin) = _form_of(leaf), _form_of(tensor)
        is_whole = [size, stride, offset] == [*its, begin]
        if is_whole or tensor.is_contiguous():
            shared[key] = SharedMemory(owner, size, stride, offset - begin, is_whole)
    return shared


def _form_of(tensor: torch.Tensor) -> tuple[tuple[_Number, ...], tuple[_Number, ...], _Number]:
    numbers = [*map(_expression, (*tensor.shape, *tensor.stride(), tensor.storage_offset()))]
    return tuple(numbers[: tensor.ndim]), tuple(numbers[tensor.ndim : -1]), numbers[-1]


def _expression(number: int | torch.SymInt) -> _Number:
    return number.node.expr if isinstance(number, torch.SymInt) else number


def _value_of(number: _Number, values: Mapping[Any, int | float]) -> int:
    return number if isinstance(number, int) else int(_torch.numbers.evaluator(number)(values))
