"""What fake quantisation gives for tensors without data, of which torch runs its kernels on zeros of fixed sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _with_mask(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


def _alike(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def _gradients(gradient: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(map(torch.empty_like, (x, scale, zero_point)))


_KERNELS = {
    "fake_quantize_per_tensor_affine_cachemask": _with_mask,
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": _with_mask,
    "fake_quantize_per_channel_affine_cachemask": _with_mask,
    "_fake_quantize_learnable_per_tensor_affine": _alike,
    "_fake_quantize_learnable_per_channel_affine": _alike,
    "_fake_quantize_learnable_per_tensor_affine_backward": _gradients,
    "_fake_quantize_learnable_per_channel_affine_backward": _gradients,
}
_LIBRARY = torch.library.Library("aten", "IMPL")
for _name, _kernel in _KERNELS.items():
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{_name}", "Meta"):
        _LIBRARY.impl(_name, _kernel, "Meta")
