"""Spans of sequences that are masked at random, as speech models of transformers draw them of numpy's numbers.

The model's own function runs at every call, from a seed that is one of the call's random numbers, the same on all
ranks.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

SPANS = "_compute_mask_indices"
"""The function of a module of transformers that draws them."""


@torch.library.custom_op("autoparallel::masked_spans", mutates_args=())
def _masked_spans(
    seed: Tensor, mask: Tensor | None, rows: int, steps: int, share: float, span: int, least: int, module: str
) -> Tensor:
    function, before = getattr(importlib.import_module(module), SPANS), np.random.get_state()
    np.random.seed(int(seed))
    try:
        return torch.from_numpy(function((rows, steps), share, span, mask, least)).to(seed.device, torch.bool)
    finally:
        np.random.set_state(before)


@_masked_spans.register_fake
def _(
    seed: Tensor, mask: Tensor | None, rows: int, steps: int, share: float, span: int, least: int, module: str
) -> Tensor:
    return seed.new_empty((rows, steps), dtype=torch.bool)


masked_spans: Any = torch.ops.autoparallel.masked_spans.default
"""Where ``rows`` of so many ``steps`` are masked: a ``share`` of each, of what ``mask`` leaves, in spans of one length,
at ``least`` so many."""
