"""Tensors of any shapes and dtypes as one message: their bytes, one behind the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autoparallel import _torch


@dataclass(frozen=True)
class Form:
    """The shape and dtype of a tensor in a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """The size of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def pack(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of some tensors, as one message."""
    return torch.cat([_torch.tensors.as_bytes(v) for v in values])


def unpack(packed: torch.Tensor, forms: Sequence[Form]) -> list[torch.Tensor]:
    """The inverse of :func:`pack`."""
    parts = packed.split([form.bytes for form in forms])
    return [part.clone().view(form.dtype).view(form.shape) for part, form in zip(parts, forms, strict=True)]
