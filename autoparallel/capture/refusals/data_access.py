"""What a forward does beside autograd: it reads ``x.data``, or writes to the memory of another tensor.

[Note: writing through a detached tensor] ``x.data`` and ``x.detach()`` share the memory of ``x``.  What is written to
them changes the values of ``x``, and autograd goes on as if it had not: there is no operator that does this, so that it
cannot be in a program.  Where ``x`` is not differentiated, it is a change in place like any other.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autoparallel._torch.tensors import View, share_storage, storage_mark
from autoparallel.graph.errors import CaptureError, refusal
from autoparallel.graph.lines import line_of_frame

KERNEL_CURE = (
    "make an operator of what launches it, by torch.library.custom_op (of a Triton kernel by torch.library.triton_op), "
    "with register_fake and register_autograd"
)

_INITIALISERS = torch.nn.init.__name__
_DETACHES = (torch.Tensor.data.__get__, torch.Tensor.detach, torch.detach)  # type: ignore[attr-defined]
_VIEWS = frozenset((
    "__getitem__", "as_strided", "chunk", "detach", "diagonal", "expand", "expand_as", "flatten", "movedim", "narrow",
    "permute", "real", "reshape", "select", "split", "squeeze", "swapaxes", "swapdims", "t", "transpose", "unbind",
    "unflatten", "unsqueeze", "view", "view_as", "view_as_real", "view_as_complex",
))  # fmt: skip
_IN_PLACE = frozenset(("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__ipow__"))


def is_write(name: str) -> bool:
    """Whether a function of torch of this name writes to its first argument."""
    return name in _IN_PLACE or name.endswith("_") and not name.endswith("__") and name != "requires_grad_"


def is_view(name: str) -> bool:
    """Whether what a function of this name gives may lie in the memory of its first argument."""
    return name in _VIEWS or name == "__get__"


class DataAccess(TorchFunctionMode):
    """Inside, ``x.data`` is ``x.detach()``, which a trace can follow, and so are writes to a diagonal or under a mask.
    ``x.data = value`` gives a parameter new values in its own memory.

    Args:
        shared: tensors whose memory no parameter may be given.

    Raises:
        CaptureError: where a tensor is given other memory, or memory that it shares with one that is differentiated
            is written to (see [Note: writing through a detached tensor]).
    """

    def __init__(self, shared: Sequence[Any]) -> None:
        super().__init__()
        self._shared = {storage_mark(x) for x in shared if isinstance(x, torch.Tensor)}
        self._detached: dict[int, torch.Tensor] = {}  # held, so that no other tensor gets its id

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            if _lies_alike(*args):  # as x.data = x.data.to(device) does, where it lies there
                return None
            if not _is_for_parameter(*args):
                raise refused_memory("x.data = ...", line_of_frame(sys._getframe(1)))
            if storage_mark(args[1]) in self._shared:
                raise refusal(
                    "the model gives a parameter the memory of another tensor (x.data = ...)",
                    line_of_frame(sys._getframe(1)),
                    "give it a copy (x.data = value.clone())",
                )
            with torch.no_grad():
                args[0].copy_(args[1])
            self._detached[id(args[1])] = args[1]  # whoever writes to it would change the parameter
            return None
        if is_write(name):
            self._require_own(args[0] if args else None)
        self._require_own(kwargs.get("out"))
        if name == "fill_diagonal_" and _is_plain_diagonal(*args, **kwargs):
            value = args[1] if len(args) > 1 else kwargs["fill_value"]
            args[0].diagonal().fill_(value)  # a view that has a derivative, unlike strides
            return args[0]
        if name == "__setitem__" and _is_mask(*args):
            args[0].masked_fill_(_expand_mask(args[1], args[0]), args[2])  # of a fixed size, unlike positions
            return None
        if getattr(func, "__module__", "") == _INITIALISERS:  # a trace does not see the no_grad() inside
            with torch.no_grad():
                return func(*args, **kwargs)
        if func in _DETACHES:
            result = args[0].detach()
            if args[0].requires_grad and not isinstance(args[0], torch.nn.Parameter):
                self._detached[id(result)] = result
            return result
        result = func(*args, **kwargs)
        if is_view(name) and args and id(args[0]) in self._detached:
            parts = result if isinstance(result, tuple | list) else (result,)
            self._detached |= {id(x): x for x in parts if isinstance(x, torch.Tensor)}
        return result

    def _require_own(self, written: Any) -> None:
        if isinstance(written, torch.Tensor) and id(written) in self._detached:
            raise refusal(
                "the model writes to x.data or x.detach() of a tensor that is differentiated, which changes its values "
                "behind autograd's back,",
                line_of_frame(sys._getframe(1)),
                "compute a new tensor; for another value with the same gradient write x + (value - x).detach()",
            )


def _is_for_parameter(x: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a parameter is given a tensor like itself."""
    alike = (x.shape, x.dtype, x.device) == (value.shape, value.dtype, value.device)
    return isinstance(x, torch.nn.Parameter) and alike


def _lies_alike(x: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same elements of the same memory."""
    return share_storage(x, other) and x.storage_offset() == other.storage_offset() and View.of(x) == View.of(other)


def _is_plain_diagonal(x: torch.Tensor, fill_value: Any = 0, wrap: bool = False) -> bool:
    return x.ndim == 2 and not wrap


def _is_mask(x: torch.Tensor, index: Any, value: Any) -> bool:
    """Whether one value is written wherever a mask says so."""
    is_mask = isinstance(index, torch.Tensor) and index.dtype == torch.bool and index.ndim > 0
    return is_mask and isinstance(value, torch.Tensor) and value.ndim == 0 and value.dtype == x.dtype


def _expand_mask(mask: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A mask over leading dims as one over all of them."""
    return mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim))


def refused_memory(how: str, line: str) -> CaptureError:
    """Why a tensor must keep its memory, and what to write instead."""
    cure = "use the new tensor instead; to change a buffer, use buffer.copy_(...)"
    return refusal(f"the model gives a tensor other memory ({how})", line, cure)
