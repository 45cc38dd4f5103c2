"""Hooks that users register on parameters.

[Note: hooks on parameters] A hook must see a parameter's complete gradient, which the autograd engine never has: the
engine hands gradients of one rank's program to the boundary, which adds up and reduces them.  So the engine must not
see these hooks: a parameter's dictionaries of hooks are of a class that keeps them out of the memory of ``dict``, the
only place where the engine looks.  ``Tensor.register_hook``, ``register_post_accumulate_grad_hook`` and the handles
that they return use them like any others, and the store of gradients calls the hooks.  What the loop computes of a
parameter beside the model, such as a penalty, comes to it through the engine alone: so there the engine sees one hook,
the store's, which takes that gradient, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication

from autoparallel import _torch
from autoparallel.runtime.parameters.slices import as_parameter, lay_like

Hook = Callable[[torch.Tensor], Any]

_OF_GRADIENT, _OF_ACCUMULATED = _torch.autograd.HOOKS
"""The two kinds: those that see a gradient before it is added to ``.grad``, and those that follow that."""


class ParameterHooks(dict[int, Hook]):
    """Hooks of one kind on one parameter, out of the engine's sight (see [Note: hooks on parameters]).

    Args:
        hooks: where they are kept: the dictionary that handles given out before know, if there is one.

    Attributes:
        some: whether any parameter has ever had a hook.
        shown: what the engine is to see where there are hooks, and in which dictionary.
    """

    some = False
    shown: tuple[Hook, ParameterHooks] | None = None

    def __init__(self, hooks: MutableMapping[int, Hook] | None = None) -> None:
        super().__init__()
        self._hooks: MutableMapping[int, Hook] = {} if hooks is None else hooks
        ParameterHooks.some = ParameterHooks.some or bool(hooks)

    def __setitem__(self, key: int, hook: Hook) -> None:
        ParameterHooks.some = True
        self._hooks[key] = hook
        self.show()

    def show(self) -> None:
        """Has the engine see one hook of the package's own."""
        if self.shown is not None:
            hook, place = self.shown
            dict.__setitem__(place, 0, hook)

    def hide(self) -> None:
        """Has the engine see nothing."""
        dict.pop(self, 0, None)

    def __getitem__(self, key: int) -> Hook:
        return self._hooks[key]

    def __delitem__(self, key: int) -> None:
        del self._hooks[key]

    def __contains__(self, key: object) -> bool:
        return key in self._hooks

    def __iter__(self) -> Iterator[int]:
        return iter(self._hooks)

    def __len__(self) -> int:
        return len(self._hooks)

    def values(self) -> Any:
        return self._hooks.values()

    def clear(self) -> None:
        self._hooks.clear()


def require_own_hooks(name: str, parameter: torch.Tensor) -> None:
    """Raises for a hook on several tensors at once, which waits for nodes in the graph of the tensors that it was
    registered on: torch would never call it again when another takes a parameter's place."""
    if has_gradient_hooks(parameter) and _torch.autograd.is_in_a_graph(parameter):
        raise RuntimeError(
            f"{name} has a hook and is in a graph, as hooks of several tensors are (register_multi_grad_hook)\n"
            "What to change: register it, or make that graph, after the model's first call or model.prepare(...)."
        )


def move_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Gives a parameter's hooks to the ``DTensor`` that takes its place, out of the engine's sight; it keeps none."""
    for name in _torch.autograd.HOOKS:
        hooks = getattr(source, name, None)
        if not isinstance(hooks, ParameterHooks):
            hooks = ParameterHooks(hooks)
        if source is not target:  # or what is registered on it from now on is called for the other, too
            setattr(source, name, None)
        setattr(target, name, hooks)


def is_compiled(tensor: torch.Tensor) -> TypeGuard[nn.Parameter]:
    """Whether a tensor is a parameter of a compiled model, which keeps hooks out of the engine's sight."""
    return _own_hooks(tensor, _OF_GRADIENT) is not None


def _own_hooks(tensor: torch.Tensor, kind: str) -> ParameterHooks | None:
    """The hooks of one kind on a parameter of a compiled model; None for any other tensor."""
    hooks = getattr(tensor, kind, None)
    return hooks if isinstance(hooks, ParameterHooks) else None


def show_engine(parameter: torch.Tensor, hook: Hook) -> None:
    """Has the engine see a hook on a parameter from when the user registers one (see [Note: hooks on parameters])."""
    place = _own_hooks(parameter, _OF_GRADIENT)
    for hooks in (place, _own_hooks(parameter, _OF_ACCUMULATED)):
        if place is not None and hooks is not None:
            hooks.shown = hook, place
            if hooks:
                hooks.show()


def show_always(parameters: Iterable[torch.Tensor], always: bool) -> None:
    """Has the engine see that hook without the user's, too, or no longer."""
    for parameter in parameters:
        hooks = _own_hooks(parameter, _OF_GRADIENT)
        if hooks is not None and always:
            hooks.show()
        elif hooks is not None and not has_gradient_hooks(parameter) and not has_accumulated_hooks(parameter):
            hooks.hide()


def keep_without_gradient(parameter: torch.Tensor) -> None:
    """Has a parameter that lies on other ranks have no gradient, whatever the loop computes of it here; the engine
    calls this before ``backward()`` returns."""
    hooks = _own_hooks(parameter, _OF_ACCUMULATED)
    if hooks is not None:
        dict.__setitem__(hooks, 0, _drop_gradient)


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


def are_registered() -> bool:
    """Whether parameters may have hooks, which most never have."""
    return ParameterHooks.some


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Whether a parameter has hooks that see its gradient before it is added to ``.grad``."""
    return bool(getattr(parameter, _OF_GRADIENT, None))


def has_accumulated_hooks(parameter: torch.Tensor) -> bool:
    """Whether a parameter has hooks that are called after its ``.grad`` has been added to."""
    return bool(getattr(parameter, _OF_ACCUMULATED, None))


def call_gradient_hooks(name: str, parameter: nn.Parameter, grad: DTensor) -> torch.Tensor:
    """What a parameter's hooks make of its complete gradient: this rank's part, as the parameter lies.

    Raises:
        RuntimeError: for a hook that returns no gradient of the parameter's shape.
    """
    for hook in list(getattr(parameter, _OF_GRADIENT).values()):
        with implicit_replication():
            result = hook(grad)
        if result is not None:
            grad = _like(name, parameter, result, grad, getattr(hook, "__qualname__", repr(hook)))
    return _torch.dtensor.local_of(grad)


def call_accumulated_hooks(parameters: Iterable[nn.Parameter]) -> None:
    """Calls the hooks that follow the accumulation of a gradient."""
    for parameter in parameters:
        for hook in list(getattr(parameter, _OF_ACCUMULATED).values()):
            with implicit_replication():
                hook(parameter)


def _like(name: str, parameter: nn.Parameter, result: Any, grad: DTensor, hook: str) -> DTensor:
    if not isinstance(result, torch.Tensor) or result.shape != parameter.shape:
        form = f"one of shape {tuple(result.shape)}" if isinstance(result, torch.Tensor) else type(result).__name__
        raise RuntimeError(
            f"the hook {hook} on {name} must return None or a gradient of shape {tuple(parameter.shape)}, and returned "
            f"{form}. What to change: a hook sees the whole gradient as a DTensor; return one, or a plain whole tensor"
        )
    if isinstance(result, DTensor) and result.device_mesh != grad.device_mesh:
        raise RuntimeError(f"the hook {hook} on {name} returned a DTensor on another mesh than the gradient's")
    local = _torch.dtensor.local_of(lay_like(result.detach(), grad))
    return as_parameter(local.to(grad.dtype).contiguous(), grad)
