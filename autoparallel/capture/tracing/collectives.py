"""Collectives of ``torch.distributed`` in a model's forward, which a model of one device has none of.

A compiled model is given the global batch, and its program sends what that takes.  What was written for DDP, such as a
contrastive loss that gathers every rank's features, has them all already.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from autoparallel.capture.tracing.trace import refused_function

CURE = (
    "leave it out: the model is given the rows of all ranks, as on one device, so that its means and its features are "
    "those of the whole batch"
)

_FUNCTIONS = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
    "barrier", "broadcast", "broadcast_object_list", "gather", "irecv", "isend", "recv", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "scatter", "send",
)  # fmt: skip


NAMES: tuple[tuple[Any, str, Any], ...] = tuple(
    (dist, name, refused_function(getattr(dist, name), f"the model calls torch.distributed.{name}", CURE))
    for name in (_FUNCTIONS if dist.is_available() else ())
)
