"""What a model is captured for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


@dataclass(frozen=True)
class CaptureSettings:
    """What a model is captured for.

    Attributes:
        least_batch: the smallest batch to trace with.
        batch: the batch size of the actual call.
        loss_fn: called as ``loss_fn(output, target)``; None without a target.
        training: captures in this mode instead of the model's own.
        detach_beside_loss: where the loss is known (see ``capture.functional.outputs``), detaches the other outputs.
        ranks: of the mesh: into at most so many blocks fused projections are interleaved (see
            ``passes.interleave_projections``).
        precision: the dtypes in which parameters are used, inputs come and outputs leave; None leaves them.
        gradients: whether it is called with gradients enabled.
        autocast: the dtype of the autocast that it is called under: each cast becomes an operator of the graph.
        device: the kind on which it is traced (see [Note: devices]).
    """

    least_batch: int
    batch: int
    _: KW_ONLY
    loss_fn: Callable[..., Any] | None = None
    training: bool | None = None
    detach_beside_loss: bool = True
    ranks: int = 1
    precision: MixedPrecisionPolicy | None = None
    gradients: bool = True
    autocast: torch.dtype | None = None
    device: str = "cpu"
