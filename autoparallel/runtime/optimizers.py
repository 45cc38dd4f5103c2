"""Optimizers step on whole gradients of the parameters that are trained: found out before they step."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autoparallel.runtime.gradients import GradientStore

_STORES: weakref.WeakSet[GradientStore] = weakref.WeakSet()
_REPLACED: dict[int, weakref.ref[torch.Tensor]] = {}
_HOOKED = False


def note_replaced(parameters: Sequence[torch.Tensor]) -> None:
    """Remembers plain parameters that compile() has replaced, to recognise an optimizer that holds them."""
    for parameter in parameters:
        key = id(parameter)
        _REPLACED[key] = weakref.ref(parameter, lambda _, key=key: _REPLACED.pop(key, None))  # type: ignore[misc]


def watch_optimizers(store: GradientStore) -> None:
    """From now on an optimizer that holds the store's parameters finds their gradients reduced when it steps."""
    global _HOOKED
    _STORES.add(store)
    if not _HOOKED:
        register_optimizer_step_pre_hook(_before_step)
        _HOOKED = True


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    for key, parameter in held.items():
        known = _REPLACED.get(key)
        if known is not None and known() is parameter:
            raise RuntimeError(
                "this optimizer was made before autoparallel.compile() and holds the plain model's parameters, which "
                "are no longer trained: make the optimizer after compile(), from the compiled model's parameters()"
            )
    for store in list(_STORES):
        if any(id(p) in held for p in store.parameters.values()):
            if not store.synchronise:
                raise RuntimeError(
                    "optimizer.step() inside no_sync(): gradients are not reduced yet. Leave no_sync() for the last "
                    "backward of the window, then step"
                )
            store.settle()
