"""What a trace sees of a model beside its operators, and what it refuses.

``torch.export`` records operators.  While a model is traced, :func:`everything_seen` makes what else decides about
gradients visible, too: an ``autograd.Function``, a tensor's hook and a module's backward hooks each leave a call that
stands for them (see ``operators.opaque``); inference mode, which no program has, is ``no_grad``; and a call whose
effect on gradients no program can have raises, with line and cure.

Most of it goes through a ``TorchFunctionMode``, which belongs to the thread.  Where torch has no such door, a name of
torch is replaced while any thread traces, by one that does as torch does on all other threads.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autoparallel import _torch
from autoparallel.graph.captured import CaptureError
from autoparallel.graph.hooks import HookTemplate, make_template
from autoparallel.graph.lines import line_of_frame
from autoparallel.operators.opaque import (
    CALL,
    HOOK,
    Arguments,
    OpaqueCall,
    Unsupported,
    fill_template,
    opaque_calls,
)

_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_OURS = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")


class Trace:
    """What one trace has met.

    Args:
        originals: of the objects in the traced copy of the model, by id, what they are copies of.
        paths: of the modules of the copy, by id.

    Attributes:
        calls: what stands behind the names in ``autoparallel::call``.
        hooks: the tensor hooks behind the names in ``autoparallel::hook``.
        listening: whether the model's own Python runs.
    """

    def __init__(self, originals: Mapping[int, Any], paths: Mapping[int, str]) -> None:
        self.originals, self.paths = originals, paths
        self.calls: dict[str, OpaqueCall] = {}
        self.hooks: dict[str, HookTemplate] = {}
        self.listening = True

    def original(self, value: Any) -> Any:
        """What the user has for an object of the traced copy."""
        return self.originals.get(id(value), value)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Inside, Python runs that leaves no trace."""
        before, self.listening = self.listening, False
        try:
            yield
        finally:
            self.listening = before


class _Current(threading.local):
    trace: Trace | None = None


_CURRENT = _Current()


def _listening() -> Trace | None:
    trace = _CURRENT.trace
    return trace if trace is not None and trace.listening else None


@contextmanager
def everything_seen(trace: Trace) -> Iterator[None]:
    """Inside, on this thread, a model's Python leaves calls for what it does to gradients."""
    enabled = torch.is_grad_enabled()
    before, _CURRENT.trace = _CURRENT.trace, trace
    try:
        with _replaced_names(), opaque_calls(trace.calls), _Listener(trace):
            yield
    finally:
        _CURRENT.trace = before
        changed = torch.is_grad_enabled() != enabled
        torch._C._set_grad_enabled(enabled)
    if changed:
        raise CaptureError(
            "the model switches gradients on or off and leaves them so after its call\n"
            "What to change: use torch.set_grad_enabled() as a context (with torch.no_grad(): ...)."
        )


def _refuse(what: str, cure: str) -> CaptureError:
    return CaptureError(f"{what} at {line_of_frame(sys._getframe(1))}\nWhat to change: {cure}.")


# --------------------------------------------------------------------------------------------- autograd.Function


@dataclass(frozen=True)
class FunctionCall:
    """A call of an ``autograd.Function``.

    Attributes:
        cls: the Function.
        template: ``(args, kwargs)``, with slots for tensors and open sizes.
        count: how many results it has.
        tensors: the places of the tensors among them.
        single: whether it returns one tensor, not a tuple.
        aliases: whether a result shares memory with an operand.
    """

    cls: type[torch.autograd.Function]
    template: Any
    count: int
    tensors: tuple[int, ...]
    single: bool
    aliases: bool

    def fake(self, tensors: Sequence[Tensor], numbers: Sequence[Any]) -> list[Tensor]:
        values = {"tensor": tensors, "number": numbers}
        args, kwargs = fill_template(self.template, lambda slot: values[slot.kind][slot.index])
        results = _run_silently(lambda: _apply(self.cls)(*args, **kwargs), tensors)
        return [_fresh(results if self.single else results[i]) for i in self.tensors]


def _apply(cls: type[torch.autograd.Function]) -> Callable[..., Any]:
    """What torch does to apply a Function, past the name that we replace."""
    return super(_torch.SingleLevelFunction, cls).apply  # type: ignore[misc]


def _run_silently(function: Callable[[], Any], tensors: Sequence[Tensor]) -> Any:
    """Runs Python on fake tensors without a trace of it."""
    trace = _CURRENT.trace
    assert trace is not None
    mode = next(m for t in tensors if (m := getattr(t, "fake_mode", None)) is not None)
    with trace.silent(), _torch.without_modes(), torch._C.DisableTorchFunction(), mode:
        return function()


def _fresh(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


class _Watcher(TorchDispatchMode):
    """Notices what a Function reads that it was not given, and which of its operands it changes."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.met = set(map(id, tensors))
        self.memory = {_memory(t) for t in tensors}
        self.held: list[Any] = [*tensors]
        self.foreign = self.changes = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and id(leaf) not in self.met:
                fake = hasattr(leaf, "fake_mode")
                self.foreign |= fake or isinstance(leaf, nn.Parameter) or leaf.requires_grad
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[position] if position < len(args) else (kwargs or {}).get(argument.name)
                written = [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]
                self.changes |= any(_memory(x) in self.memory for x in written)
        out = func(*args, **(kwargs or {}))
        made = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]
        self.met.update(map(id, made))
        self.held += made
        return out


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _apply_function(trace: Trace, cls: type[torch.autograd.Function], args: Any, kwargs: Any) -> Any:
    """Records one call of an ``autograd.Function``."""
    name = f"{cls.__module__}.{cls.__qualname__}"
    taken = Arguments()
    try:
        template = taken.template((args, kwargs))
    except Unsupported as error:
        raise _refuse(
            f"the autograd.Function {name} is given an object of type {error}, which no program holds,",
            "pass tensors, numbers, strings and tuples of them; modules, functions and settings belong on the class",
        ) from None
    top = {id(x) for x in (*args, *kwargs.values())}
    tensors = [x if id(x) in top else x.detach() for x in taken.tensors]  # autograd looks no deeper
    if not any(hasattr(x, "fake_mode") for x in tensors):
        return _apply(cls)(*args, **kwargs)
    copies = [x.detach().requires_grad_(x.requires_grad).clone() for x in tensors]
    values: dict[str, Sequence[Any]] = {"tensor": copies, "number": taken.numbers}
    inner_args, inner_kwargs = fill_template(template, lambda slot: values[slot.kind][slot.index])
    watcher = _Watcher(copies)

    def look() -> Any:
        with watcher:
            return _apply(cls)(*inner_args, **inner_kwargs)

    results = _run_silently(look, copies)
    if watcher.foreign:
        raise _refuse(
            f"the forward of the autograd.Function {name} reads a parameter or an activation that is not among its "
            "arguments, called",
            "pass it to apply() as a tensor",
        )
    if watcher.changes:
        raise _refuse(
            f"the forward of the autograd.Function {name} changes an argument in place, called",
            "return a new tensor (x = x.clone() first)",
        )
    single = isinstance(results, Tensor)
    row = (results,) if single else results
    if not isinstance(row, tuple) or any(not isinstance(x, Tensor) and _holds_values(x) for x in row):
        raise _refuse(
            f"the autograd.Function {name} returns what is neither tensors nor constants, called",
            "return a tensor or a tuple of tensors",
        )
    places = tuple(i for i, x in enumerate(row) if isinstance(x, Tensor))
    aliases = any(_memory(row[i]) in watcher.memory for i in places)
    call = FunctionCall(cls, template, len(row), places, single, aliases)
    key = _register(trace, f"{name}{template[0]}{template[1] or ''} -> {places}{' alias' if aliases else ''}", call)
    made = torch.ops.autoparallel.call(tensors, taken.numbers, key)
    out = list(row)
    for i, value in zip(places, made, strict=True):
        out[i] = value if row[i].requires_grad or not value.requires_grad else value.detach()
    return out[0] if single else tuple(out)


def _holds_values(value: Any) -> bool:
    """Whether a result that is no tensor has something of the trace in it."""
    taken = Arguments()
    try:
        taken.template(value)
    except Unsupported:
        return True
    return bool(taken.tensors or taken.numbers)


def _register(trace: Trace, name: str, call: Any) -> str:
    """The name of a call; equal calls share one, so that layers of them are alike."""
    while trace.calls.setdefault(name, call) != call:
        name += "'"
    return name


def _checkpoint(run: Callable[..., Any], preserve: Any, *args: Any) -> Any:
    """Reentrant checkpointing computes what the function computes; it gives gradients where an argument has one."""
    flows = any(isinstance(x, Tensor) and x.requires_grad for x in args)
    with torch.set_grad_enabled(torch.is_grad_enabled() and flows):
        return run(*args)


def _function_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    trace = _listening()
    if trace is None or torch._C._are_functorch_transforms_active():
        return _apply(cls)(*args, **kwargs)
    if cls is torch.utils.checkpoint.CheckpointFunction:
        return _checkpoint(*args)
    if cls is _torch.NoopSaveInputs:
        return torch.empty(0)  # without a gradient torch.utils.checkpoint just runs the function
    if cls.__module__.startswith("torch._"):
        return _apply(cls)(*args, **kwargs)
    return _apply_function(trace, cls, args, kwargs)


# --------------------------------------------------------------------------------------------------- tensor hooks


class _Handle:
    """What ``register_hook`` returns in a trace."""

    def __init__(self, remove: Callable[[], None]) -> None:
        self.remove = remove

    def __enter__(self) -> _Handle:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def _register_hook(trace: Trace, func: Any, tensor: Tensor, hook: Any) -> Any:
    if not tensor.requires_grad:
        return func(tensor, hook)  # torch's own error
    if _caller().startswith(_TORCH):
        raise _refuse(
            "torch hooks several tensors at once",
            "use Tensor.register_hook on each of them, or a module's backward hook",
        )
    if tensor.is_leaf:
        raise _refuse(
            "a hook is registered on a parameter or an input inside of forward",
            "register it once, outside of the model's forward, or on a tensor that forward computes",
        )
    try:
        template, read = make_template(hook, trace.original)
    except Unsupported as error:
        cure = "give it tensors, numbers and the model's modules"
        raise _refuse(f"a tensor's hook {error}, registered", cure) from None
    name, count = template.name, 0
    while trace.hooks.setdefault(name, template) != template:
        count += 1
        name = f"{template.name}'{count}"
    torch.ops.autoparallel.hook(tensor, [x.detach() for x in read.tensors], read.numbers, name)

    def remove() -> None:
        raise _refuse("a tensor's hook is removed inside of forward", "register it where it is wanted only")

    return _Handle(remove)


def _caller() -> str:
    """The file of the code that called a method of a tensor."""
    skipped = (f"{_TORCH}_tensor.py", f"{_TORCH}overrides.py", f"{_TORCH}_ops.py", _OURS)
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(skipped) or "__torch_function__" in frame.f_code.co_name
    ):
        frame = frame.f_back
    return frame.f_code.co_filename


def _post_accumulate(trace: Trace, func: Any, *args: Any) -> Any:
    raise _refuse("a hook is registered on a parameter inside of forward", "register it once, outside of forward")


def _retain_grad(trace: Trace, func: Any, *args: Any) -> Any:
    raise _refuse(
        "the gradient of a tensor inside of the model is kept (retain_grad)",
        "look at it in a hook: x.register_hook(lambda grad: ...)",
    )


def _grad_fn(trace: Trace, func: Any, tensor: Tensor, *rest: Any) -> Any:
    if _caller().startswith(_TORCH):
        return func(tensor, *rest)
    raise _refuse(
        "the graph of autograd is read (grad_fn), which the program does not have",
        "use Tensor.register_hook on tensors, and tensor.requires_grad to ask whether one carries a gradient",
    )


def _differentiate(trace: Trace, func: Any, *args: Any, **kwargs: Any) -> Any:
    raise _refuse(
        f"{func.__name__}() differentiates inside of the model",
        "write the derivative out, put it into an autograd.Function (whose forward may call torch.autograd.grad under "
        "torch.enable_grad), or differentiate what the model returns",
    )


def _requires_grad(trace: Trace, func: Any, tensor: Tensor, value: bool = True) -> Any:
    module = f"{_TORCH}nn/modules/module.py"
    if tensor.requires_grad == value or _caller().startswith(_TORCH) and _caller() != module:
        return func(tensor, value)
    raise _refuse(
        f"a tensor's requires_grad becomes {value} inside of the model",
        "use x.detach() for what carries none; freeze parameters, and make inputs require gradients, before the call",
    )


_HANDLERS: dict[Any, Callable[..., Any]] = {
    Tensor.register_hook: _register_hook,
    Tensor.register_post_accumulate_grad_hook: _post_accumulate,
    Tensor.retain_grad: _retain_grad,
    vars(torch._C.TensorBase)["grad_fn"].__get__: _grad_fn,
    Tensor.backward: _differentiate,
    vars(torch._C.TensorBase)["requires_grad"].__set__: _requires_grad,
    Tensor.requires_grad_: _requires_grad,
    torch.autograd.grad: _differentiate,
}


class _Listener(TorchFunctionMode):
    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = _HANDLERS.get(func) if self.trace.listening else None
        if handler is None:
            return func(*args, **(kwargs or {}))
        return handler(self.trace, func, *args, **(kwargs or {}))


# ------------------------------------------------------------------------------------------- module backward hooks


@dataclass(frozen=True)
class ModuleEntry:
    """Where a module with backward hooks is entered.

    Attributes:
        module: the user's, not the traced copy.
        path: of the module in the model.
        count: how many inputs it has.
        tensors: the places of those through which gradients flow.
    """

    module: nn.Module
    path: str
    count: int
    tensors: tuple[int, ...]
    aliases: bool = True

    def fake(self, tensors: Sequence[Tensor], numbers: Sequence[Any]) -> list[Tensor]:
        return [_fresh(x) for x in tensors]


@dataclass(frozen=True)
class ModuleExit:
    """Where a module with backward hooks is left; its last operand is what its entry has given."""

    count: int
    tensors: tuple[int, ...]
    aliases: bool = True

    def fake(self, tensors: Sequence[Tensor], numbers: Sequence[Any]) -> list[Tensor]:
        return [_fresh(x) for x in tensors[:-1]]


class _ModuleHooks:
    """Stands for ``torch.utils.hooks.BackwardHook`` while a model is traced."""

    def __init__(self, trace: Trace, module: nn.Module) -> None:
        self.trace, self.module = trace, module
        self.ticket: Tensor | None = None

    def setup_input_hook(self, args: tuple[Any, ...]) -> Any:
        args = tuple(args)
        places = _flowing(args)
        module = self.trace.original(self.module)
        entry = ModuleEntry(module, self.trace.paths.get(id(self.module), type(module).__name__), len(args), places)
        # The ticket stands for what goes from a module's entry to its exit.
        ticket = torch.empty(0)
        name = _register(self.trace, f"{type(module).__name__} {entry.path!r} {len(args)} {places}", entry)
        *made, self.ticket = torch.ops.autoparallel.call([*(args[i] for i in places), ticket], [], name)
        return _with(args, places, made)

    def setup_output_hook(self, result: Any) -> Any:
        row = result if isinstance(result, tuple) else (result,)
        places = _flowing(row)
        assert self.ticket is not None
        name = _register(self.trace, f"exit {len(row)} {places}", ModuleExit(len(row), places))
        made = torch.ops.autoparallel.call([*(row[i] for i in places), self.ticket.detach()], [], name)
        out = _with(row, places, made)
        return out if isinstance(result, tuple) else out[0]


def _flowing(values: Sequence[Any]) -> tuple[int, ...]:
    """The places of all tensors, where a gradient flows through one of them; else nothing happens to them."""
    places = tuple(i for i, x in enumerate(values) if isinstance(x, Tensor))
    return places if torch.is_grad_enabled() and any(values[i].requires_grad for i in places) else ()


def _with(values: tuple[Any, ...], places: Sequence[int], made: Sequence[Tensor]) -> tuple[Any, ...]:
    out = list(values)
    for i, value in zip(places, made, strict=True):
        out[i] = value if values[i].requires_grad or not value.requires_grad else value.detach()
    return tuple(out) if type(values) is tuple else type(values)(*out)


def _backward_hook(module: nn.Module, hooks: Any, pre_hooks: Any) -> Any:
    trace = _listening()
    return _torch.BackwardHook(module, hooks, pre_hooks) if trace is None else _ModuleHooks(trace, module)


# ------------------------------------------------------------------------------------- what has no door but its name


def _enter_inference_mode(self: torch.inference_mode) -> None:
    if _listening() is None:
        return _ENTER_INFERENCE(self)
    self._grad_mode_before = torch.is_grad_enabled()  # type: ignore[attr-defined]
    torch._C._set_grad_enabled(not self.mode)
    return None


def _exit_inference_mode(self: torch.inference_mode, *error: Any) -> None:
    before = self.__dict__.pop("_grad_mode_before", None)
    if before is None:
        return _EXIT_INFERENCE(self, *error)
    torch._C._set_grad_enabled(before)
    return None


def _enter_saved_tensors_hooks(self: Any) -> None:
    if _listening() is None:
        return _ENTER_SAVED(self)
    if type(self) is _SAVED or not type(self).__module__.startswith("torch."):  # torch's others only save memory
        raise _refuse(
            "torch.autograd.graph.saved_tensors_hooks is entered inside of the model",
            "enter it around the call, or write an autograd.Function that saves what its backward needs",
        )
    self._not_entered = True
    return None


def _exit_saved_tensors_hooks(self: Any, *error: Any) -> None:
    if self.__dict__.pop("_not_entered", False):
        return None
    return _EXIT_SAVED(self, *error)


def _enter_dual_level() -> Any:
    if _listening() is None or torch._C._are_functorch_transforms_active():
        return _ENTER_DUAL_LEVEL()
    raise _refuse(
        "torch.autograd.forward_ad is used inside of the model", "use torch.func.jvp, or write the derivative out"
    )


_FORWARD_AD = torch.autograd.forward_ad
_ENTER_DUAL_LEVEL = _FORWARD_AD.enter_dual_level
_SAVED = torch.autograd.graph.saved_tensors_hooks
_ENTER_INFERENCE, _EXIT_INFERENCE = torch.inference_mode.__enter__, torch.inference_mode.__exit__
_ENTER_SAVED, _EXIT_SAVED = _SAVED.__enter__, _SAVED.__exit__
_NAMES: tuple[tuple[Any, str, Any], ...] = (
    (_torch.SingleLevelFunction, "apply", classmethod(_function_apply)),
    (_torch.modules, "BackwardHook", _backward_hook),
    (torch.inference_mode, "__enter__", _enter_inference_mode),
    (torch.inference_mode, "__exit__", _exit_inference_mode),
    (_FORWARD_AD, "enter_dual_level", _enter_dual_level),
    (_SAVED, "__enter__", _enter_saved_tensors_hooks),
    (_SAVED, "__exit__", _exit_saved_tensors_hooks),
)


class _Replacements:
    """How many traces need the replaced names, over all threads."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.traces = 0
        self.stack = ExitStack()


_REPLACEMENTS = _Replacements()
_ABSENT = object()


@contextmanager
def _replaced_names() -> Iterator[None]:
    with _REPLACEMENTS.lock:
        if not _REPLACEMENTS.traces:
            for owner, name, new in _NAMES:
                _REPLACEMENTS.stack.callback(_put_back, owner, name, vars(owner).get(name, _ABSENT))
                setattr(owner, name, new)
        _REPLACEMENTS.traces += 1
    try:
        yield
    finally:
        with _REPLACEMENTS.lock:
            _REPLACEMENTS.traces -= 1
            if not _REPLACEMENTS.traces:
                _REPLACEMENTS.stack.close()


def _put_back(owner: Any, name: str, before: Any) -> None:
    if before is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, before)


__all__ = ["CALL", "HOOK", "FunctionCall", "ModuleEntry", "ModuleExit", "Trace", "everything_seen"]
