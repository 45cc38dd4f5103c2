"""``bincount()`` with a ``minlength``: as many counts as that.

torch's own has as many as the largest value needs where that is more, so that in a trace nobody knows how many, and
nothing of another size can be computed with them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _bincount(_: Any, function: Any, input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """The counts; a value from ``minlength`` on is an error of the call."""
    is_error = input.ndim != 1 or input.is_floating_point() or weights is not None and weights.requires_grad
    if not minlength or is_error:
        return function(input, weights, minlength)
    if weights is None:
        weights = torch.ones_like(input, dtype=torch.int64)
    elif weights.dtype != torch.float32:
        weights = weights.double()
    return weights.new_zeros(minlength).index_add(0, input.long(), weights)


COUNTING = {torch.bincount: _bincount, Tensor.bincount: _bincount}
