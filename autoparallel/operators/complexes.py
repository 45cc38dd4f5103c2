"""Complex numbers whose parts a rank may hold with other strides than the traced model had."""

from __future__ import annotations

import torch
from torch import Tensor


def pairs_as_complex(pairs: Tensor) -> Tensor:
    """``torch.view_as_complex`` of pairs with any strides; a redistribution keeps shapes, not strides.

    Args:
        pairs: real numbers of shape [..., 2].
    """
    return torch.view_as_complex(pairs.contiguous())
