"""Plain single-device models that tests train.

Nothing here knows about meshes. Each builder returns a `Case`: the model, a maker of batches, and the loss function
(None where the model computes its own loss). Everything follows from seeds, every row of every batch is different,
and numbers of valid targets differ from row to row, so that a mean taken over the wrong rows shows.

    case = build("gpt", dtype=torch.float64)
    args, kwargs = case.make_batch(step=0, rows=8)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fused import FusedConfig, FusedModel

Batch = tuple[tuple[Any, ...], dict[str, Any]]


class MakeBatch(Protocol):
    def __call__(self, step: int, rows: int, seed: int = 0) -> Batch: ...


@dataclass(frozen=True)
class Case:
    """One model with data for it."""

    name: str
    model: nn.Module
    make_batch: MakeBatch  # (step, rows, seed) -> (args, kwargs); the target is the last positional argument
    loss_fn: Callable[..., Tensor] | None  # None: the model itself returns a loss
    tolerance: float = 1e-9  # what float64 parity is held to
    tied: tuple[tuple[str, ...], ...] = ()  # names that are one and the same parameter
    buffers: tuple[str, ...] = field(default=())  # buffers that training changes
    frozen: tuple[str, ...] = field(default=())  # parameters that are not trained
    decoder: bool = False  # whether it has an encoder and a decoder, with tokens for each


def _generator(step: int, seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000_003 * (seed + 1) + step)


# ---------------------------------------------------------------------------------------------------------------- MLP


class MLP(nn.Module):
    """Linear, GELU, layer norm, linear, and a linear without bias at the end."""

    def __init__(self, features: int = 12, hidden: int = 16, outputs: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(features, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.mix = nn.Linear(hidden, hidden)
        self.down = nn.Linear(hidden, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(F.gelu(self.up(x)))
        return self.down(torch.tanh(self.mix(x)))


def _build_mlp(dtype: torch.dtype) -> Case:
    model = MLP().to(dtype)

    def make_batch(step: int, rows: int, seed: int = 0) -> Batch:
        generator = _generator(step, seed)
        x = torch.randn(rows, 12, generator=generator, dtype=torch.float64)
        y = torch.randint(0, 8, (rows,), generator=generator)
        return (x.to(dtype), y), {}

    return Case("mlp", model, make_batch, F.cross_entropy)


class Regressor(nn.Module):
    """Two linears for mean squared error; several outputs per row."""

    def __init__(self, features: int = 8, hidden: int = 12, outputs: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def _build_regressor(dtype: torch.dtype) -> Case:
    model = Regressor().to(dtype)

    def make_batch(step: int, rows: int, seed: int = 0) -> Batch:
        generator = _generator(step, seed)
        x = torch.randn(rows, 8, generator=generator, dtype=torch.float64)
        y = 10 * torch.randn(rows, 4, generator=generator, dtype=torch.float64)
        return (x.to(dtype), y.to(dtype)), {}

    return Case("regressor", model, make_batch, F.mse_loss)


# ---------------------------------------------------------------------------------------------------------- tied GPT


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


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy over all valid tokens of the batch."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def ragged_tokens(generator: torch.Generator, rows: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets; row i keeps a different number of its targets, the last row very few."""
    tokens = torch.randint(0, vocabulary, (rows, length), generator=generator)
    targets = torch.randint(0, vocabulary, (rows, length), generator=generator)
    for row in range(rows):
        keep = max(1, length - (row * length) // max(rows, 1) - row % 2)
        targets[row, keep:] = -100
    return tokens, targets


def _build_gpt(dtype: torch.dtype, config: GPTConfig | None = None) -> Case:
    config = config or GPTConfig()
    model = GPT(config).to(dtype)

    def make_batch(step: int, rows: int, seed: int = 0) -> Batch:
        generator = _generator(step, seed)
        return ragged_tokens(generator, rows, config.context, config.vocabulary), {}

    return Case("gpt", model, make_batch, token_loss, tied=(("tok.weight", "head.weight"),))


def _build_gpt_dropout(dtype: torch.dtype) -> Case:
    return _build_gpt(dtype, GPTConfig(dropout=0.1))


# ------------------------------------------------------------------------------------------------------------- ResNet


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += self.shortcut(x)
        return self.relu(y)


class ResNet18(nn.Module):
    """ResNet-18 with the stem for small images: one 3x3 convolution and no pooling before the blocks."""

    def __init__(self, channels: int = 1, classes: int = 10, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        blocks: list[nn.Module] = []
        inputs = width
        for stage in range(4):
            outputs = width * 2**stage
            for index in range(2):
                blocks.append(BasicBlock(inputs, outputs, stride=2 if stage and not index else 1))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn(self.stem(x)))
        x = self.pool(self.blocks(x))
        return self.fc(torch.flatten(x, 1))


def _build_resnet(dtype: torch.dtype) -> Case:
    model = ResNet18(channels=3, width=8).to(dtype)

    def make_batch(step: int, rows: int, seed: int = 0) -> Batch:
        generator = _generator(step, seed)
        # Rows of different brightness and contrast: statistics of a part of the batch are not those of the whole.
        x = torch.randn(rows, 3, 16, 16, generator=generator, dtype=torch.float64)
        x = x * torch.linspace(0.5, 2.0, rows).view(-1, 1, 1, 1) + torch.linspace(-1, 1, rows).view(-1, 1, 1, 1)
        y = torch.randint(0, 10, (rows,), generator=generator)
        return (x.to(dtype), y), {}

    buffers = tuple(name for name, _ in model.named_buffers())
    return Case("resnet", model, make_batch, F.cross_entropy, buffers=buffers)


# -------------------------------------------------------------------------------------------------------------- U-Net


class UNet(nn.Module):
    """Two steps down, two up, each joined with what was there on the way down."""

    def __init__(self, width: int = 4, classes: int = 3) -> None:
        super().__init__()
        self.enter = nn.Conv2d(2, width, 3, padding=1)
        self.down1 = nn.Conv2d(width, 2 * width, 3, 2, padding=1)
        self.down2 = nn.Conv2d(2 * width, 4 * width, 3, 2, padding=1)
        self.up2 = nn.Conv2d(4 * width + 2 * width, 2 * width, 3, padding=1)
        self.up1 = nn.Conv2d(2 * width + width, width, 3, padding=1)
        self.leave = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        top = F.gelu(self.enter(x))
        middle = F.gelu(self.down1(top))
        x = F.gelu(self.down2(middle))
        x = F.gelu(self.up2(torch.cat([x.repeat_interleave(2, 2).repeat_interleave(2, 3), middle], 1)))
        x = F.gelu(self.up1(torch.cat([x.repeat_interleave(2, 2).repeat_interleave(2, 3), top], 1)))
        return self.leave(x)


def _build_unet(dtype: torch.dtype) -> Case:
    model = UNet().to(dtype)

    def make_batch(step: int, rows: int, seed: int = 0) -> Batch:
        generator = _generator(step, seed)
        x = torch.randn(rows, 2, 8, 8, generator=generator, dtype=torch.float64)
        y = torch.randint(0, 3, (rows, 8, 8), generator=generator)
        y[::2, :3] = -100  # different numbers of valid targets
        return (x.to(dtype), y), {}

    return Case("unet", model, make_batch, F.cross_entropy)


def _build_frozen_tail(dtype: torch.dtype) -> Case:
    """An MLP whose last layers are not trained, but hand gradients on."""
    model = nn.Sequential(
        nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8)
    ).to(dtype)
    for layer in (model[4], model[6]):
        layer.requires_grad_(False)
    names = tuple(name for name, p in model.named_parameters() if not p.requires_grad)
    return Case("frozen_tail", model, _build_mlp(dtype).make_batch, F.cross_entropy, frozen=names)


# ------------------------------------------------------------------------------------------------- mixture of experts


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


def _build_moe(dtype: torch.dtype, config: MoEConfig | None = None) -> Case:
    config = config or MoEConfig()
    model = MoEGPT(config).to(dtype)

    def make_batch(step: int, rows: int, seed: int = 0) -> Batch:
        return _token_dictionary(step, rows, seed, config.vocabulary, config.context, mask=False)

    return Case("moe", model, make_batch, None, tied=(("tok.weight", "head.weight"),))


def _build_moe_switch(dtype: torch.dtype) -> Case:
    """One choice per token, more experts than fit evenly many tokens, no biases."""
    return _build_moe(dtype, MoEConfig(experts=8, choices=1, capacity=1.5, bias=False))


def _build_moe_dropless(dtype: torch.dtype) -> Case:
    return _build_moe(dtype, MoEConfig(bias=False, dropless=True))


# ------------------------------------------------------------------------------------------------------- transformers


def _token_dictionary(step: int, rows: int, seed: int, vocabulary: int, length: int, mask: bool) -> Batch:
    generator = _generator(step, seed)
    tokens, labels = ragged_tokens(generator, rows, length, vocabulary)
    batch: dict[str, Any] = {"input_ids": tokens, "labels": labels}
    if mask:
        batch["attention_mask"] = torch.ones_like(tokens)
    return (), batch


def _build_llama(dtype: torch.dtype, mask: bool = False) -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    options: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "use_cache": False,
        "attn_implementation": "sdpa",
    }
    model: Any = LlamaForCausalLM(LlamaConfig(**options))
    model.to(dtype).train()

    def make_batch(step: int, rows: int, seed: int = 0) -> Batch:
        return _token_dictionary(step, rows, seed, vocabulary=96, length=12, mask=mask)

    return Case("llama", model, make_batch, None, tolerance=1e-6)


def _build_gpt2(dtype: torch.dtype, mask: bool = False) -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    options: dict[str, Any] = {
        "vocab_size": 96,
        "n_positions": 32,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "use_cache": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "attn_implementation": "sdpa",
    }
    model: Any = GPT2LMHeadModel(GPT2Config(**options))
    model.to(dtype).train()

    def make_batch(step: int, rows: int, seed: int = 0) -> Batch:
        return _token_dictionary(step, rows, seed, vocabulary=96, length=12, mask=mask)

    tied = (("transformer.wte.weight", "lm_head.weight"),)
    return Case("gpt2", model, make_batch, None, tolerance=1e-6, tied=tied)


def _build_t5(dtype: torch.dtype) -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    options: dict[str, Any] = {
        "vocab_size": 96,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
        "dropout_rate": 0.0,
        "use_cache": False,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
    }
    model: Any = T5ForConditionalGeneration(T5Config(**options))
    model.to(dtype).train()

    def make_batch(step: int, rows: int, seed: int = 0) -> Batch:
        return _token_dictionary(step, rows, seed, vocabulary=96, length=12, mask=False)

    tied = (("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"),)
    return Case("t5", model, make_batch, None, tolerance=1e-6, tied=tied, decoder=True)


def _build_mixtral(dtype: torch.dtype, experts: str = "batched_mm") -> Case:
    from transformers import MixtralConfig, MixtralForCausalLM

    options: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.1,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.05,
        "use_cache": False,
        "attn_implementation": "sdpa",
        "experts_implementation": experts,
    }
    model: Any = MixtralForCausalLM(MixtralConfig(**options))
    model.to(dtype).train()

    def make_batch(step: int, rows: int, seed: int = 0) -> Batch:
        args, kwargs = _token_dictionary(step, rows, seed, vocabulary=96, length=12, mask=False)
        return args, {**kwargs, "output_router_logits": True}

    return Case("mixtral", model, make_batch, None, tolerance=1e-6)


def _build_mixtral_grouped(dtype: torch.dtype) -> Case:
    """The same model; torch's grouped product does not take float64 on a CPU, so that only its graph can be run."""
    return _build_mixtral(dtype, "grouped_mm")


# -------------------------------------------------------------------------------------------------- fused projections


def _build_fused(dtype: torch.dtype, config: FusedConfig | None = None) -> Case:
    model = FusedModel(config).to(dtype)

    def make_batch(step: int, rows: int, seed: int = 0) -> Batch:
        generator = _generator(step, seed)
        x, y = torch.randn(2, rows, 4, config.width if config else 16, generator=generator, dtype=torch.float64)
        return (x.to(dtype), 3 * y.to(dtype)), {}

    return Case("fused", model, make_batch, F.mse_loss)


def _build_fused_odd(dtype: torch.dtype) -> Case:
    """Heads and rows that no mesh divides."""
    return _build_fused(dtype, FusedConfig(width=12, heads=3, keys=1, hidden=5))


_BUILDERS: dict[str, Callable[[torch.dtype], Case]] = {
    "mlp": _build_mlp,
    "regressor": _build_regressor,
    "gpt": _build_gpt,
    "gpt_dropout": _build_gpt_dropout,
    "resnet": _build_resnet,
    "moe": _build_moe,
    "moe_switch": _build_moe_switch,
    "llama": _build_llama,
    "gpt2": _build_gpt2,
    "moe_dropless": _build_moe_dropless,
    "mixtral": _build_mixtral,
    "mixtral_grouped": _build_mixtral_grouped,
    "unet": _build_unet,
    "frozen_tail": _build_frozen_tail,
    "t5": _build_t5,
    "fused": _build_fused,
    "fused_odd": _build_fused_odd,
}

_OTHERS = ("mixtral_grouped", "unet", "frozen_tail", "t5", "fused", "fused_odd")

NAMES = tuple(name for name in _BUILDERS if name not in _OTHERS)
"""The models that run plainly in float64, and are trained whole and without a pipeline."""


def build(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> Case:
    """The named case, its weights drawn from `seed` alone; the caller's random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _BUILDERS[name](dtype)
