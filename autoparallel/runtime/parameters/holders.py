"""Optimizers that were made of the plain parameters, before ``compile()`` put others in their place.

Scripts that come from ``torch.compile`` or ``DistributedDataParallel`` make the optimizer first, and may load its
state.  It is given the new parameters at once, before anything can reach the model by the old ones: a clipping, or
``zero_grad()``, of parameters that nobody trains would do nothing.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

import torch
from torch import nn

from autoparallel.graph.plain_tensors import REPLACED


def hand_over(parameters: Sequence[nn.Parameter]) -> None:
    """Gives optimizers that hold plain parameters what is in their place, with their states.

    Args:
        parameters: those that have just been replaced, which nobody refers to any more but those who kept them.
    """
    if max(_references(parameters), default=0) > max(_references([object()])):
        for x in gc.get_objects():
            if issubclass(type(x), torch.optim.Optimizer):
                _replace(x)


def _references(objects: Sequence[object]) -> list[int]:
    return [sys.getrefcount(x) for x in objects]


def _replace(optimizer: torch.optim.Optimizer) -> None:
    """Replaces in place, for an optimizer may have a list of its own that is its group's, as LBFGS has.

    Only what the object itself has is looked at: one whose constructor raised has less, and what a wrapper computes is
    another optimizer's.
    """
    held = vars(optimizer)
    for group in held.get("param_groups") or ():
        if any(p in REPLACED for p in group["params"]):
            group["params"][:] = [REPLACED.get(p, p) for p in group["params"]]
    state = held.get("state") or {}
    for p in [p for p in state if p in REPLACED]:
        state[REPLACED[p]] = state.pop(p)
