"""What a trace sees of a model beside its operators, and what it refuses.

``torch.export`` records operators.  While a model is traced, :func:`everything_seen` makes what else decides about
gradients visible, too: an ``autograd.Function``, a tensor's hook and a module's backward hooks each leave a call that
stands for them (see ``operators.opaque``); inference mode, which no program has, is ``no_grad``; and a call whose
effect on gradients no program can have raises, with line and cure.  A model that asks whether it is compiled goes the
way of the plain model.

Most of it goes through a ``TorchFunctionMode``, which belongs to the thread.  Where torch has no such door, a name of
torch is replaced (see ``replacements``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import (
    BuiltinFunctionType,
    FrameType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autoparallel import _torch
from autoparallel.capture.python.profilers import without_model
from autoparallel.capture.refusals.failures import is_raised_by_model
from autoparallel.capture.tracing.attention_kernels import ATTENTION
from autoparallel.capture.tracing.backward_hooks import OF_AUTOGRAD
from autoparallel.capture.tracing.checks import CHECKED
from autoparallel.capture.tracing.drawn_scalars import DRAWING
from autoparallel.capture.tracing.inputs_read import MADE_LIKE
from autoparallel.capture.tracing.numbers_read import READS
from autoparallel.capture.tracing.open_numbers import OF_OPEN
from autoparallel.capture.tracing.positions import FOLLOWED
from autoparallel.capture.tracing.replacements import replaced_names
from autoparallel.capture.tracing.trace import CURRENT, Trace
from autoparallel.capture.tracing.values_read import READING
from autoparallel.graph.errors import RAISED, CaptureError, note_raised
from autoparallel.graph.plain_tensors import OF_FORM
from autoparallel.graph.python_state import OURS
from autoparallel.operators.opaque import opaque_calls


@contextmanager
def everything_seen(trace: Trace) -> Iterator[None]:
    """Inside, on this thread, a model's Python leaves calls for what it does to gradients."""
    enabled = torch.is_grad_enabled()
    try:
        with (
            _uncaught(), CURRENT.using(trace), replaced_names(), opaque_calls(trace.calls), _Listener(trace),
            _torch.export.compiled_run_plainly(),
        ):  # fmt: skip
            yield
    finally:
        changed = torch.is_grad_enabled() != enabled
        _torch.autograd.set_grad_enabled(enabled)
    if changed:
        raise CaptureError(
            "the model switches gradients on or off and leaves them so after its call\n"
            "What to change: use torch.set_grad_enabled() as a context (with torch.no_grad(): ...)."
        )


@contextmanager
def _uncaught() -> Iterator[None]:
    """Inside, what only a trace raises ends it, also where the model catches it: the plain model would not be there."""
    raised: list[Exception] = []
    with RAISED.using(raised):
        try:
            yield
        except CaptureError:
            raise
        except Exception as error:
            if raised and error not in raised and is_raised_by_model(error):
                raise raised[0] from raised[0].__cause__
            raise
    if raised:
        raise raised[0]


_OF_C = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType, MethodWrapperType)
_VIEW_ERROR = (
    "view size is not compatible with input tensor's size and stride (at least one dimension spans across two "
    "contiguous subspaces). Use .reshape(...) instead."
)


def _view(_: Trace, view: Any, *args: Any, **kwargs: Any) -> Any:
    """A view, or the error of one process, which a model may catch to reshape: that of a tensor without memory is of
    another class, and leaves a call in the trace."""
    place = _torch.export.place_in_trace()
    try:
        return view(*args, **kwargs)
    except ValueError as error:
        for node in [*_torch.export.nodes_since(place)]:
            node.graph.erase_node(node)
        raise RuntimeError(_VIEW_ERROR) from error


def _cast(trace: Trace, cast: Any, *args: Any, **kwargs: Any) -> Any:
    """The tensor itself, where that is what comes of it: of one that the model holds in a list the call would be taken
    for one of another trace."""
    traced = bool(args) and id(args[0]) in trace.existing and _torch.export.graph_of_trace() is not None
    if traced and _torch.export.result_untraced(cast, *args, **kwargs) is args[0]:
        return args[0]
    return cast(*args, **kwargs)


def _asks_for_gradient(trace: Trace, get: Any, x: Any, *args: Any) -> Any:
    """Notes that the model asks whether a tensor requires a gradient."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_name == "__torch_function__" or frame.f_code is _call.__code__):
        frame = frame.f_back
    if trace.runs and frame is not None and not frame.f_code.co_filename.startswith(OURS):
        trace.gradient_asked_after = len(trace.questions)
    return get(x, *args)


_CASTS = (
    "to", "type", "type_as", "cpu", "cuda", "flatten", "positive", "__pos__", "bool", "int", "long", "half", "bfloat16",
    "float", "double",
)  # fmt: skip

HANDLERS: dict[Any, Callable[..., Any]] = {
    **{getattr(torch.Tensor, name): _cast for name in _CASTS},
    **{getattr(torch.Tensor, name).__get__: _asks_for_gradient for name in ("requires_grad", "is_leaf", "grad_fn")},
    torch.flatten: _cast,
    torch.positive: _cast,
    torch.Tensor.view: _view,
    **FOLLOWED,
    **CHECKED,
    **READS,
    **READING,
    **ATTENTION,
    **DRAWING,
    **OF_OPEN,
    **OF_AUTOGRAD,
}
"""The functions of torch of which more is noted than that they run, with what takes their place."""

_WITHOUT_VALUES = OF_FORM | MADE_LIKE | {
    torch.rand_like, torch.randn_like, torch.Tensor.__len__, torch.Tensor.get_device, torch.Tensor.requires_grad_,
    _torch.autograd.SET_REQUIRES_GRAD,
}  # fmt: skip
"""What makes nothing of a tensor's values, so that nothing of it has a gradient either."""
_WITH_FIRST_VALUES = {
    torch.Tensor.to, torch.Tensor.type_as, torch.Tensor.expand_as, torch.Tensor.view_as, torch.Tensor.reshape_as
}  # fmt: skip
"""What makes so much of its first argument alone."""


class _Listener(TorchFunctionMode):
    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.trace.listening:
            return func(*args, **(kwargs or {}))
        if func not in _WITHOUT_VALUES:
            self.trace.note_read(args[:1] if func in _WITH_FIRST_VALUES else (*args, *(kwargs or {}).values()))
        call = partial(_call, HANDLERS.get(func, _run), self.trace, func)
        try:
            if self.trace.inputs is None:
                return call(*args, **(kwargs or {}))
            return self.trace.inputs.follow(func, call, args, kwargs or {})
        except _torch.export.OF_TRACES as error:
            note_raised(error)
            raise


def _call(handler: Any, trace: Trace, func: Any, *args: Any, **kwargs: Any) -> Any:
    """What a handler makes of a call of torch."""
    named = {name: x if name == "out" else _number(trace, func, name, x) for name, x in kwargs.items()}
    others = [_number(trace, func, place, x) for place, x in enumerate(args[1:], 1)]
    return handler(trace, func, *args[:1], *others, **named)


def _number(trace: Trace, func: Any, place: int | str, x: Any) -> Any:
    """A tensor that holds a number, as torch is given it: read where torch takes numbers alone (``alpha=scale``), for
    it would read there what a tensor around the model holds now, and what others do not hold in a trace."""
    if not isinstance(x, torch.Tensor) or x.ndim or x.requires_grad:
        return x
    number = trace.read(torch.Tensor.item, x) if _takes_numbers(getattr(func, "__name__", ""), place) else None
    return _torch.export.as_traced(x) if number is None else number


@cache
def _takes_numbers(name: str, place: int | str) -> bool:
    """Whether all operators of a name take a number at a place, or under a keyword, where they take anything."""
    operators = getattr(torch.ops.aten, name, None)
    if not isinstance(operators, torch._ops.OpOverloadPacket):
        return False
    arguments = [
        argument
        for overload in operators.overloads()
        for i, argument in enumerate(getattr(operators, overload)._schema.arguments)
        if argument.name == place or i == place and not argument.kwarg_only
    ]
    types = [str(argument.type).removeprefix("Optional[").removeprefix("List[").rstrip("]") for argument in arguments]
    return "Tensor" not in types and not _NUMBERS.isdisjoint(types)


_NUMBERS = frozenset(("int", "float", "number", "SymInt"))


def _run(_: Trace, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs a function of torch; one of C calls no code of the model's."""
    if not isinstance(func, _OF_C):
        return func(*args, **kwargs)
    with without_model():
        return func(*args, **kwargs)
