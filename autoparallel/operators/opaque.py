"""Python that the user wrote for the backward, as calls of a program.

An ``autograd.Function``, a tensor's hook and a module's backward hook are no operators: ``torch.export`` shows what
their forward computes, and drops the rest.  So the trace records each as one call of an operator that stands for it
(``autoparallel::call``, ``autoparallel::hook``), and a pass puts in its place a call of the Python itself, which runs
on real tensors: what autograd then differentiates is what it would differentiate without us.

Such a call runs on whole tensors (Invariant) and in no other way, unless a rule for the Function says how it may be
cut: the user's backward need not be linear in the gradient, so it may not be run on summands of one (Replicate).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from autoparallel._torch.export import has_side_effect
from autoparallel._torch.nn import backward_hook_of
from autoparallel._torch.numbers import OPEN
from autoparallel.comm.current import Current

CONSTANTS = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format,
    type(Ellipsis), enum.Enum,
)  # fmt: skip
"""The types of values that cannot change in place, and that a program holds as they are."""


@dataclass(frozen=True)
class Slot:
    """Where an argument holds a value of the trace: a tensor, or a number that depends on sizes."""

    kind: str
    index: int

    def __repr__(self) -> str:
        return f"{self.kind}{self.index}"


class Unsupported(ValueError):
    """An argument that no program can hold."""


class Arguments:
    """Takes the tensors and open sizes out of Python arguments, and leaves a template."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.numbers: list[Any] = []

    def template(self, value: Any) -> Any:
        """The value with a slot for each tensor and open size.

        Raises:
            Unsupported: for an object that a program cannot hold.
        """
        if isinstance(value, Tensor):
            self.tensors.append(value)
            return Slot("tensor", len(self.tensors) - 1)
        if isinstance(value, OPEN):
            self.numbers.append(value)
            return Slot("number", len(self.numbers) - 1)
        if isinstance(value, np.generic):
            return value.item()  # what numpy prints is no literal of a program
        if isinstance(value, CONSTANTS):
            return value
        if isinstance(value, slice):
            return slice(*(self.template(x) for x in (value.start, value.stop, value.step)))
        if isinstance(value, torch.Size):
            return Size(self.template(x) for x in value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self.template(x) for x in value))
        if type(value) in (tuple, list):
            return type(value)(self.template(x) for x in value)
        if type(value) is dict:
            return {key: self.template(x) for key, x in value.items()}
        raise Unsupported(type(value).__name__)


class Size(tuple[Any, ...]):
    """The template of a ``torch.Size``."""


def fill_template(template: Any, value_of: Callable[[Slot], Any], size_of: Callable[[Any], Any] = torch.Size) -> Any:
    """The value that a template is of.

    Args:
        value_of: what stands in a slot.
        size_of: makes a ``torch.Size`` of its numbers.
    """

    def fill(part: Any) -> Any:
        if isinstance(part, Slot):
            return value_of(part)
        if isinstance(part, slice):
            return slice(fill(part.start), fill(part.stop), fill(part.step))
        if isinstance(part, Size):
            return size_of([fill(x) for x in part])
        if isinstance(part, tuple) and hasattr(part, "_fields"):
            return type(part)(*(fill(x) for x in part))
        if isinstance(part, tuple | list):
            return type(part)(fill(x) for x in part)
        if isinstance(part, dict):
            return {key: fill(x) for key, x in part.items()}
        return part

    return fill(template)


# ---------------------------------------------------------------------------------------------- the calls in a trace


class OpaqueCall(Protocol):
    """What stands behind one name in ``autoparallel::call``."""

    aliases: bool

    def fake(self, tensors: Sequence[Tensor], numbers: Sequence[Any]) -> list[Tensor]:
        """The results' shapes."""


_CALLS: Current[Mapping[str, OpaqueCall]] = Current({})


def opaque_calls(calls: Mapping[str, OpaqueCall]) -> AbstractContextManager[Any]:
    """Inside, on this thread, ``autoparallel::call`` knows these."""
    return _CALLS.using(calls)


_LIBRARY = torch.library.Library("autoparallel", "FRAGMENT")
_LIBRARY.define("call(Tensor[] tensors, Scalar[] numbers, str name) -> Tensor[]")
_LIBRARY.define("hook(Tensor tensor, Tensor[] read, Scalar[] numbers, str name) -> ()")
CALL = torch.ops.autoparallel.call.default
HOOK = torch.ops.autoparallel.hook.default


@torch.library.register_fake("autoparallel::call", lib=_LIBRARY)
def _(tensors: Sequence[Tensor], numbers: Sequence[Any], name: str) -> list[Tensor]:
    assert name in _CALLS.value, "autoparallel::call exists while a model is traced only"
    return _CALLS.value[name].fake(tensors, numbers)


@torch.library.register_fake("autoparallel::hook", lib=_LIBRARY)
def _(tensor: Tensor, read: Sequence[Tensor], numbers: Sequence[Any], name: str) -> None:
    return None


has_side_effect(HOOK)


# -------------------------------------------------------------------------------------------- the calls in a program

_FUNCTIONS: dict[tuple[type[torch.autograd.Function], bool], Callable[..., Any]] = {}


def function_operator(cls: type[torch.autograd.Function], is_given_copies: bool = False) -> Callable[..., Any]:
    """The operator that calls an ``autograd.Function``: one for each class, printed under the class's name.

    Args:
        is_given_copies: whether it is given copies of its arguments, as one is that changes them in place: in a program
            they may lie in the memory of others.
    """
    if (cls, is_given_copies) not in _FUNCTIONS:

        def call(*args: Any, **kwargs: Any) -> Any:
            if is_given_copies:
                args, kwargs = pytree.tree_map_only(Tensor, Tensor.clone, (args, kwargs))
            return cls.apply(*args, **kwargs)

        call.__name__ = call.__qualname__ = cls.__name__
        call.__module__ = cls.__module__
        call.function_class = cls  # type: ignore[attr-defined]
        _FUNCTIONS[cls, is_given_copies] = call
    return _FUNCTIONS[cls, is_given_copies]


def function_class(target: Any) -> type[torch.autograd.Function] | None:
    """The ``autograd.Function`` that an operator calls."""
    return getattr(target, "function_class", None)


def has_own_backward(target: Any) -> bool:
    """Whether the operator's backward is Python of the user's, which must see whole gradients."""
    return function_class(target) is not None or runs_hooks(target)


def first_hook(graph: fx.Graph) -> fx.Node | None:
    """The first call of a graph that runs a hook of the model's; None where there is none."""
    return next((node for node in graph.nodes if runs_hooks(node.target)), None)


def runs_hooks(target: Any) -> bool:
    """Whether hooks of the user's are given the gradient that passes the operator."""
    return getattr(target, "runs_hooks", False)


class Hook(Protocol):
    """A tensor's hook, but for the values of the trace that it reads."""

    def build(self, read: Sequence[Any]) -> Callable[[Tensor], Tensor | None]:
        """The hook itself."""


def hooked_operator(hooks: Sequence[Hook]) -> Callable[..., Any]:
    """The operator ``hooked(x, (name, *read), ...)``: ``x``, whose gradient goes through some hooks in their order."""

    def hooked(tensor: Tensor, *reads: tuple[Any, ...]) -> Tensor:
        out = tensor.view_as(tensor)
        if out.requires_grad:
            for hook, (_, *read) in zip(hooks, reads, strict=True):
                out.register_hook(hook.build(read))
        return out

    hooked.__module__ = __name__
    hooked.runs_hooks = True  # type: ignore[attr-defined]
    return hooked


def enter_operator(module: nn.Module) -> Callable[..., Any]:
    """The operator ``enter_module(path, *args)``, through which the gradients of a module's inputs leave it."""

    def enter_module(path: str, *args: Any) -> tuple[Any, ...]:
        hook = backward_hook_of(module)
        return *hook.setup_input_hook(args), hook

    enter_module.__module__ = __name__
    enter_module.runs_hooks = True  # type: ignore[attr-defined]
    return enter_module


def exit_module(hook: Any, *results: Any) -> tuple[Any, ...]:
    """Results of a module, through which their gradients enter it; ``hook`` is what its entry has given."""
    return tuple(hook.setup_output_hook(results))


exit_module.runs_hooks = True  # type: ignore[attr-defined]
