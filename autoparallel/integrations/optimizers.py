"""Optimizers that were made before their model was compiled."""

from __future__ import annotations

import torch

from autoparallel.graph.plain_tensors import REPLACED


def hand_over(optimizer: torch.optim.Optimizer) -> None:
    """Replaces the plain parameters that an optimizer holds, where models were compiled after it was made.

    Raises:
        ValueError: where it has stepped.
    """
    for group in optimizer.param_groups:
        plain = [p for p in group["params"] if p in REPLACED]
        if plain and optimizer.state:
            raise ValueError(
                "an optimizer has stepped before its model was compiled: make it anew, or compile before it steps"
            )
        group["params"] = [REPLACED.get(p, p) for p in group["params"]]
