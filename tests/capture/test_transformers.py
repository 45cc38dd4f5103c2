"""Models of transformers as they come: default configurations, and models that are made on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoparallel
from tests.distributed import run_distributed
from tests.models.pretrained import GPT2, LLAMA, T5
from tests.runtime.support import mesh_of

ROWS, LENGTH = 4, 10

_BART: dict[str, Any] = {
    "vocab_size": 96,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}

SMALL: dict[str, dict[str, Any]] = {
    "Llama": LLAMA,
    "Qwen2": LLAMA,
    "Mistral": LLAMA,
    "Gemma2": {**LLAMA, "head_dim": 8},
    "GPT2": {**GPT2, "n_positions": 64},
    "OPT": {
        "vocab_size": 96,
        "hidden_size": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "word_embed_proj_dim": 32,
        "dropout": 0.0,
    },
    "T5": T5,
    "Bart": {**_BART, "max_position_embeddings": 64},
    "Whisper": {**_BART, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32},
    "Llava": {
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 8,
        },
        "text_config": {"model_type": "llama", **LLAMA},
        "image_token_id": 2,
        "vision_feature_layer": -1,
    },
}
HEADS = {"GPT2": "LMHeadModel", "T5": "ForConditionalGeneration", "Bart": "ForConditionalGeneration",
         "Whisper": "ForConditionalGeneration", "Llava": "ForConditionalGeneration"}  # fmt: skip


def build(name: str) -> Any:
    """A tiny model, but for its sizes and dropout of the default configuration."""
    import transformers

    config = getattr(transformers, f"{name}Config")(**SMALL[name])
    assert config.get_text_config().use_cache is True
    return getattr(transformers, f"{name}{HEADS.get(name, 'ForCausalLM')}")(config)


def batch(name: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 96, (ROWS, LENGTH), generator=generator)
    if name == "Whisper":
        features = torch.randn(ROWS, 8, 32, dtype=torch.float64, generator=generator)
        return {"input_features": features, "labels": tokens}
    if name == "Llava":
        tokens[:, 2:6] = 2  # four patches of an image
        images = torch.randn(ROWS, 3, 16, 16, dtype=torch.float64, generator=generator)
        return {"input_ids": tokens, "labels": tokens, "pixel_values": images}
    return {"input_ids": tokens, "labels": tokens}


# -------------------------------------------------------------------------------------------------------------- caches


def _train_and_evaluate(name: str, world: int, plan: str) -> dict[str, Any]:
    torch.manual_seed(0)
    plain, model = build(name).double(), build(name).double()
    model.load_state_dict(plain.state_dict())
    compiled: Any = autoparallel.compile(model, mesh_of(world), plan=plan)
    losses = [m.train()(**batch(name)).loss for m in (compiled, plain)]
    for loss in losses:
        loss.backward()
    grads = [
        (p.grad.full_tensor() - q.grad).abs().max().item()
        for p, q in zip(compiled.parameters(), plain.parameters(), strict=True)
        if q.grad is not None
    ]
    with torch.no_grad():
        outputs = [m.eval()(**batch(name)) for m in (compiled, plain)]
    return {
        "loss": (losses[0] - losses[1]).abs().item(),
        "gradient": max(grads),
        "evaluation": (outputs[0].loss - outputs[1].loss).abs().item(),
        "fields": ["past_key_values" in output for output in outputs],
        "kept": all(m.config.get_text_config().use_cache for m in (plain, compiled)),
    }


@pytest.mark.wide
@pytest.mark.slow_where(lambda name, world: world == 1 or name != "Llama")
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", SMALL)
def test_default_configurations_train_and_evaluate(name: str, world: int) -> None:
    plan = "tensor_parallel" if world == 2 and name in ("Llama", "T5") else "fsdp"
    for results in run_distributed(_train_and_evaluate, name, world, plan, world_size=world):
        assert max(results["loss"], results["gradient"], results["evaluation"]) < 1e-6, results  # some cast to float32
        assert results["fields"] == [False, name != "Bart"] and results["kept"]  # Bart makes none beside labels


class Scorer(nn.Module):
    """A user's model around one of transformers."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.inner, self.whole = build("OPT"), whole

    def forward(self, tokens: Tensor) -> Any:
        outputs = self.inner(tokens, return_dict=False)
        return outputs if self.whole else outputs[0].square().mean() + outputs[1].get_seq_length()


def _around() -> dict[str, Any]:
    tokens = batch("OPT")["input_ids"]
    results: dict[str, Any] = {}
    for whole in (True, False):
        torch.manual_seed(0)
        plain, model = Scorer(whole).double(), Scorer(whole).double()
        model.load_state_dict(plain.state_dict())
        outputs, expected = autoparallel.compile(model, mesh_of(1), plan="fsdp")(tokens), plain(tokens)
        if whole:
            results["outputs"] = len(outputs), len(expected)
            outputs, expected = outputs[0], expected[0]
        results[f"apart {whole}"] = (outputs - expected).abs().max().item()
    compiled: Any = autoparallel.compile(build("OPT"), mesh_of(1), plan="fsdp")
    with torch.no_grad():
        asked = compiled(input_ids=tokens, use_cache=True).past_key_values
        unasked = compiled(input_ids=tokens).past_key_values
    return {**results, "asked": asked.get_seq_length() == tokens.shape[1], "unasked": unasked is None}


@pytest.mark.wide
def test_a_cache_in_a_users_model_and_one_that_is_asked_for() -> None:
    """A cache that the model reads itself is there; one that it returns is left out, unless the call asked for it."""
    (results,) = run_distributed(_around, world_size=1)
    assert results["outputs"] == (1, 2)
    assert results["apart True"] < 1e-6 and results["apart False"] < 1e-6
    assert results["asked"] and results["unasked"]


# -------------------------------------------------------------------------------------------------------------- speech


def _speech(targets: Tensor) -> dict[str, Any]:
    import transformers
    from transformers.models.wav2vec2 import modeling_wav2vec2 as module

    config = transformers.Wav2Vec2Config(
        vocab_size=20, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        conv_dim=(8, 8), conv_stride=(4, 2), conv_kernel=(8, 4), num_feat_extract_layers=2, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, mask_time_prob=0.3, mask_time_length=2, mask_feature_prob=0.2,
        mask_feature_length=4, hidden_dropout=0.0, activation_dropout=0.0, attention_dropout=0.0,
        feat_proj_dropout=0.0, final_dropout=0.0, layerdrop=0.0, ctc_zero_infinity=True, ctc_loss_reduction="mean",
    )  # fmt: skip
    torch.manual_seed(0)
    plain = transformers.Wav2Vec2ForCTC(config).double().train()
    model = transformers.Wav2Vec2ForCTC(config).double().train()
    model.load_state_dict(plain.state_dict())
    draw, drawn = module._compute_mask_indices, list[Any]()

    def note(*args: Any) -> Any:
        drawn.append(draw(*args))
        return drawn[-1]

    waves = torch.randn(ROWS, 160, dtype=torch.float64)
    mask = torch.arange(160) < torch.tensor([[160], [120], [160], [90]])
    inputs = {"input_values": waves, "attention_mask": mask.long(), "labels": targets}
    compiled: Any = autoparallel.compile(model, mesh_of(2), plan="fsdp")
    apart, masks = [], []
    try:
        for _ in range(2):
            drawn.clear()
            module._compute_mask_indices = note
            ours = compiled(**inputs).loss
            ours.backward()
            masks.append([mask.tolist() for mask in drawn])
            taken = iter(drawn)
            module._compute_mask_indices = lambda *_, taken=taken, **__: next(taken)
            theirs = plain(**inputs).loss
            theirs.backward()
            apart.append((ours - theirs).abs().item())
    finally:
        module._compute_mask_indices = draw
    pairs = zip(compiled.parameters(), plain.parameters(), strict=True)
    apart += [(p.grad.full_tensor() - q.grad).abs().max().item() for p, q in pairs if q.grad is not None]
    return {"apart": max(apart), "masks": masks, "kinds": len(compiled._kinds)}


@pytest.mark.wide
def test_speech_is_aligned_to_labels_and_masked_at_random() -> None:
    """What is masked is drawn anew at every call, the same on all ranks."""
    targets = torch.randint(1, 20, (ROWS, 4), generator=torch.Generator().manual_seed(1))
    targets[1, 3] = -100
    one, other = run_distributed(_speech, targets, world_size=2)
    assert max(one["apart"], other["apart"]) < 1e-5  # the losses are made in float32
    assert one["masks"] == other["masks"] and one["masks"][0] != one["masks"][1]
    assert one["kinds"] == 1 and list(map(len, one["masks"])) == [2, 2]


# ---------------------------------------------------------------------------------------------------------------- meta


def _on_meta(name: str, world: int, plan: str) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = build(name)
    compiled: Any = autoparallel.compile(model, mesh_of(world), plan=plan)
    torch.manual_seed(7)
    compiled.prepare(**{k: v.float() if v.is_floating_point() else v for k, v in batch(name).items()})
    tensors = {n: p.full_tensor() for n, p in compiled.named_parameters()}
    return tensors | dict(compiled.named_buffers())


@pytest.mark.wide
@pytest.mark.slow_where(lambda name: name in ("T5", "Whisper"))
@pytest.mark.parametrize("name", ["Llama", "GPT2", "T5", "Whisper"])
def test_a_model_on_the_meta_device_gets_its_own_values(name: str) -> None:
    """They are the same on every rank and mesh, and are spread as those of a model that is made with values."""
    (alone,) = run_distributed(_on_meta, name, 1, "fsdp", world_size=1)
    for tensors in run_distributed(_on_meta, name, 2, "tensor_parallel", world_size=2):
        assert tensors.keys() == alone.keys()
        assert all(torch.equal(tensors[n], alone[n]) for n in alone)
    torch.manual_seed(11)
    plain = build(name)
    for path, tensor in [*plain.named_parameters(), *plain.named_buffers()]:
        if tensor.float().std() == 0 or not tensor.is_floating_point() or "inv_freq" in path:
            assert torch.equal(alone[path], tensor), path
        else:
            assert 0.5 < (alone[path].std() / tensor.std()).item() < 2, path


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(4))


class Partly(nn.Module):
    """Sets its linear, and forgets the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), Bare()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale.factor


def _forgotten(make: Callable[[], nn.Module]) -> tuple[str, bool]:
    with torch.device("meta"):
        model = make()
    compiled = autoparallel.compile(model, mesh_of(1), plan="fsdp")
    with pytest.raises(RuntimeError) as caught:
        compiled.prepare(torch.ones(2, 4))
    return str(caught.value), all(p.is_meta for p in model.scale.parameters())  # type: ignore[union-attr, operator]


def test_a_tensor_that_nobody_sets_is_named() -> None:
    ((message, is_meta),) = run_distributed(_forgotten, Partly, world_size=1)
    assert "scale (Bare)" in message and "(factor)" in message and "_init_weights() of Partly" in message and is_meta
