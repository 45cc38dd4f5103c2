"""Architectures of transformers, from configs."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.cases import Batch, Case, token_dictionary

LLAMA: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT2: dict[str, Any] = {
    "vocab_size": 96,
    "n_positions": 32,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
T5: dict[str, Any] = {
    "vocab_size": 96,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
"""Tiny configurations of the families."""


def build_llama(dtype: torch.dtype, mask: bool = False) -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    model: Any = LlamaForCausalLM(LlamaConfig(**LLAMA, attn_implementation="sdpa"))
    model.to(dtype).train()

    def make_batch(step: int, rows: int, seed: int = 0) -> Batch:
        return token_dictionary(step, rows, seed, vocabulary=96, length=12, mask=mask)

    return Case("llama", model, make_batch, None, tolerance=1e-6)


def build_gpt2(dtype: torch.dtype, mask: bool = False) -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    model: Any = GPT2LMHeadModel(GPT2Config(**GPT2, attn_implementation="sdpa"))
    model.to(dtype).train()

    def make_batch(step: int, rows: int, seed: int = 0) -> Batch:
        return token_dictionary(step, rows, seed, vocabulary=96, length=12, mask=mask)

    tied = (("transformer.wte.weight", "lm_head.weight"),)
    return Case("gpt2", model, make_batch, None, tolerance=1e-6, tied=tied)


def build_t5(dtype: torch.dtype) -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    model: Any = T5ForConditionalGeneration(T5Config(**T5))
    model.to(dtype).train()

    def make_batch(step: int, rows: int, seed: int = 0) -> Batch:
        return token_dictionary(step, rows, seed, vocabulary=96, length=12, mask=False)

    tied = (("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"),)
    return Case("t5", model, make_batch, None, tolerance=1e-6, tied=tied, decoder=True)


def build_mixtral(dtype: torch.dtype, experts: str = "batched_mm") -> Case:
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
        "attn_implementation": "sdpa",
        "experts_implementation": experts,
    }
    model: Any = MixtralForCausalLM(MixtralConfig(**options))
    model.to(dtype).train()

    def make_batch(step: int, rows: int, seed: int = 0) -> Batch:
        args, kwargs = token_dictionary(step, rows, seed, vocabulary=96, length=12, mask=False)
        return args, {**kwargs, "output_router_logits": True}

    return Case("mixtral", model, make_batch, None, tolerance=1e-6)


def build_mixtral_grouped(dtype: torch.dtype) -> Case:
    """The same model; torch's grouped product does not take float64 on a CPU, so that only its graph can be run."""
    return build_mixtral(dtype, "grouped_mm")
