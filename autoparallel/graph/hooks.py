"""Hooks: which are registered with a model, and a tensor's hook as something that a program can call.

A tensor's hook that forward registers is most often a function made there and then, with a closure over what the trace
runs on: fake tensors, and modules of the traced copy.  A program needs the same function over the values of the call
that runs, and over the user's own modules.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoparallel._torch.nn import is_tracker, modules
from autoparallel.graph.errors import CaptureError
from autoparallel.graph.python_state import Same
from autoparallel.operators.opaque import Arguments, Unsupported, fill_template

_OF_A_MODULE = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_GLOBAL = tuple(f"_global{name}" for name in _OF_A_MODULE)


def hooks_of(submodules: Iterable[nn.Module]) -> Hashable:
    """Which hooks a call of these modules would run; equal as long as none is added, removed or replaced."""
    registered: list[Hashable] = []
    for i, module in enumerate(submodules):
        before = module._forward_pre_hooks
        theirs = before and (len(before) > 1 or next(iter(before.values())) is not refuse_direct_call)
        if theirs or module._forward_hooks or module._backward_hooks or module._backward_pre_hooks:
            registered += [(i, name, *_hooks(getattr(module, name))) for name in _OF_A_MODULE if getattr(module, name)]
    for name in _GLOBAL:
        if table := {key: hook for key, hook in getattr(modules, name).items() if not is_tracker(hook)}:
            registered.append((name, *_hooks(table)))
    return tuple(registered)


def _hooks(table: dict[int, Any]) -> Iterator[Hashable]:
    return map(_Registered, table.values())


class _Registered(Same):
    """A hook, written the same on every rank."""

    def __repr__(self) -> str:
        return str(getattr(self.value, "__qualname__", type(self.value).__name__))


def refuse_direct_call(module: nn.Module, args: object) -> None:
    """A hook before the forward of the plain module and of those in it that have parameters: once these lie over the
    mesh, only the compiled model can be called.

    Raises:
        RuntimeError: where they do.
    """
    if isinstance(next(iter(module.parameters()), None), DTensor):
        raise RuntimeError(
            f"{type(module).__name__} is called directly, but its parameters lie over the mesh: only the compiled "
            "model itself can be called\nWhat to change: call it inside of `with model.whole() as plain:`, on every "
            "rank, which gathers the parameters for a while; or give compile() the name of the method that calls it: "
            'of one that is trained as in forward_methods=("encode",), of one that runs on full parameters as in '
            'methods=("generate",)'
        )


def guard_direct_calls(model: nn.Module) -> None:
    """Registers :func:`refuse_direct_call` where it is not yet."""
    for module in model.modules():
        if (module is model or module._parameters) and refuse_direct_call not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(refuse_direct_call)


def require_full_hooks(model: nn.Module) -> None:
    """Refuses backward hooks of the old kind.

    Raises:
        CaptureError: where a module, or all of them, have one.
    """
    cure = "What to change: use register_full_backward_hook, whose gradients are those of all inputs and outputs."
    for path, module in model.named_modules():
        if module._backward_hooks and not module._is_full_backward_hook:
            raise CaptureError(
                f"{path or type(model).__name__} has a hook of register_backward_hook, which sees gradients of some "
                f"operator inside of the module\n{cure}"
            )
    if modules._global_backward_hooks and not modules._global_is_full_backward_hook:
        raise CaptureError(f"torch has a backward hook for all modules that is not a full one\n{cure}")


# ----------------------------------------------------------------------------------------------- hooks of tensors


@dataclass(frozen=True, eq=False)
class _Function:
    """A Python function, its closure and defaults with slots for values of the trace."""

    function: types.FunctionType
    cells: tuple[Any, ...]
    defaults: Any
    keyword_defaults: Any

    def _key(self) -> Hashable:
        return self.function.__code__, id(self.function.__globals__), repr(self.parts())

    def parts(self) -> Any:
        return self.cells, self.defaults, self.keyword_defaults

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Function) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"{self.function.__code__.co_name}@{id(self.function.__code__)}{self.parts()}"


class _Object(Same):
    """Something that a hook holds as it is: a module of the user's, a list that outlives the call."""

    def __repr__(self) -> str:
        return f"object{id(self.value)}"


@dataclass(frozen=True)
class _Bound:
    """A method of something."""

    owner: Any
    name: str


@dataclass(frozen=True)
class _Partial:
    function: Any
    args: Any
    kwargs: Any


@dataclass(frozen=True)
class HookTemplate:
    """A tensor's hook, but for the values of the trace that it reads.

    Attributes:
        name: what a program prints for it, the same on every rank.
        template: the hook, with slots.
        tensors: how many of the values that it reads are tensors; they come first.
    """

    name: str
    template: Any
    tensors: int

    def build(self, read: Sequence[Any]) -> Callable[[Tensor], Tensor | None]:
        """The hook over the values of one call."""

        def value_of(slot: Any) -> Any:
            return read[slot.index + (self.tensors if slot.kind == "number" else 0)]

        hook: Callable[[Tensor], Tensor | None] = _build(self.template, value_of)
        return hook


def _build(part: Any, value_of: Callable[[Any], Any]) -> Any:
    if isinstance(part, _Object):
        return part.value
    if isinstance(part, _Bound):
        return getattr(_build(part.owner, value_of), part.name)
    if isinstance(part, _Partial):
        function, args, kwargs = (_build(x, value_of) for x in (part.function, part.args, part.kwargs))
        return functools.partial(function, *args, **kwargs)
    if isinstance(part, _Function):
        copy = types.FunctionType(
            part.function.__code__,
            part.function.__globals__,
            part.function.__name__,
            tuple(_build(x, value_of) for x in part.defaults) if part.defaults is not None else None,
            tuple(types.CellType(_build(x, value_of)) for x in part.cells),
        )
        named = part.keyword_defaults
        copy.__kwdefaults__ = named and {k: _build(x, value_of) for k, x in named.items()}
        return copy
    return fill_template(part, value_of)


def make_template(hook: Any, original: Callable[[Any], Any]) -> tuple[HookTemplate, Arguments]:
    """A hook that is registered in a trace, and the values of the trace that it reads.

    Args:
        original: what the user has for an object of the traced copy.

    Raises:
        Unsupported: for a hook over something that a program cannot hold.
    """
    read = Arguments()
    template = _Maker(read, original).template(hook)
    name = getattr(hook, "__qualname__", type(hook).__name__)
    return HookTemplate(f"{getattr(hook, '__module__', '')}.{name}", template, len(read.tensors)), read


class _Maker:
    def __init__(self, read: Arguments, original: Callable[[Any], Any]) -> None:
        self.read, self.original = read, original
        self.locals = {id(value): value for value in _values_of_forward()}

    def template(self, value: Any) -> Any:
        """A part of a hook with slots for values of the trace."""
        theirs = self.original(value)
        if theirs is not value:
            return _Object(theirs)
        if isinstance(value, types.FunctionType):
            variables = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            cells = [self._cell(name, cell) for name, cell in variables]
            defaults, named = value.__defaults__, value.__kwdefaults__
            return _Function(
                value,
                tuple(cells),
                defaults and tuple(self.template(x) for x in defaults),
                named and {k: self.template(x) for k, x in named.items()},
            )
        if isinstance(value, types.MethodType):
            return _Bound(self.template(value.__self__), value.__name__)
        if isinstance(value, types.BuiltinMethodType) and not isinstance(value.__self__, types.ModuleType | None):
            return _Bound(self.template(value.__self__), value.__name__)
        if isinstance(value, functools.partial):
            return _Partial(self.template(value.func), self.template(value.args), self.template(value.keywords))
        if isinstance(value, Tensor) and not hasattr(value, "fake_mode"):
            return _Object(value)
        whole = type | types.ModuleType | types.BuiltinFunctionType | torch._ops.OpOverloadPacket | nn.Module
        if isinstance(value, whole):
            return _Object(value)
        if isinstance(value, list | dict | set) and id(value) not in self.locals:
            return _Object(value)  # made outside of forward: one for all calls
        try:
            return self.read.template(value)
        except Unsupported:
            if id(value) in self.locals:
                raise Unsupported(f"holds a {type(value).__name__} that forward has made") from None
            return _Object(value)

    def _cell(self, name: str, cell: Any) -> Any:
        try:
            value = cell.cell_contents
        except ValueError:
            raise Unsupported(f"reads the variable {name} before it has a value") from None
        return self.template(value)


def _values_of_forward() -> Iterator[Any]:
    """What the variables of the functions that run between the trace and here hold, but for those of an outer scope."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != "autoparallel.capture.attempt":
        outer = set(frame.f_code.co_freevars)
        yield from [value for name, value in list(frame.f_locals.items()) if name not in outer]
        frame = frame.f_back  # type: ignore[assignment]
