"""Spans that speech models of transformers mask in training (SpecAugment), which they draw of numpy's numbers.

A trace would hold one draw for ever: there it is a call, which draws anew at every call of the program.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autoparallel.capture.tracing.stand_ins import replacement
from autoparallel.capture.tracing.trace import Trace
from autoparallel.operators.spans import SPANS, masked_spans


def spans_of_transformers() -> Iterator[tuple[Any, str, Any]]:
    """The functions of the modules that are in use, with what takes their place."""
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.models.") and SPANS in vars(module):
            yield replacement(module, SPANS, partial(_draw_anew, name))


def _draw_anew(
    module: str,
    trace: Trace,
    draw: Any,
    shape: tuple[int, int],
    mask_prob: float,
    mask_length: int,
    attention_mask: Tensor | None = None,
    min_masks: int = 0,
) -> Any:
    seed = torch.randint(2**31, (1,), device=None if attention_mask is None else attention_mask.device)
    return masked_spans(seed, attention_mask, *shape, float(mask_prob), mask_length, min_masks, module)
