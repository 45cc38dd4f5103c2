"""Names of torch, and of transformers and Triton, that are replaced while any thread traces.

They are those of what a trace sees by no other door.  On a thread that does not trace, each does as torch does.
"""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, FunctionType
from typing import Any

import torch

from autoparallel import _torch
from autoparallel.capture.python.observed_classes import attributes_among_buffers
from autoparallel.capture.tracing import extremes
from autoparallel.capture.tracing.backward_hooks import backward_hook
from autoparallel.capture.tracing.checks import NAMES as ASKED
from autoparallel.capture.tracing.drawn_numbers import DRAWS
from autoparallel.capture.tracing.functions import function_apply, function_under_vmap
from autoparallel.capture.tracing.functions_of_numbers import NAMES as OF_NUMBERS
from autoparallel.capture.tracing.functions_of_numbers import OF_MATH, OF_NUMPY
from autoparallel.capture.tracing.kinds_of_numbers import names_in_modules
from autoparallel.capture.tracing.numbers_read import NAMES as NUMBERS_READ
from autoparallel.capture.tracing.open_numbers import NAMES as OPEN_NUMBERS
from autoparallel.capture.tracing.packed_sequences import NAMES as PACKED_SEQUENCES
from autoparallel.capture.tracing.positions import packing_of_transformers
from autoparallel.capture.tracing.refused_calls import NAMES as REFUSED_CALLS
from autoparallel.capture.tracing.refused_calls import names_of_triton
from autoparallel.capture.tracing.spans import spans_of_transformers
from autoparallel.capture.tracing.stand_ins import replacement, replacements_of
from autoparallel.capture.tracing.texts import NAMES as TEXTS
from autoparallel.capture.tracing.trace import CURRENT, Trace, listening, refuse
from autoparallel.capture.tracing.transforms import NAMES as TRANSFORMS
from autoparallel.capture.tracing.values_read import NAMES as VALUES_READ
from autoparallel.graph.errors import RAISED, note_raised
from autoparallel.graph.lines import line_of_frame
from autoparallel.graph.python_state import MISSING, is_installed, is_library, is_tracers_file


def _enter_inference_mode(_: Trace, enter: Any, self: torch.inference_mode) -> None:
    self._grad_mode_before = torch.is_grad_enabled()  # type: ignore[attr-defined]
    _torch.autograd.set_grad_enabled(not self.mode)


def _exit_inference_mode(self: torch.inference_mode, *error: Any) -> None:
    before = self.__dict__.pop("_grad_mode_before", None)
    if before is None:
        return _EXIT_INFERENCE(self, *error)
    _torch.autograd.set_grad_enabled(before)
    return None


def _enter_saved_tensors_hooks(trace: Trace, enter: Any, self: Any) -> None:
    if type(self) is _SAVED or not type(self).__module__.startswith("torch."):  # torch's others only save memory
        raise refuse(
            "torch.autograd.graph.saved_tensors_hooks is entered inside of the model",
            "enter it around the call, or write an autograd.Function that saves what its backward needs",
        )
    self._not_entered = True
    if type(self).__module__ == "torch.utils.checkpoint":
        trace.begin_region()


def _exit_saved_tensors_hooks(self: Any, *error: Any) -> None:
    if self.__dict__.pop("_not_entered", False):
        trace = listening()
        if trace is not None and type(self).__module__ == "torch.utils.checkpoint":
            trace.end_region()
        return None
    return _EXIT_SAVED(self, *error)


def _enter_dual_level(_: Trace, enter: Callable[[], Any]) -> Any:
    if _torch.transforms.is_transforming():
        return enter()
    raise refuse(
        "torch.autograd.forward_ad is used inside of the model", "use torch.func.jvp, or write the derivative out"
    )


def _set_replacement(
    trace: Trace, replace: Callable[..., Any], self: _torch.export.ShapeEnv, symbol: Any, size: Any, message: str
) -> Any:
    """Notes at which line a size that was open becomes a number."""
    if size.is_Integer:
        trace.fixed.setdefault(int(size), line_of_frame(sys._getframe(1)))
    _torch.export.bound_size(self, symbol)
    return replace(self, symbol, size, message)


def _convert(original: Callable[..., Any]) -> Callable[..., Any]:
    """What stands for a method that makes a number of a size, or of a value that is read: only a trace cannot."""

    def method(self: _torch.export.SymNode, *place: Any) -> Any:
        frame, trace = sys._getframe(2), listening()  # what asks is int(n) in between
        by_model = not is_tracers_file(frame.f_code.co_filename)
        if by_model and trace is not None and original is _GUARD_FLOAT and self.expr.free_symbols:
            trace.fixed.setdefault(-len(trace.fixed), line_of_frame(frame))
        if trace is not None and original is _INT and (whole := trace.cut(self)) is not None:
            return whole
        try:
            return original(self, *place)
        except _torch.export.OF_TRACES as error:
            if by_model:
                note_raised(error)
            raise

    return method


def _hash(_: Trace, hash_of: Callable[[Any], int], self: torch.SymInt) -> int:
    """That of the number where the model looks something up by it; nobody keeps what stands for it as a key."""
    frame = sys._getframe(2)
    looks_up = dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith(("BINARY", "CONTAINS"))
    return hash(int(self)) if looks_up and not is_installed(frame.f_code.co_filename) else hash_of(self)


def _guard_bool(self: _torch.export.SymNode, file: str, line: int) -> bool:
    trace = CURRENT.value
    if trace is None:
        return bool(_torch.export.GUARD_BOOL(self, file, line))
    answer = trace.compare(self)
    return _torch.export.guard_bool(self, file, line) if answer is None else answer


def _to(_: Trace, to: Any, self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    """Does nothing where nothing is cast; the copy that is traced has no device."""
    dtype = _torch.nn.dtype_of_cast(*args, **kwargs)
    tensors = (*_torch.tensors.parameters_of(self), *self.buffers())
    if dtype is not None and any(x.dtype != dtype for x in tensors if x.is_floating_point() or x.is_complex()):
        raise refuse(
            f"a {type(self).__name__} is cast to {dtype} inside of the model",
            "cast it before compile(), or cast what it is given and gives (self.layer(x.float()).to(x.dtype))",
        )
    return self


def _sync_batch_norm(_: Trace, forward: Any, self: torch.nn.SyncBatchNorm, x: torch.Tensor) -> torch.Tensor:
    """As any batch norm, whose statistics are those of the whole batch; torch's asks for a GPU and for its group."""
    return super(torch.nn.SyncBatchNorm, self).forward(x)


def _call_script(trace: Trace, call: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """TorchScript makes kernels of what has run before, which no tensor without memory can be given."""
    plain: Any = _torch.export.python_of(self)
    if plain is self:
        return call(self, *args, **kwargs)
    trace.script_depth += 1
    try:
        return plain(*args, **kwargs)
    finally:
        trace.script_depth -= 1


def _is_scripting(trace: Trace, ask: Callable[[], bool]) -> bool:
    """What a function of TorchScript is told, which runs as Python."""
    return trace.script_depth > 0


def _validate_device(_: Trace, validate: Any, *tensors: torch.Tensor) -> None:
    """A trace on a CPU may carry gradients, too: the program that comes of it has them on any device.

    Dynamo traces the functions of FlexAttention without running them: here they run once, to be seen reading globals
    and cells.
    """
    call = sys._getframe(2).f_locals
    score, place = torch.zeros(()), [torch.zeros((), dtype=torch.int32) for _ in range(4)]
    functions = (call["score_mod"], [score, *place]), (getattr(call["block_mask"], "mask_mod", None), place)
    for function, arguments in functions:
        if function is None:
            continue
        plain = getattr(function, "fn", function)  # a mask's is wrapped
        held = [cell.cell_contents for cell in getattr(plain, "__closure__", None) or ()]
        modules = [x for x in (getattr(plain, "__self__", None), *held) if isinstance(x, torch.nn.Module)]
        if modules:
            raise refuse(
                f"a function by which FlexAttention scores or masks reads a {type(modules[0]).__name__}, whose changes "
                "torch does not see there,",
                "read its attributes before (window = self.window), and let the function use these",
            )
        with (
            suppress(Exception),
            RAISED.using(None),
            _torch.export.indexing_by_tensors(),
        ):  # Dynamo's error is the one to be told
            function(*arguments)


def _attribute(self: torch.Tensor, name: str) -> Any:
    """An attribute of the user's tensor that what stands for it has not."""
    trace, value = listening(), MISSING
    frame = sys._getframe(1)
    if trace is not None and name[:2] != "__" and not is_library(frame.f_code.co_filename):
        value = trace.attributes.read(self, name, line_of_frame(frame))
    if value is MISSING:
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
    return value


def _answer(trace: Trace, ask: Callable[[], bool]) -> bool:
    """What the plain model would be told, unless it cannot be traced so; torch's own code is told the truth."""
    frame: FrameType | None = sys._getframe(3)
    if frame is not None and ask.__name__ not in frame.f_code.co_names:
        return ask()  # it is called by torch's C++, as TorchScript does
    while frame is not None and frame.f_code.co_name.startswith("is_"):  # such as torch._dynamo's: asks for its caller
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(_torch.export.FOLDER):
        return ask()
    trace.asked_at = trace.asked_at or line_of_frame(frame)
    return trace.as_compiled


def _named_buffers(
    _: Trace,
    named_buffers: Callable[..., Iterator[tuple[str, torch.Tensor]]],
    self: torch.nn.Module,
    prefix: str = "",
    recurse: bool = True,
    remove_duplicate: bool = True,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Those of a module that a model holds under two names once: ``torch.export`` takes them for two that share memory,
    and traces no change of them, such as that of a batch norm. The model itself gets none of its plain tensors, which
    are buffers of its copy."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == torch.nn.modules.module.__file__:  # as of ``buffers()``
        frame = frame.f_back
    if frame is not None and not is_tracers_file(frame.f_code.co_filename):
        modules = self.named_modules(prefix=prefix) if recurse else [(prefix, self)]
        plain = {f"{path}.{name}".lstrip(".") for path, x in modules for name in attributes_among_buffers(vars(x))}
        yield from (x for x in named_buffers(self, prefix, recurse, remove_duplicate) if x[0] not in plain)
    elif remove_duplicate or not recurse:
        yield from named_buffers(self, prefix, recurse, remove_duplicate)
    else:
        for path, module in self.named_modules(prefix=prefix):
            yield from named_buffers(module, path, False, False)


_INT = _torch.export.SymNode.int_
_GUARD_FLOAT = _torch.export.SymNode.guard_float
_SAVED = torch.autograd.graph.saved_tensors_hooks
_EXIT_INFERENCE, _EXIT_SAVED = torch.inference_mode.__exit__, _SAVED.__exit__
_NAMES: tuple[tuple[Any, str, Any], ...] = (
    (_torch.autograd.SingleLevelFunction, "apply", classmethod(function_apply)),
    replacement(torch.autograd.function, "custom_function_call", function_under_vmap),
    replacement(_torch.nn.modules, "BackwardHook", backward_hook),
    (_torch.export.decompositions, "one_layer_lstm", _torch.export.one_layer_lstm),
    (_torch.export.SymNode, "guard_bool", _guard_bool),
    *[
        (_torch.export.SymNode, name, _convert(getattr(_torch.export.SymNode, name)))
        for name in ("int_", "guard_float")
    ],
    replacement(_torch.export.ShapeEnv, "_set_replacement", _set_replacement),
    _torch.export.MODULES_LEFT,
    _torch.export.MODULES_THEMSELVES,
    _torch.export.OPERATORS_LISTED_ONCE,
    _torch.numbers.ALLOWED,
    *replacements_of(torch.compiler.is_compiling, _answer),
    *replacements_of(torch.compiler.is_exporting, _answer),
    *replacements_of(vars(torch.jit)["is_scripting"], _is_scripting),
    *ASKED,
    *DRAWS,
    *NUMBERS_READ,
    *OF_NUMBERS,
    *OPEN_NUMBERS,
    *PACKED_SEQUENCES,
    *REFUSED_CALLS,
    *TEXTS,
    *TRANSFORMS,
    *VALUES_READ,
    replacement(*_torch.export.VALIDATE_DEVICE, _validate_device),
    replacement(torch.nn.Module, "named_buffers", _named_buffers),
    replacement(torch.nn.Module, "to", _to),
    replacement(torch.SymInt, "__hash__", _hash),
    replacement(torch._C.ScriptFunction, "__call__", _call_script),
    (torch.Tensor, "__getattr__", _attribute),
    replacement(torch.nn.SyncBatchNorm, "forward", _sync_batch_norm),
    replacement(torch.inference_mode, "__enter__", _enter_inference_mode),
    (torch.inference_mode, "__exit__", _exit_inference_mode),
    replacement(torch.autograd.forward_ad, "enter_dual_level", _enter_dual_level),
    replacement(_SAVED, "__enter__", _enter_saved_tensors_hooks),
    (_SAVED, "__exit__", _exit_saved_tensors_hooks),
)


_IMPORTED = [
    *OF_MATH.values(),
    *OF_NUMPY.values(),
    *((getattr(owner, name), stand_in) for owner, name, stand_in in DRAWS),
]
"""What modules may have imported from libraries, with what stands for it."""


class _Replacements:
    """How many traces need the replaced names, over all threads, and what stood there before."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.traces = 0
        self.before: list[tuple[Any, str, Any]] = []


_REPLACEMENTS = _Replacements()


@contextmanager
def replaced_names() -> Iterator[None]:
    """Inside, names of torch stand for what leaves a call in a trace, on the threads that trace."""
    with _REPLACEMENTS.lock:
        if not _REPLACEMENTS.traces:
            for owner, name, new in _names():
                before = getattr(owner, name) if isinstance(owner, FunctionType) else vars(owner).get(name, MISSING)
                _REPLACEMENTS.before.append((owner, name, before))
                setattr(owner, name, new)
        _REPLACEMENTS.traces += 1
    try:
        yield
    finally:
        with _REPLACEMENTS.lock:
            _REPLACEMENTS.traces -= 1
            if not _REPLACEMENTS.traces:
                while _REPLACEMENTS.before:
                    _put_back(*_REPLACEMENTS.before.pop())


def _names() -> Iterator[tuple[Any, str, Any]]:
    """The names that are replaced, by what has them, with what stands there."""
    yield from _NAMES
    yield from extremes.names()
    yield from packing_of_transformers()
    yield from spans_of_transformers()
    yield from names_of_triton()
    yield from names_in_modules(_IMPORTED)


def _put_back(owner: Any, name: str, before: Any) -> None:
    if before is MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, before)
