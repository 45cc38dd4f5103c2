"""GPTs with mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.cases import Batch, Case, token_dictionary, token_loss
from tests.models.gpt import Attention, GPTConfig


@dataclass(frozen=True)
class MoEConfig(GPTConfig):
    experts: int = 4
    choices: int = 2  # experts per token
    hidden: int = 48  # of one expert
    capacity: float = 1.0  # places per expert, as a multiple of an even share; at 1.0 some tokens find none
    balance: float = 0.05  # weight of the load-balancing loss
    bias: bool = True
    dropless: bool = False


class Experts(nn.Module):
    """One MLP per expert; weights and biases are stacked along dim 0."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        count, width, hidden = config.experts, config.width, config.hidden
        self.up = nn.Parameter(torch.empty(count, width, hidden))
        self.down = nn.Parameter(torch.empty(count, hidden, width))
        self.up_bias = nn.Parameter(torch.empty(count, hidden)) if config.bias else None
        self.down_bias = nn.Parameter(torch.empty(count, width)) if config.bias else None

    def forward(self, x: Tensor) -> Tensor:
        """``x`` is [experts, tokens, width]."""
        if self.up_bias is None or self.down_bias is None:
            return torch.bmm(F.gelu(torch.bmm(x, self.up)), self.down)
        x = F.gelu(torch.bmm(x, self.up) + self.up_bias.unsqueeze(1))
        return torch.baddbmm(self.down_bias.unsqueeze(1), x, self.down)


class MoE(nn.Module):
    """A layer of experts that take the places of a dispatch tensor (Shazeer et al. 2017; Lepikhin et al. 2020).

    Every sequence gives an expert so many places; first choices come before second ones, then the order of tokens
    decides, and tokens without a place are passed over. Returns the load-balancing loss (Fedus et al. 2021), a product
    of two means over the whole batch.
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(config.width, config.experts, bias=False)
        self.experts = Experts(config)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        config = self.config
        batch, length, width = x.shape
        places = max(1, int(config.capacity * config.choices * length / config.experts))
        probabilities = self.router(x).softmax(-1)
        weights, chosen = probabilities.topk(config.choices, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        choice = F.one_hot(chosen, config.experts)  # [batch, length, choices, experts]
        queue = choice.transpose(1, 2).reshape(batch, config.choices * length, config.experts)
        place = ((queue.cumsum(1) - 1) * queue).sum(-1).view(batch, config.choices, length).transpose(1, 2)
        taken = F.one_hot(place.clamp(max=places - 1), places) * (place < places).unsqueeze(-1)
        choice, taken = choice.to(x.dtype), taken.to(x.dtype)

        dispatch = torch.einsum("bske,bskc->bsec", choice, taken)
        combine = torch.einsum("bsk,bske,bskc->bsec", weights, choice, taken)
        sent = torch.einsum("bsec,bsd->ebcd", dispatch, x)
        made = self.experts(sent.reshape(config.experts, batch * places, width))
        y = torch.einsum("bsec,ebcd->bsd", combine, made.view(config.experts, batch, places, width))

        share = choice[:, :, 0].mean((0, 1))
        return y, config.experts * (share * probabilities.mean((0, 1))).sum()


class DroplessMoE(MoE):
    """The same without a capacity: tokens are sorted by expert, and put back into their order."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        config = self.config
        tokens = x.flatten(0, 1)
        probabilities = self.router(tokens).softmax(-1)
        weights, chosen = probabilities.topk(config.choices, dim=-1)
        ids = chosen.flatten()
        order = ids.argsort()
        sorted_ids = ids[order]
        rows = tokens[order // config.choices]
        hidden = torch.bmm(rows.unsqueeze(1), self.experts.up[sorted_ids]).squeeze(1)
        made = torch.bmm(F.gelu(hidden).unsqueeze(1), self.experts.down[sorted_ids]).squeeze(1)
        made = (made * weights.flatten()[order].unsqueeze(-1))[order.argsort()]
        y = made.view(-1, config.choices, config.width).sum(1).view_as(x)
        share = F.one_hot(ids, config.experts).to(x.dtype).mean(0)
        return y, config.experts * (share * probabilities.mean(0)).sum()


class MoEBlock(nn.Module):
    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.moe = DroplessMoE(config) if config.dropless else MoE(config)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.norm1(x))
        y, balance = self.moe(self.norm2(x))
        return x + y, balance


class MoEGPT(nn.Module):
    """A GPT of blocks with experts, which computes its own loss; its head is its embedding."""

    def __init__(self, config: MoEConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or MoEConfig()
        self.tok = nn.Embedding(config.vocabulary, config.width)
        self.pos = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(MoEBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.3 if "router" in name else 0.1)
        self.head.weight = self.tok.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.tok(input_ids) + self.pos(torch.arange(input_ids.shape[1], device=input_ids.device))
        balance = torch.zeros((), dtype=x.dtype, device=x.device)
        for block in self.blocks:
            x, added = block(x)
            balance = balance + added
        logits = self.head(self.norm(x))
        if labels is None:
            return {"logits": logits}
        return {"loss": token_loss(logits, labels) + self.config.balance * balance, "logits": logits}


def build_moe(dtype: torch.dtype, config: MoEConfig | None = None) -> Case:
    config = config or MoEConfig()
    model = MoEGPT(config).to(dtype)

    def make_batch(step: int, rows: int, seed: int = 0) -> Batch:
        return token_dictionary(step, rows, seed, config.vocabulary, config.context, mask=False)

    return Case("moe", model, make_batch, None, tied=(("tok.weight", "head.weight"),))


def build_moe_switch(dtype: torch.dtype) -> Case:
    """One choice per token, more experts than fit evenly many tokens, no biases."""
    return build_moe(dtype, MoEConfig(experts=8, choices=1, capacity=1.5, bias=False))


def build_moe_dropless(dtype: torch.dtype) -> Case:
    return build_moe(dtype, MoEConfig(bias=False, dropless=True))
