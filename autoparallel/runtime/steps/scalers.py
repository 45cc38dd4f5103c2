"""Gradient scalers over the stages of a pipeline, of which each rank has its own gradients, or none."""

from __future__ import annotations

import weakref

import torch

from autoparallel import _torch
from autoparallel.comm.groups import communicator_of

_AGREEING: weakref.WeakKeyDictionary[torch.amp.GradScaler, set[str]] = weakref.WeakKeyDictionary()
"""Over which groups scalers agree."""


def agree_on_overflows(scaler: torch.amp.GradScaler, group: str, device: torch.device) -> None:
    """Lets a scaler find on every rank what it finds on one, so that all of them skip an optimizer's step or none, and
    scale alike: one all-reduce for each optimizer.  Without a pipeline ``DTensor`` does so by itself.

    Args:
        group: the name of the ranks' group.
        device: this rank's.
    """
    groups = _AGREEING.setdefault(scaler, set())
    if group in groups:
        return
    groups.add(group)

    def agree(overflows: _torch.optim.Overflows) -> _torch.optim.Overflows:
        flags = torch.zeros(2, dtype=torch.float32, device=device)  # an overflow; a gradient
        for overflow in overflows.values():
            flags = torch.maximum(flags, torch.stack([overflow.to(flags), flags.new_ones(())]))
        communicator, axis = communicator_of(group)
        overflow, has_gradients = communicator.all_reduce(flags, axis, "max")()
        return {device: overflow} if has_gradients else {}  # which torch refuses, on every rank

    _torch.optim.on_unscaling(scaler, agree)
