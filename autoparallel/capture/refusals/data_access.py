"""What a forward does beside autograd: it reads ``x.data``, or writes to the memory of another tensor.

[Note: writing behind autograd's back] ``x.data`` and ``x.detach()`` share the memory of ``x``.  What is written to them
changes the values of ``x``, and autograd goes on as if it had not; so does what is written to ``x`` itself under
``no_grad``.  A program has other values with the same gradient there, ``new + (x - x.detach())``, as long as autograd
has not kept ``x`` for the backward, which would then read what was written.  Where ``x`` is not differentiated, it is a
change in place like any other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autoparallel._torch.autograd import functions_of, memory_kept
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


_OF_ITSELF = (
    "detach_", "requires_grad_", "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_",
)  # fmt: skip
"""What changes a tensor itself, and nothing in its memory."""


def is_write(name: str) -> bool:
    """Whether a function of torch of this name writes to its first argument."""
    return name in _IN_PLACE or name.endswith("_") and not name.endswith("__") and name not in _OF_ITSELF


def is_view(name: str) -> bool:
    """Whether what a function of this name gives may lie in the memory of its first argument."""
    return name in _VIEWS or name == "__get__"


_ViewOf = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class _Alias:
    """What lies in the memory of a tensor that is differentiated.

    Attributes:
        tensor: held, so that no other one gets its id.
        source: that tensor; None for a parameter that was given the memory.
        views: what makes it of that one, one after the other.
    """

    tensor: torch.Tensor
    source: torch.Tensor | None
    views: tuple[_ViewOf, ...] = ()


class DataAccess(TorchFunctionMode):
    """Inside, ``x.data`` is ``x.detach()``, which a trace can follow, and so are writes to a diagonal or under a mask.
    ``x.data = value`` gives a parameter new values in its own memory.

    Args:
        shared: tensors whose memory no parameter may be given.
        of_functions: those that the user's ``autograd.Function``s may keep, so far.

    Raises:
        CaptureError: where a tensor is given other memory, or memory that the backward reads is written to (see
            [Note: writing behind autograd's back]).
    """

    def __init__(self, shared: Sequence[Any], of_functions: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._of_functions = of_functions
        self._shared = {storage_mark(x) for x in shared if isinstance(x, torch.Tensor)}
        self._aliases: dict[int, _Alias] = {}
        self._functions: list[Any] = []  # of autograd, by which results were made, that have not been visited
        self._visited = set[Any]()
        self._memory = set[int]()  # the marks of what those keep that have

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
            self._aliases[id(args[1])] = _Alias(args[1], None)  # whoever writes to it would change the parameter
            return None
        if is_write(name) and args:
            alias = self._written_behind(args[0])
            if alias is not None:
                _replace_values(alias, lambda part: self.__torch_function__(func, types, (part, *args[1:]), kwargs))
                return None if name == "__setitem__" else args[0]
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
        detaches = func in _DETACHES
        if detaches:
            func, args, kwargs = torch.Tensor.detach, args[:1], {}
        result = func(*args, **kwargs)
        parts = result if isinstance(result, tuple | list) else (result,)
        viewed = args[0] if is_view(name) and args and isinstance(args[0], torch.Tensor) else None
        if viewed is not None and (detaches or id(viewed) in self._aliases or not torch.is_grad_enabled()):
            self._note_views(viewed, parts, [partial(_view, func, args[1:], kwargs, i) for i in range(len(parts))])
        if torch.is_grad_enabled() and not torch.compiler.is_dynamo_compiling():  # which traces the ways of torch.cond
            self._functions += functions_of([x for x in parts if isinstance(x, torch.Tensor)])
        return result

    def _note_views(self, x: torch.Tensor, parts: Sequence[Any], views: Sequence[_ViewOf]) -> None:
        """Notes parts of what is differentiated that lie in its memory, and carry no gradient."""
        base = self._aliases.get(id(x)) or _Alias(x, x)
        source = base.source
        if source is not None and (not source.requires_grad or isinstance(source, torch.nn.Parameter)):
            return
        for part, view in zip(parts, views, strict=True):
            if isinstance(part, torch.Tensor) and share_storage(part, base.tensor):
                self._aliases[id(part)] = _Alias(part, source, (*base.views, view))

    def _written_behind(self, written: Any) -> _Alias | None:
        """What a write changes of a tensor behind autograd's back; None where it changes nothing so."""
        if not isinstance(written, torch.Tensor):
            return None
        alias = self._aliases.get(id(written))
        is_own = written.is_leaf or storage_mark(written) in self._shared
        if alias is None and written.requires_grad and not is_own and not torch.is_grad_enabled():
            alias = _Alias(written, written)
        source = None if alias is None else alias.source
        if source is None or source.is_leaf or not source.is_floating_point() or self._is_kept(source):
            self._require_own(written)
            return None
        return alias

    def _is_kept(self, x: torch.Tensor) -> bool:
        """Whether the backward reads the memory of a tensor, as far as that is known."""
        if torch.compiler.is_dynamo_compiling():
            return True
        self._memory |= memory_kept(self._functions, self._visited)
        self._functions.clear()
        return storage_mark(x) in {*self._memory, *map(storage_mark, self._of_functions)}

    def _require_own(self, written: Any) -> None:
        if isinstance(written, torch.Tensor) and id(written) in self._aliases:
            raise refusal(
                "the model writes to x.data or x.detach() of a tensor that is differentiated, which changes its values "
                "behind autograd's back,",
                line_of_frame(sys._getframe(1)),
                "compute a new tensor; for another value with the same gradient write x + (value - x).detach()",
            )


def _view(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], place: int, x: torch.Tensor) -> torch.Tensor:
    """One of the parts of a tensor that a function of torch gives."""
    result = func(x, *args, **kwargs)
    part: torch.Tensor = result[place] if isinstance(result, tuple | list) else result
    return part


def _replace_values(alias: _Alias, write: Callable[[torch.Tensor], Any]) -> None:
    """Gives a tensor the values that are written to a part of it.  Where it was not finite, it has no gradient then."""
    x = alias.source
    assert x is not None
    with torch.no_grad():
        values = part = x.detach().clone()
        for view in alias.views:
            part = view(part)
        write(part)
    with torch.enable_grad():
        finite = torch.where(x.detach().isfinite(), x, 0)  # which keeps the mask alone
        x.copy_(values + (finite - finite.detach()))


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
