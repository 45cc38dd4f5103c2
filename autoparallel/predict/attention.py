"""Attention on meta tensors, by the kernel that a CPU would take.

``scaled_dot_product_attention`` chooses among its kernels by device, and knows none but the plainest for meta tensors.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autoparallel import _torch

aten = torch.ops.aten


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """``aten.scaled_dot_product_attention`` of meta tensors."""
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    tensors = (q, k, v, attn_mask)
    described = tuple(None if x is None else (x.shape, x.stride(), x.dtype, x.requires_grad) for x in tensors)
    if not _is_fused(described, dropout_p, is_causal, tuple(options.items())):
        return aten.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, **options)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        visible, hidden = (torch.scalar_tensor(x, dtype=q.dtype, device=q.device) for x in (0.0, -torch.inf))
        attn_mask = torch.where(attn_mask, visible, hidden)
    return aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]


class _Watching(TorchDispatchMode):
    """Notes whether the fused kernel runs."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.fused |= func is aten._scaled_dot_product_flash_attention_for_cpu.default
        return func(*args, **(kwargs or {}))


@functools.lru_cache(maxsize=1024)
def _is_fused(described: tuple[Any, ...], dropout: float, causal: bool, options: tuple[tuple[str, Any], ...]) -> bool:
    """Whether a CPU takes its fused kernel, as fake tensors tell."""
    watching = _Watching()
    with _torch.export.without_modes(), _torch.export.make_fake_mode(), watching, torch.no_grad():
        q, k, v, mask = (
            x and torch.empty_strided(*x[:2], dtype=x[2], device="cpu", requires_grad=x[3]) for x in described
        )
        aten.scaled_dot_product_attention(q, k, v, mask, dropout, causal, **dict(options))
    return watching.fused
