"""Caches of generation: made, handed in and grown in calls of a compiled model as in those of a plain one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autoparallel
from tests.distributed import run_distributed

ROWS, STEPS = 4, 5


def _llama(**options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=64,
            **options,
        )
    )


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            vocab_size=64,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )


def _pair(plain: nn.Module, world: int, plan: Any, **options: Any) -> tuple[Any, Any]:
    """A plain model and its compiled copy; the values that one makes in float32 are the other's, too."""
    torch.manual_seed(0)
    plain = plain.double().eval()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    return plain, autoparallel.compile(copy.deepcopy(plain), mesh, plan=plan, **options).eval()


def _tokens(length: int) -> Tensor:
    return torch.randint(0, 64, (ROWS, length), generator=torch.Generator().manual_seed(length))


def _off(ours: list[Tensor], plain: list[Tensor]) -> float:
    assert [x.shape for x in ours] == [x.shape for x in plain]
    return max(float((a - b).abs().max()) for a, b in zip(ours, plain, strict=True))


@torch.no_grad()
def _decoded(model: Any) -> tuple[Tensor, list[Tensor]]:
    """Tokens of greedy decoding after a prompt, of which some rows are padded; logits and what is cached."""
    mask = torch.ones(ROWS, 6, dtype=torch.int64)
    mask[0, :2] = 0
    out = model(input_ids=_tokens(6), attention_mask=mask, use_cache=True)
    cache, tokens, seen = out.past_key_values, [], [out.logits]
    for _ in range(STEPS):
        tokens.append(out.logits[:, -1:].argmax(-1))
        mask = torch.cat([mask, mask.new_ones(ROWS, 1)], 1)
        out = model(input_ids=tokens[-1], attention_mask=mask, past_key_values=cache, use_cache=True)
        assert out.past_key_values is cache
        seen.append(out.logits)
    assert cache.get_seq_length() == 6 + STEPS
    return torch.cat(tokens, 1), [*seen, *(x for layer in cache.layers for x in (layer.keys, layer.values))]


def _decode(world: int, plan: str) -> dict[str, Any]:
    plain, model = _pair(_llama(), world, plan)
    (tokens, seen), (expected, others) = _decoded(model), _decoded(plain)
    return {"same": torch.equal(tokens, expected), "apart": _off(seen, others), "kinds": len(model._kinds)}


@pytest.mark.parametrize(
    ("world", "plan"),
    [
        (1, "auto"),
        pytest.param(2, "fsdp", marks=pytest.mark.slow),
        pytest.param(2, "tensor_parallel", marks=pytest.mark.slow),
    ],
)
def test_greedy_decoding_with_a_cache(world: int, plan: str) -> None:
    for found in run_distributed(_decode, world, plan, world_size=world):
        assert found["same"] and found["apart"] < 1e-6, found
        # The prompt, the first token, and every other.
        assert found["kinds"] == 3


@torch.no_grad()
def _with_encoder(world: int) -> dict[str, Any]:
    plain, model = _pair(_t5(), world, "fsdp")
    seen: list[list[Tensor]] = []
    for each in (model, plain):
        out = each(input_ids=_tokens(5), decoder_input_ids=torch.zeros(ROWS, 1, dtype=torch.int64), use_cache=True)
        encoded, logits = (out.encoder_last_hidden_state,), [out.logits]
        for _ in range(STEPS):
            token = out.logits[:, -1:].argmax(-1)
            out = each(
                encoder_outputs=encoded, decoder_input_ids=token, past_key_values=out.past_key_values, use_cache=True
            )
            logits.append(out.logits)
        seen.append(logits)
    return {"apart": _off(*seen), "kinds": len(model._kinds), "class": type(out.past_key_values).__name__}


@pytest.mark.slow
def test_decoding_with_an_encoders_cache_that_begins_with_one_token() -> None:
    for found in run_distributed(_with_encoder, 2, world_size=2):
        assert found["apart"] < 1e-6 and found["class"] == "EncoderDecoderCache"
        # The prompt; one token and two, which are sizes that open nothing; and every other.
        assert found["kinds"] == 4, found


@torch.no_grad()
def _handed_in() -> dict[str, Any]:
    """A fresh cache that takes a text in parts, rows in another order, what is taken back, and training."""
    from transformers import DynamicCache

    plain, model = _pair(_llama(), 1, "fsdp")
    seen: list[list[Tensor]] = []
    for each in (model, plain):
        cache, logits = DynamicCache(config=plain.config), []
        for part in _tokens(12).split([5, 4, 3], dim=1):
            out = each(input_ids=part, past_key_values=cache)
            assert out.past_key_values is cache
            logits.append(out.logits)
        logits.append(each(input_ids=_tokens(12)).logits)
        cache.reorder_cache(torch.tensor([2, 0, 3, 1]))
        cache.crop(-3)
        logits.append(each(input_ids=_tokens(2), past_key_values=cache).logits)
        seen.append(logits)
    whole = torch.cat(seen[0][:3], 1)
    assert float((whole - seen[0][3]).abs().max()) < 1e-6
    losses = []
    for each in (model, plain):
        with torch.enable_grad():
            out = each.train()(input_ids=_tokens(6), labels=_tokens(6), use_cache=True)
            out.loss.backward()
        assert out.past_key_values.get_seq_length() == 6
        grads = [p.grad for p in each.parameters()]
        losses.append([out.loss.detach(), *(g.full_tensor() if isinstance(g, DTensor) else g for g in grads)])
    return {"apart": _off(*seen), "training": _off(*losses)}


@pytest.mark.wide
def test_a_cache_that_is_handed_in_becomes_what_the_call_makes_of_it() -> None:
    (found,) = run_distributed(_handed_in, world_size=1)
    assert found["apart"] < 1e-6 and found["training"] < 1e-6


@torch.no_grad()
def _refused() -> dict[str, str]:
    from transformers import MistralConfig, MistralForCausalLM, StaticCache

    sliding = MistralConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, sliding_window=8,
    )  # fmt: skip
    reasons = {}
    _, model = _pair(MistralForCausalLM(sliding), 1, "fsdp")
    with pytest.raises(autoparallel.CaptureError) as caught:
        model(input_ids=_tokens(5), use_cache=True)
    reasons["sliding"] = str(caught.value)
    assert model(input_ids=_tokens(5)).past_key_values is None
    plain, model = _pair(_llama(), 1, "fsdp")
    with pytest.raises(autoparallel.CaptureError) as caught:
        model(input_ids=_tokens(5), past_key_values=StaticCache(config=plain.config, max_cache_len=16))
    reasons["static"] = str(caught.value)
    return reasons


@pytest.mark.wide
def test_other_caches_are_refused() -> None:
    (reasons,) = run_distributed(_refused, world_size=1)
    for reason in reasons.values():
        assert "DynamicCache without sliding windows" in reason


def _in_parts(stages: bool) -> dict[str, Any]:
    """Decoding in a pipeline; training in microbatches, which keep no cache, and say so where it is read."""
    plain, model = _llama(), None
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp" if stages else "dp",))
    if stages:
        model = autoparallel.compile(copy.deepcopy(plain.double().eval()), mesh).eval()
        (tokens, seen), (expected, others) = _decoded(model), _decoded(plain)
        return {"same": torch.equal(tokens, expected), "apart": _off(seen, others)}
    model = autoparallel.compile(plain, mesh, plan="fsdp", microbatches=2)
    out: Any = model(input_ids=_tokens(6), labels=_tokens(6), use_cache=True)
    out.loss.backward()
    with pytest.raises(RuntimeError, match="microbatches keeps outputs beside its loss only"):
        out.past_key_values.layers[0].keys.sum()
    return {"same": True, "apart": 0.0}


@pytest.mark.wide
@pytest.mark.slow_where(lambda stages: stages)
@pytest.mark.parametrize("stages", [True, False], ids=["pipeline", "microbatches"])
def test_caches_of_calls_in_parts(stages: bool) -> None:
    for found in run_distributed(_in_parts, stages, world_size=2):
        assert found["same"] and found["apart"] < 1e-6, found
