"""Optimizers of compiled models: whether one holds all that is trained, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from autoparallel import _torch
from autoparallel.runtime.module import ParallelModule
from autoparallel.runtime.norms.norm import clip_coefficient


def holds_all(parameters: Iterable[Tensor], model: nn.Module) -> bool:
    """Whether parameters are a model's, and all that it trains are among them."""
    ids = {id(p) for p in parameters}
    trainable = {id(p): p.requires_grad for p in model.parameters()}
    return ids <= trainable.keys() and ids >= {key for key, trained in trainable.items() if trained}


def require_all(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raises ValueError where an optimizer's gradients are not all of a model's, which are clipped together."""
    if not holds_all((p for group in optimizer.param_groups for p in group["params"]), model):
        raise ValueError(
            "the optimizer does not hold the parameters that one model trains, all of them, whose gradients would be "
            "clipped: clip by names, model.clip_grad_norm_({'encoder.*': 1.0}), or by the optimizer's groups, "
            "model.clip_grad_norm_(optimizer) with a 'max_norm' in each"
        )


def holders(parameters: Iterable[Tensor], models: Sequence[ParallelModule]) -> list[ParallelModule]:
    """The models that parameters are of.

    Raises:
        ValueError: where they are not all that each of these models trains.
    """
    by_id = {id(p): p for p in parameters}
    models = [model for model in models if any(id(p) in by_id for p in model.parameters())]
    held = {id(p) for model in models for p in model.parameters()}
    if not by_id.keys() <= held or not all(
        holds_all((p for p in model.parameters() if id(p) in by_id), model) for model in models
    ):
        raise ValueError(
            "the optimizer holds some of a compiled module's parameters, and its gradients are clipped together: give "
            "the optimizer all of them, or clip by names in configure_gradient_clipping(), with "
            "self.net.clip_grad_norm_({'encoder.*': 1.0})"
        )
    return models


def clip_together(models: Sequence[ParallelModule], max_norm: float) -> Tensor:
    """Scales the gradients of models so that the norm of all of them is at most ``max_norm``.

    Returns:
        The norm before, a scalar on the device.
    """
    if len(models) == 1:
        return models[0].clip_grad_norm_(max_norm)
    norm = torch.stack([model.grad_norm() for model in models]).norm()
    coefficient = clip_coefficient(norm, max_norm)
    for model in models:
        for p in model.parameters():
            if p.grad is not None:
                _torch.dtensor.local_of(p.grad).mul_(coefficient)
    return norm
