"""What happens when an optimizer steps: gradients are whole, clipped where asked for, and of parameters that train."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autoparallel.runtime.clipping import Clipper

_CLIPPERS: weakref.WeakSet[Clipper] = weakref.WeakSet()
_LENT: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[Callable[[], None]]] = weakref.WeakKeyDictionary()
_REPLACED: dict[int, weakref.ref[torch.Tensor]] = {}
_HOOKED = False


def note_replaced(parameters: Sequence[torch.Tensor]) -> None:
    """Remembers plain parameters that compile() has replaced, to recognise an optimizer that holds them."""
    for parameter in parameters:
        key = id(parameter)
        _REPLACED[key] = weakref.ref(parameter, lambda _, key=key: _REPLACED.pop(key, None))  # type: ignore[misc]


def watch_optimizers(clipper: Clipper) -> None:
    """From now on an optimizer that holds the model's parameters finds their gradients reduced when it steps, clipped
    where the model was compiled so, and left out where a clipping decided that."""
    global _HOOKED
    _CLIPPERS.add(clipper)
    if not _HOOKED:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
        _HOOKED = True


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    _after_step(optimizer)  # of a step that raised
    held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    for key, parameter in held.items():
        known = _REPLACED.get(key)
        if known is not None and known() is parameter:
            raise RuntimeError(
                "this optimizer was made before autoparallel.compile() and holds the plain model's parameters, which "
                "are no longer trained: make the optimizer after compile(), from the compiled model's parameters()"
            )
    changed: tuple[Any, Any] | None = None
    for clipper in list(_CLIPPERS):
        store = clipper.store
        if not any(id(p) in held for p in store.parameters.values()):
            continue
        if not store.synchronise:
            raise RuntimeError(
                "optimizer.step() inside no_sync(): gradients are not reduced yet. Leave no_sync() for the last "
                "backward of the window, then step"
            )
        problem = store.assigned()
        if problem is not None:
            raise RuntimeError(problem)
        store.settle()
        store.steps += store.everyone is None  # in a pipeline a rank steps what lies on it
        _count_change(p for p in store.parameters.values() if id(p) in held and p.grad is not None)
        args, kwargs, closure = _with_closure(args, kwargs, clipper)
        if closure:  # its gradients are made, and clipped, inside of the step
            changed = args, kwargs
            continue
        with torch.no_grad():
            if clipper.limits is not None:
                _lend(optimizer, "grad_scale", clipper.clip_for_step(optimizer))
            skipped = clipper.skipped()
            if skipped is not None:
                _leave_out(optimizer, clipper, skipped, held)
    return changed


def _count_change(parameters: Iterable[torch.Tensor]) -> None:
    """Lets a step show in the parameters' versions: the operators over lists that optimizers use do not, on
    ``DTensor``s."""
    for parameter in parameters:
        torch.autograd.graph.increment_version(parameter)


def _with_closure(args: tuple[Any, ...], kwargs: dict[str, Any], clipper: Clipper) -> tuple[Any, Any, bool]:
    """The arguments of ``step``, their closure followed by clipping; and whether there is one."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return args, kwargs, False

    def clipped() -> Any:
        loss = closure()
        with torch.no_grad():
            if clipper.limits is not None:
                clipper.clip_for_step(None)
        return loss

    if len(args) > 1:
        return (args[0], clipped, *args[2:]), kwargs, True
    return args, {**kwargs, "closure": clipped}, True


def _leave_out(
    optimizer: torch.optim.Optimizer, clipper: Clipper, skipped: torch.Tensor, held: Mapping[int, torch.Tensor]
) -> None:
    """See [Note: skipping a step] in ``clipping``."""
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        found = getattr(optimizer, "found_inf", None)
        flag = skipped.to(torch.float32)
        _lend(optimizer, "found_inf", flag if found is None else torch.maximum(found.to(flag), flag))
    elif bool(skipped):
        own = [p for p in clipper.store.parameters.values() if id(p) in held and p.grad is not None]
        grads = [p.grad for p in own]
        for p in own:
            p.grad = None
        _undo(optimizer).append(lambda: _give_back(own, grads))


def _give_back(parameters: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]) -> None:
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad


def _lend(optimizer: torch.optim.Optimizer, name: str, value: torch.Tensor | None) -> None:
    """Sets an attribute for the time of a step."""
    if value is None:
        return
    missing = object()
    before = getattr(optimizer, name, missing)
    setattr(optimizer, name, value)

    def restore() -> None:
        if before is missing:
            delattr(optimizer, name)
        else:
            setattr(optimizer, name, before)

    _undo(optimizer).append(restore)


def _undo(optimizer: torch.optim.Optimizer) -> list[Callable[[], None]]:
    return _LENT.setdefault(optimizer, [])


def _after_step(optimizer: torch.optim.Optimizer, args: Any = (), kwargs: Any = None) -> None:
    for restore in reversed(_LENT.pop(optimizer, [])):
        restore()
