"""Architectures that ``benchmarks.models`` tries: of transformers, from tiny configs, and in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

ROWS, LENGTH, VOCABULARY, CLASSES = 8, 12, 96, 4
PIXELS = 32


@dataclass(frozen=True)
class Made:
    """A model and one batch.

    Attributes:
        args, kwargs: of a call; the target last of ``args`` where there is a ``loss_fn``.
    """

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss_fn: Callable[..., Any] | None = None


# ------------------------------------------------------------------------------------------------------------- inputs


def tokens(length: int = LENGTH, vocabulary: int = VOCABULARY) -> Tensor:
    """Token ids, none of them one of the usual special ones."""
    return torch.randint(4, vocabulary, (ROWS, length))


def classes() -> Tensor:
    """A class for each row."""
    return torch.randint(CLASSES, (ROWS,))


def images(pixels: int = PIXELS, channels: int = 3) -> Tensor:
    """Pixels ``[rows, channels, pixels, pixels]``."""
    return torch.randn(ROWS, channels, pixels, pixels)


def causal() -> dict[str, Any]:
    ids = tokens()
    return {"input_ids": ids, "labels": ids}


def masked() -> dict[str, Any]:
    ids, labels = tokens(), tokens()
    mask = torch.ones_like(ids)
    for row in range(ROWS):
        labels[row, : row % 5 + 2] = -100
        mask[row, LENGTH - row % 4 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def sequence_class() -> dict[str, Any]:
    return {"input_ids": tokens(), "labels": classes()}


def image_class() -> dict[str, Any]:
    return {"pixel_values": images(), "labels": classes()}


def translation() -> dict[str, Any]:
    return {"input_ids": tokens(), "labels": tokens(8)}


# ------------------------------------------------------------------------------------------------------- transformers

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "num_labels": CLASSES,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
"""What every config is given; those that do not know a name keep it as an attribute."""

WITHOUT_DROPOUT = (
    "attn_pdrop", "embd_pdrop", "resid_pdrop", "attention_dropout", "hidden_dropout", "dropout", "dropout_rate",
    "activation_dropout", "attention_probs_dropout_prob", "hidden_dropout_prob", "classifier_dropout",
    "summary_first_dropout", "embedding_dropout", "ffn_dropout", "layerdrop", "encoder_layerdrop", "decoder_layerdrop",
    "drop_path_rate", "classifier_dropout_prob", "embd_dropout", "seq_classif_dropout", "qa_dropout",
)  # fmt: skip

ENCODER_DECODER: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "decoder_start_token_id": 0,
}  # fmt: skip


def pretrained(architecture: str, inputs: Callable[[], dict[str, Any]], **options: Any) -> Made:
    """An architecture of transformers, by the name of its class, with the names of its config's options."""
    cls = getattr(transformers, architecture)
    settings = {**SMALL, **options}
    config = cls.config_class(**settings)
    for name in WITHOUT_DROPOUT:
        if isinstance(getattr(config, name, None), float):
            setattr(config, name, 0.0)
    return Made(cls(config), (), inputs())


HUB: dict[str, Callable[[], Made]] = {
    "GPT-2": partial(pretrained, "GPT2LMHeadModel", causal),
    "Llama": partial(pretrained, "LlamaForCausalLM", masked, num_key_value_heads=2),
    "Mistral": partial(pretrained, "MistralForCausalLM", masked, num_key_value_heads=2, sliding_window=8),
    "Mixtral": partial(
        pretrained, "MixtralForCausalLM", causal, num_key_value_heads=2, num_local_experts=4,
        experts_implementation="batched_mm",
    ),
    "Qwen2": partial(pretrained, "Qwen2ForCausalLM", masked, num_key_value_heads=2),
    "Qwen3": partial(pretrained, "Qwen3ForCausalLM", masked, num_key_value_heads=2, head_dim=8),
    "Gemma": partial(pretrained, "GemmaForCausalLM", masked, num_key_value_heads=1, head_dim=8),
    "Gemma 2": partial(pretrained, "Gemma2ForCausalLM", masked, num_key_value_heads=2, head_dim=8, sliding_window=8),
    "Phi": partial(pretrained, "PhiForCausalLM", masked),
    "Phi-3": partial(pretrained, "Phi3ForCausalLM", masked, num_key_value_heads=2),
    "OPT": partial(pretrained, "OPTForCausalLM", masked, ffn_dim=64, word_embed_proj_dim=32),
    "BLOOM": partial(pretrained, "BloomForCausalLM", masked),
    "GPT-NeoX": partial(pretrained, "GPTNeoXForCausalLM", masked),
    "GPT-J": partial(pretrained, "GPTJForCausalLM", masked, rotary_dim=4),
    "Falcon": partial(pretrained, "FalconForCausalLM", masked),
    "Mamba": partial(pretrained, "MambaForCausalLM", causal, state_size=4),
    "RWKV": partial(pretrained, "RwkvForCausalLM", causal, num_hidden_layers=2, attention_hidden_size=32),
    "RecurrentGemma": partial(
        pretrained, "RecurrentGemmaForCausalLM", causal, num_hidden_layers=3, num_key_value_heads=1, lru_width=32,
        attention_window_size=8,
    ),
    "DeepSeek-V3": partial(
        pretrained, "DeepseekV3ForCausalLM", causal, num_key_value_heads=4, n_routed_experts=4, n_group=2,
        topk_group=1, num_experts_per_tok=2, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4,
        v_head_dim=8, moe_intermediate_size=16, first_k_dense_replace=1, experts_implementation="batched_mm",
    ),
    "BERT": partial(pretrained, "BertForMaskedLM", masked),
    "RoBERTa": partial(pretrained, "RobertaForMaskedLM", masked),
    "ALBERT": partial(pretrained, "AlbertForMaskedLM", masked, embedding_size=16),
    "ELECTRA": partial(pretrained, "ElectraForMaskedLM", masked, embedding_size=16),
    "DistilBERT": partial(pretrained, "DistilBertForSequenceClassification", sequence_class, dim=32, n_layers=1,
                          n_heads=4, hidden_dim=64),
    "DeBERTa-v2": partial(pretrained, "DebertaV2ForMaskedLM", masked, relative_attention=True,
                          pos_att_type=["p2c", "c2p"]),
    "T5": partial(pretrained, "T5ForConditionalGeneration", translation, d_model=32, d_kv=8, d_ff=64, num_layers=1,
                  num_heads=4, decoder_start_token_id=0),
    "BART": partial(pretrained, "BartForConditionalGeneration", translation, **ENCODER_DECODER),
    "ViT": partial(pretrained, "ViTForImageClassification", image_class, image_size=PIXELS, patch_size=8),
    "Swin": partial(pretrained, "SwinForImageClassification", image_class, image_size=PIXELS, patch_size=4,
                    embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=4),
    "ConvNeXt": partial(pretrained, "ConvNextForImageClassification", image_class, depths=[1, 1, 1, 1],
                        hidden_sizes=[8, 8, 16, 16]),
    "ResNet": partial(pretrained, "ResNetForImageClassification", image_class, embedding_size=8, depths=[1, 1],
                      hidden_sizes=[8, 16]),
}  # fmt: skip


# -------------------------------------------------------------------------------------------------------- plain torch


class Recurrent(nn.Module):
    """A recurrent layer of torch between an embedding and a head; the target is the next token."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 16)
        self.body = kind(16, 16, batch_first=True, **options)
        self.head = nn.Linear(32 if options.get("bidirectional") else 16, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(self.table(ids))[0])
        return logits


class Cell(nn.Module):
    """An LSTM cell in a Python loop."""

    def __init__(self, kind: type[nn.Module] = nn.LSTMCell) -> None:
        super().__init__()
        self.table, self.cell, self.head = nn.Embedding(VOCABULARY, 16), kind(16, 16), nn.Linear(16, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        state = None
        for x in self.table(ids).unbind(1):
            state = self.cell(x, state)
        logits: Tensor = self.head(state[0] if isinstance(state, tuple) else state)
        return logits


class Bag(nn.Module):
    """Sums of embeddings before two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCABULARY, 16, mode="mean")
        self.up, self.head = nn.Linear(16, 32), nn.Linear(32, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(F.relu(self.up(self.bag(ids))))
        return logits


class Spectral(nn.Module):
    """A Fourier neural operator: complex weights on the lowest frequencies."""

    def __init__(self, width: int = 8, modes: int = 4) -> None:
        super().__init__()
        self.lift, self.project = nn.Conv1d(2, width, 1), nn.Conv1d(width, 1, 1)
        self.pointwise = nn.Conv1d(width, width, 1)
        self.weight = nn.Parameter(torch.randn(width, width, modes, dtype=torch.cfloat) / width)
        self.modes = modes

    def forward(self, x: Tensor) -> Tensor:
        h = self.lift(x)
        spectrum = torch.fft.rfft(h)
        out = torch.zeros_like(spectrum)
        out[..., : self.modes] = torch.einsum("bik,iok->bok", spectrum[..., : self.modes], self.weight)
        y: Tensor = self.project(F.gelu(torch.fft.irfft(out, n=x.shape[-1]) + self.pointwise(h)))
        return y


def _token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def sequence(model: nn.Module) -> Made:
    """Trained to the next token."""
    ids = tokens()
    return Made(model, (ids, ids.roll(-1, 1)), loss_fn=_token_loss)


def classifier(model: nn.Module, inputs: Tensor) -> Made:
    """Trained to classes."""
    return Made(model, (inputs, classes()), loss_fn=F.cross_entropy)


PLAIN: dict[str, Callable[[], Made]] = {
    "LSTM": lambda: sequence(Recurrent(nn.LSTM)),
    "LSTM, bidirectional": lambda: sequence(Recurrent(nn.LSTM, bidirectional=True)),
    "GRU": lambda: sequence(Recurrent(nn.GRU)),
    "RNN": lambda: sequence(Recurrent(nn.RNN)),
    "LSTMCell": lambda: classifier(Cell(), tokens()),
    "GRUCell": lambda: classifier(Cell(nn.GRUCell), tokens()),
    "EmbeddingBag": lambda: classifier(Bag(), tokens()),
    "FNO": lambda: Made(Spectral(), (torch.randn(ROWS, 2, 16), torch.randn(ROWS, 1, 16)), loss_fn=F.mse_loss),
}

ZOO: dict[str, Callable[[], Made]] = {**HUB, **PLAIN}
"""All of them, by name."""
