"""Positions that count up, of which transformers asks the values whether several sequences are packed into a row.

Where none are, attention needs no mask: it runs as ``is_causal``, and shares keys and values among heads as they are.
A trace has no values to ask, so that a mask of every position by every position would be built in each call.  But what
a model makes itself, by ``torch.arange``, is known to count up, and the trace goes the way of the plain model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from autoparallel.capture.tracing.stand_ins import replacement
from autoparallel.capture.tracing.trace import Trace

_PACKED = "find_packed_sequence_indices"
"""The function of transformers that asks."""


def packing_of_transformers() -> Iterator[tuple[Any, str, Any]]:
    """The function, where it is in use, with what takes its place."""
    module = sys.modules.get("transformers.masking_utils")
    if hasattr(module, _PACKED):
        yield replacement(module, _PACKED, _find_packed)


def _find_packed(trace: Trace, find: Callable[[Tensor], Tensor | None], position_ids: Tensor) -> Tensor | None:
    """As the function; but None, which says that nothing is packed, for positions that are known to count up."""
    return None if trace.counts_up(position_ids) else find(position_ids)


def _arange(trace: Trace, func: Any, *args: Any, **kwargs: Any) -> Tensor:
    out: Tensor = func(*args, **kwargs)
    step = kwargs.get("step", args[2] if len(args) > 2 else 1)
    if isinstance(step, int) and step == 1 and not out.is_floating_point():
        trace.note_counting(out)
    return out


def _follow(counts: Callable[..., bool]) -> Callable[..., Tensor]:
    """A handler of a function that leaves positions that count up along the last dim, where ``counts`` says so."""

    def call(trace: Trace, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = func(x, *args, **kwargs)
        if not kwargs and trace.counts_up(x) and counts(x, *args):
            trace.note_counting(out)
        return out

    return call


def _is_shift(x: Tensor, other: Any) -> bool:
    return isinstance(other, int | torch.SymInt)


def _is_in_front(x: Tensor, dim: int) -> bool:
    return dim not in (-1, x.dim())


def _repeats_rows(x: Tensor, *sizes: Any) -> bool:
    last = sizes[-1][-1] if isinstance(sizes[-1], tuple | list | torch.Size) else sizes[-1]
    return isinstance(last, int) and last == -1


def _puts_in_front(x: Tensor, key: Any) -> bool:
    items = key if isinstance(key, tuple) else (key,)
    new = [item is None for item in items]
    return all(new) or not new[-1] and all(n or item == slice(None) for n, item in zip(new, items, strict=True))


FOLLOWED: dict[Any, Callable[..., Any]] = {
    torch.arange: _arange,
    Tensor.add: _follow(_is_shift),
    Tensor.unsqueeze: _follow(_is_in_front),
    Tensor.expand: _follow(_repeats_rows),
    Tensor.__getitem__: _follow(_puts_in_front),
}
"""The functions through which positions are followed, with what takes their place while a model is traced."""
