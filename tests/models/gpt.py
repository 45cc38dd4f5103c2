"""A GPT with tied embedding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.cases import Batch, Case, ragged_tokens, seeded, token_loss


@dataclass(frozen=True)
class GPTConfig:
    vocabulary: int = 64
    context: int = 16
    width: int = 32
    heads: int = 4
    layers: int = 2
    dropout: float = 0.0


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.q = nn.Linear(config.width, config.width)
        self.k = nn.Linear(config.width, config.width)
        self.v = nn.Linear(config.width, config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (project(x).view(shape).transpose(1, 2) for project in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """A pre-norm GPT whose head is the token embedding. The weight carries both names: `tok.weight`, `head.weight`."""

    def __init__(self, config: GPTConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or GPTConfig()
        self.tok = nn.Embedding(config.vocabulary, config.width)
        self.pos = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.1)
        self.head.weight = self.tok.weight

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tok(tokens) + self.pos(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build_gpt(dtype: torch.dtype, config: GPTConfig | None = None) -> Case:
    config = config or GPTConfig()
    model = GPT(config).to(dtype)

    def make_batch(step: int, rows: int, seed: int = 0) -> Batch:
        generator = seeded(step, seed)
        return ragged_tokens(generator, rows, config.context, config.vocabulary), {}

    return Case("gpt", model, make_batch, token_loss, tied=(("tok.weight", "head.weight"),))


def build_gpt_dropout(dtype: torch.dtype) -> Case:
    return build_gpt(dtype, GPTConfig(dropout=0.1))
