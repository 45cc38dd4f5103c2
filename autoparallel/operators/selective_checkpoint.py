"""Calls whose results are kept where the layer around them runs again, so that they are not repeated.

[Note: kept calls] Selective activation checkpointing (Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", 2022) without a look at every operator.  ``torch.utils.checkpoint`` matches what is saved in the
second run with what was saved in the first one, by order.  So a kept call saves its operands twice and computes once:
in the first run it notes which parts of its operands autograd saves, and has an anchor save them in its place; in the
second run it gives back what it made, and only the anchor is made again.  Its backward then finds its operands, which
the second run has made of the results that were kept.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autoparallel import _torch
from autoparallel.comm.current import Current


@dataclass(frozen=True)
class _View:
    """A part of an operand: of the operand with this number, from this offset in its memory."""

    operand: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        base = operands[self.operand].detach()
        return base.as_strided(self.size, self.stride, int(base.storage_offset()) + self.offset)


@dataclass(frozen=True)
class _Made:
    """What one call has made and saved of its operands.

    Attributes:
        result: without its graph; None where the second run does not read it.
        form: the result's size, stride, dtype and device.
        differentiable: whether gradients flow through the result.
        views: what autograd has saved of the operands, in order.
    """

    result: torch.Tensor | None
    form: tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]
    differentiable: bool
    views: Sequence[_View]

    def again(self) -> torch.Tensor:
        """The result; memory of the same form where nothing that follows of it is read."""
        size, stride, dtype, device = self.form
        result = self.result
        if result is None:
            result = torch.empty_strided(size, stride, dtype=dtype, device=device)
        return result.detach().requires_grad_(self.differentiable)


class KeptResults:
    """What the kept calls of a layer have made in its first run, in their order, for its second one."""

    def __init__(self) -> None:
        self._results: list[_Made] = []
        self._number: int | None = None  # of the next call in the second run

    def filled(self) -> AbstractContextManager[Any]:
        """Calls inside are the first run's, and keep their results here."""
        return _RESULTS.using(self)

    def read(self) -> AbstractContextManager[Any]:
        """Calls inside are those of a second run, and find their results here."""
        self._number = 0
        return _RESULTS.using(self)

    def call(self, function: Callable[..., torch.Tensor], wanted: bool, args: Any, kwargs: Any) -> torch.Tensor:
        """The function's result."""
        operands = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if self._number is not None:
            entry = self._results[self._number]
            self._number += 1
            if entry.views:
                _anchor([view.of(operands) for view in entry.views])
            return entry.again()
        anchor = _Anchor()
        with torch.autograd.graph.saved_tensors_hooks(anchor.noting(operands), _unpack):
            result = function(*args, **kwargs)
        if anchor.views:
            anchor.root = _anchor([view.of(operands) for view in anchor.views])
        form = result.size(), result.stride(), result.dtype, result.device
        self._results.append(_Made(result.detach() if wanted else None, form, result.requires_grad, anchor.views))
        return result


_RESULTS: Current[KeptResults | None] = Current(None)


@dataclass
class _Anchor:
    """Saves operands in the place of a call.

    Attributes:
        views: the parts of operands.
        root: the tensor whose node in the graph saves them (before torch 2.13 a node lives no longer than its tensor).
    """

    views: list[_View] = field(default_factory=list)
    root: torch.Tensor | None = None
    _values: dict[int, torch.Tensor] = field(default_factory=dict)

    def noting(self, operands: Sequence[torch.Tensor]) -> Callable[[torch.Tensor], Any]:
        """What autograd is to save in the place of a tensor: a note for a part of an operand, else the tensor."""
        places: dict[Any, tuple[int, Hashable, int]] = {}  # not the operands, which would live as long as the note
        for i, x in reversed(list(enumerate(operands))):
            places[_torch.tensors.StorageWeakRef(x.untyped_storage())] = i, _kind(x), int(x.storage_offset())

        def note(x: torch.Tensor) -> Any:
            operand, kind, base = places.get(_torch.tensors.StorageWeakRef(x.untyped_storage()), (0, None, 0))
            if kind != _kind(x):
                return x
            self.views.append(_View(operand, x.size(), x.stride(), int(x.storage_offset()) - base))
            return self, len(self.views) - 1

        return note

    def value(self, number: int) -> torch.Tensor:
        """What is saved under a number; asked for once in a backward, for which the layer runs again."""
        if number not in self._values:
            assert self.root is not None and self.root.grad_fn is not None
            self._values = dict(enumerate(self.root.grad_fn.saved_tensors))  # type: ignore[attr-defined]
        return self._values.pop(number)


def _kind(x: torch.Tensor) -> Hashable:
    return x.dtype, x.is_conj(), x.is_neg()


def _unpack(saved: Any) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    anchor, number = saved
    return anchor.value(number)


class _Anchored(torch.autograd.Function):
    """Saves values; nothing reads its result, so no gradient reaches it."""

    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*values)
        return root.detach()


def _anchor(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """A tensor whose node in the graph saves values."""
    root = torch.empty(0, device="cpu", requires_grad=True)  # without which the function would save nothing
    return _Anchored.apply(root, *values)


class Keeping:
    """Calls a function whose result is kept where the layer around it runs again (see [Note: kept calls]).

    It is the target of a node, whose arguments are the function's.

    Attributes:
        target: the function.
        wanted: whether the second run reads the result.
    """

    def __init__(self, target: Any, wanted: bool) -> None:
        self.target, self.wanted = target, wanted
        name = getattr(target, "__name__", "call").replace(".", "_")
        self.__name__ = f"{'keeping' if wanted else 'once'}_{name}"  # what a program's text shows of it

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.call(self.target, args, kwargs)

    def call(self, function: Callable[..., torch.Tensor], args: Any, kwargs: Any) -> torch.Tensor:
        """Calls another function in the place of the target."""
        results = _RESULTS.value
        if results is None or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        return results.call(function, self.wanted, args, kwargs)
