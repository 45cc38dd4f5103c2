"""Spans that speech models of transformers mask in training (SpecAugment), which they draw of numpy's numbers.

A trace would hold one draw for ever: there it is a call, which draws anew at every call of the program.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from autoparallel.capture.tracing.trace import listening
from autoparallel.operators.spans import SPANS, masked_spans


def spans_of_transformers() -> Iterator[tuple[Any, str, Any]]:
    """The functions of the modules that are in use, with what takes their place."""
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.models.") and SPANS in vars(module):
            yield module, SPANS, _drawn_anew(name, vars(module)[SPANS])


def _drawn_anew(module: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def draw(
        shape: tuple[int, int],
        mask_prob: float,
        mask_length: int,
        attention_mask: Tensor | None = None,
        min_masks: int = 0,
    ) -> Any:
        if listening() is None:
            return function(shape, mask_prob, mask_length, attention_mask, min_masks)
        seed = torch.randint(2**31, (1,), device=None if attention_mask is None else attention_mask.device)
        return masked_spans(seed, attention_mask, *shape, float(mask_prob), mask_length, min_masks, module)

    return draw
