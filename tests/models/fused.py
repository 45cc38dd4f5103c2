"""Attention and gated layers whose projections are one product, in the ways in which people write them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.cases import Batch, Case, seeded

WAYS = ("conv1d", "split", "chunk", "groups", "slices", "unbind", "select")
"""How q, k and v are taken out of one product."""

GATES = ("chunk", "split", "glu")
"""How a gate and what it gates are."""


@dataclass(frozen=True)
class FusedConfig:
    width: int = 16
    heads: int = 4
    keys: int = 2  # heads of k and v, where queries are grouped
    hidden: int = 12


class FusedAttention(nn.Module):
    """Causal attention on one product: GPT-2's addmm, nanoGPT's split, grouped queries, ViT's dim of three."""

    def __init__(self, config: FusedConfig, way: str) -> None:
        super().__init__()
        self.way, self.heads, self.size = way, config.heads, config.width // config.heads
        self.keys = config.keys if way in ("groups", "slices") else config.heads
        width = config.width + 2 * self.keys * self.size
        if way == "conv1d":
            self.weight = nn.Parameter(torch.empty(config.width, width).normal_(std=0.2))
            self.bias = nn.Parameter(torch.empty(width).normal_(std=0.2))
        else:
            self.qkv = nn.Linear(config.width, width, bias=way != "unbind")
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.pieces(x)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.keys != self.heads)
        return self.out(y.transpose(1, 2).reshape(rows, length, width))

    def pieces(self, x: Tensor) -> tuple[Tensor, ...]:
        rows, length, width = x.shape
        if self.way == "conv1d":
            joined = torch.addmm(self.bias, x.view(-1, width), self.weight).view(rows, length, -1)
        else:
            joined = self.qkv(x)
        if self.way in ("unbind", "select"):
            joined = joined.reshape(rows, length, 3, self.heads, self.size)
            if self.way == "unbind":
                return joined.permute(2, 0, 3, 1, 4).unbind(0)
            return tuple(joined[:, :, i].transpose(1, 2) for i in range(3))
        if self.way == "slices":
            ends = width, width + self.keys * self.size
            parts: tuple[Tensor, ...] = joined[..., : ends[0]], joined[..., ends[0] : ends[1]], joined[..., ends[1] :]
        elif self.way == "groups":
            parts = joined.split([width, self.keys * self.size, self.keys * self.size], dim=-1)
        elif self.way == "chunk":
            parts = joined.chunk(3, dim=-1)
        else:
            parts = joined.split(width, dim=2)
        return tuple(part.view(rows, length, -1, self.size).transpose(1, 2) for part in parts)


class GatedMLP(nn.Module):
    """SwiGLU, or torch's gated linear unit, with gate and up in one linear."""

    def __init__(self, config: FusedConfig, gate: str) -> None:
        super().__init__()
        self.gate, self.hidden = gate, config.hidden
        self.up = nn.Linear(config.width, 2 * config.hidden, bias=gate == "glu")
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        joined = self.up(x)
        if self.gate == "glu":
            return self.down(F.glu(joined, -1))
        gate, up = joined.chunk(2, dim=-1) if self.gate == "chunk" else joined.split(self.hidden, dim=-1)
        return self.down(F.silu(gate) * up)


class FusedBlock(nn.Module):
    def __init__(self, config: FusedConfig, way: str, gate: str) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.attention, self.mlp = FusedAttention(config, way), GatedMLP(config, gate)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class FusedModel(nn.Module):
    """One block for each way of writing."""

    def __init__(self, config: FusedConfig | None = None, ways: tuple[str, ...] = WAYS) -> None:
        super().__init__()
        config = config or FusedConfig()
        self.blocks = nn.ModuleList(FusedBlock(config, way, GATES[i % 3]) for i, way in enumerate(ways))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def build_fused(dtype: torch.dtype, config: FusedConfig | None = None) -> Case:
    model = FusedModel(config).to(dtype)

    def make_batch(step: int, rows: int, seed: int = 0) -> Batch:
        generator = seeded(step, seed)
        x, y = torch.randn(2, rows, 4, config.width if config else 16, generator=generator, dtype=torch.float64)
        return (x.to(dtype), 3 * y.to(dtype)), {}

    return Case("fused", model, make_batch, F.mse_loss)


def build_fused_odd(dtype: torch.dtype) -> Case:
    """Heads and rows that no mesh divides."""
    return build_fused(dtype, FusedConfig(width=12, heads=3, keys=1, hidden=5))
