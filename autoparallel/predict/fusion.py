"""What a compiler's fused kernels read and write, operator by operator as they come.

[Note: fusion] Inductor makes one kernel of pointwise operators and reductions that follow each other; what they hand on
stays in registers.  So what such an operator makes is pending: nothing is written.  When an operator that is not fused
(a product, attention, a collective) reads it, one kernel reads what it follows from and writes it.  What is read again
after another kernel ran (a residual stream, an activation that the backward needs) is written once and read, or made
again from what it follows from, whichever moves fewer bytes, as the compiler's partitioner would.  What one layer hands
on to the next is written and read, because each layer is compiled apart (see [Note: regions] in ``regions``).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

_OTHERS = frozenset(
    ["aten::_log_softmax", "aten::_log_softmax_backward_data", "aten::_softmax", "aten::_softmax_backward_data",
     "aten::_to_copy", "aten::amax", "aten::amin", "aten::cat", "aten::clone", "aten::constant_pad_nd",
     "aten::gelu_backward", "aten::mean", "aten::new_zeros", "aten::nll_loss_backward", "aten::nll_loss_forward",
     "aten::ones_like", "aten::silu_backward", "aten::slice_backward", "aten::sum", "aten::var_mean", "aten::zeros",
     "aten::zeros_like"]
)  # fmt: skip
"""What is fused beside operators that torch calls pointwise: copies, reductions, losses, and what fills."""


def is_fused(func: Any) -> bool:
    """Whether a compiler fuses an operator with what stands around it."""
    name = func._schema.name
    return not name.endswith("_") and (torch.Tag.pointwise in func.tags or name in _OTHERS)


class Fusion:
    """Counts the bytes that kernels move (see [Note: fusion]); it keeps no tensor alive."""

    def __init__(self) -> None:
        self._kernels = 0  # that ran so far and are not fused
        self._numbers: Any = WeakIdKeyDictionary()  # of storages
        self._next = itertools.count()
        # Storages that are pending: before which kernel they were made, in which layer, and what they follow from, by
        # number, to bytes.
        self._pending: Any = WeakIdKeyDictionary()
        self._read: dict[int, int] = {}  # by number, before which kernel a storage was read last

    def moved(
        self, inputs: Iterable[torch.Tensor], outputs: Iterable[torch.Tensor], *, fused: bool, layer: str | None = None
    ) -> int:
        """Bytes that fused kernels move because of an operator.

        Args:
            fused: whether it is one that a compiler fuses; else what it moves itself is not counted.
            layer: whose operator it is; None where a program is compiled whole.
        """
        if not fused:
            moved = sum(self._write_bytes(x.untyped_storage()) for x in inputs)
            self._kernels += 1
            return moved
        moved, sources = 0, dict[int, int]()
        for storage in [x.untyped_storage() for x in inputs]:
            writer, origin, follows = self._pending.get(storage, (self._kernels, layer, {}))
            again = writer == self._kernels or 2 * storage.nbytes() > sum(follows.values())
            if origin != layer or not again:
                moved += self._write_bytes(storage)
            if storage in self._pending:
                sources |= follows
            else:
                sources[self._number(storage)] = storage.nbytes()
        for x in outputs:
            self._pending[x.untyped_storage()] = self._kernels, layer, sources
        return moved

    def _number(self, storage: Any) -> int:
        if storage not in self._numbers:
            self._numbers[storage] = next(self._next)
        return self._numbers[storage]

    def _write_bytes(self, storage: Any) -> int:
        """Bytes that a kernel moves because it writes a storage, if that is pending: one that has read what it follows
        from meanwhile writes it with what else it writes."""
        if storage not in self._pending:
            return 0
        writer, _, sources = self._pending.pop(storage)
        unread = [number for number in sources if self._read.get(number, -1) < writer]
        self._read |= dict.fromkeys(unread, self._kernels)
        return storage.nbytes() + sum(sources[number] for number in unread)
