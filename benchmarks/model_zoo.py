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


def speech() -> dict[str, Any]:
    return {"input_features": torch.randn(ROWS, 8, 32), "labels": tokens(8)}


def waves() -> dict[str, Any]:
    return {"input_values": torch.randn(ROWS, 256), "labels": classes()}


def spectrograms() -> dict[str, Any]:
    return {"input_values": torch.randn(ROWS, 16, 8), "labels": classes()}


def image_alone() -> dict[str, Any]:
    return {"pixel_values": images()}


def series() -> dict[str, Any]:
    return {"past_values": torch.randn(ROWS, 16, 2), "future_values": torch.randn(ROWS, 4, 2)}


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
                    embed_dim=16, depths=[1, 1], num_heads=[2, 2], num_attention_heads=[2, 2], window_size=4),
    "ResNet": partial(pretrained, "ResNetForImageClassification", image_class, embedding_size=8, depths=[1, 1],
                      hidden_sizes=[8, 16]),
    "Llama 4 (text)": partial(
        pretrained, "Llama4ForCausalLM", causal, num_key_value_heads=2, head_dim=8, num_local_experts=2,
        intermediate_size_mlp=64, moe_layers=[],
    ),
    "Cohere": partial(pretrained, "CohereForCausalLM", masked, num_key_value_heads=2),
    "StableLM": partial(pretrained, "StableLmForCausalLM", masked, num_key_value_heads=2),
    "StarCoder 2": partial(pretrained, "Starcoder2ForCausalLM", masked, num_key_value_heads=2),
    "OLMo 2": partial(pretrained, "Olmo2ForCausalLM", masked, num_key_value_heads=2),
    "Granite": partial(pretrained, "GraniteForCausalLM", masked, num_key_value_heads=2),
    "GLM": partial(pretrained, "GlmForCausalLM", masked, num_key_value_heads=2, head_dim=8),
    "GPT-Neo": partial(pretrained, "GPTNeoForCausalLM", masked, num_layers=1, num_heads=4,
                       attention_types=[[["global"], 1]]),
    "MPT": partial(pretrained, "MptForCausalLM", masked, d_model=32, n_heads=4, n_layers=1, max_seq_len=64),
    "Mamba 2": partial(pretrained, "Mamba2ForCausalLM", causal, num_heads=4, head_dim=16, state_size=8, n_groups=1,
                       chunk_size=4),
    "Qwen2-MoE": partial(
        pretrained, "Qwen2MoeForCausalLM", causal, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, shared_expert_intermediate_size=16, experts_implementation="batched_mm",
    ),
    "XLM-RoBERTa": partial(pretrained, "XLMRobertaForMaskedLM", masked),
    "MPNet": partial(pretrained, "MPNetForMaskedLM", masked),
    "ModernBERT": partial(pretrained, "ModernBertForMaskedLM", masked, global_attn_every_n_layers=1, local_attention=8,
                          cls_token_id=1, sep_token_id=2),
    "RoFormer": partial(pretrained, "RoFormerForMaskedLM", masked, embedding_size=32),
    "FNet": partial(pretrained, "FNetForMaskedLM", causal, tpu_short_seq_length=LENGTH),
    "mBART": partial(pretrained, "MBartForConditionalGeneration", translation, **ENCODER_DECODER),
    "Pegasus": partial(pretrained, "PegasusForConditionalGeneration", translation, **ENCODER_DECODER),
    "Marian": partial(pretrained, "MarianMTModel", translation, **ENCODER_DECODER),
    "Whisper": partial(pretrained, "WhisperForConditionalGeneration", speech, **ENCODER_DECODER, num_mel_bins=8,
                       max_source_positions=16, max_target_positions=32, suppress_tokens=None,
                       begin_suppress_tokens=None),
    "Wav2Vec 2.0": partial(pretrained, "Wav2Vec2ForSequenceClassification", waves, conv_dim=[8, 8], conv_stride=[4, 4],
                           conv_kernel=[8, 4], num_feat_extract_layers=2, num_conv_pos_embeddings=4,
                           num_conv_pos_embedding_groups=2, classifier_proj_size=16, apply_spec_augment=False,
                           feat_proj_dropout=0.0, final_dropout=0.0),
    "AST": partial(pretrained, "ASTForAudioClassification", spectrograms, patch_size=4, num_mel_bins=8, max_length=16,
                   frequency_stride=4, time_stride=4),
    "DeiT": partial(pretrained, "DeiTForImageClassification", image_class, image_size=PIXELS, patch_size=8),
    "BEiT": partial(pretrained, "BeitForImageClassification", image_class, image_size=PIXELS, patch_size=8),
    "DINOv2": partial(pretrained, "Dinov2ForImageClassification", image_class, image_size=PIXELS, patch_size=8),
    "MobileNet V2": partial(pretrained, "MobileNetV2ForImageClassification", image_class, depth_multiplier=0.25,
                            image_size=PIXELS),
    "SegFormer": partial(pretrained, "SegformerForImageClassification", image_class, num_encoder_blocks=2,
                         depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[7, 3], strides=[4, 2],
                         num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=16),
    "PoolFormer": partial(pretrained, "PoolFormerForImageClassification", image_class, num_encoder_blocks=2,
                          depths=[1, 1], hidden_sizes=[8, 16], patch_sizes=[7, 3], strides=[4, 2], padding=[2, 1],
                          mlp_ratio=2.0),
    "ViTMAE": partial(pretrained, "ViTMAEForPreTraining", image_alone, image_size=PIXELS, patch_size=8,
                      decoder_hidden_size=32, decoder_num_hidden_layers=1, decoder_num_attention_heads=4,
                      decoder_intermediate_size=64),
    "PatchTST": partial(pretrained, "PatchTSTForPrediction", series, num_input_channels=2, context_length=16,
                        patch_length=4, patch_stride=4, prediction_length=4, d_model=16, ffn_dim=32,
                        num_attention_heads=4),
}  # fmt: skip


# -------------------------------------------------------------------------------------------------------- plain torch


class Recurrent(nn.Module):
    """A recurrent layer of torch between an embedding and a head; the target is the next token."""

    def __init__(self, kind: Callable[..., nn.Module], **options: Any) -> None:
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


class ConvNet(nn.Module):
    """Convolutions with a normalisation and a pooling of choice."""

    def __init__(self, norm: Callable[[int], nn.Module], pool: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), norm(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), norm(16), nn.ReLU(), pool,
        )  # fmt: skip
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x).flatten(2).mean(-1))
        return logits


class SpatialTransformer(nn.Module):
    """Images are sampled at an affine grid that is learned (Jaderberg et al. 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.locate, self.body, self.head = nn.Linear(3 * 16, 6), nn.Conv2d(3, 8, 3), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        near = torch.eye(2, 3, dtype=x.dtype)
        theta = self.locate(F.adaptive_avg_pool2d(x, 4).flatten(1)).view(-1, 2, 3) * 0.1 + near
        seen = F.grid_sample(x, F.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False)
        logits: Tensor = self.head(F.relu(self.body(seen)).amax((2, 3)))
        return logits


class Vocoder(nn.Module):
    """Weight-normalised convolutions, and the distance of spectra as the loss."""

    def __init__(self) -> None:
        super().__init__()
        norm = torch.nn.utils.parametrizations.weight_norm
        self.up = norm(nn.ConvTranspose1d(4, 8, 4, 2, 1))
        self.body = norm(nn.Conv1d(8, 8, 3, padding=1))
        self.out = norm(nn.Conv1d(8, 1, 3, padding=1))

    def forward(self, mel: Tensor, wave: Tensor) -> dict[str, Tensor]:
        made = self.out(F.leaky_relu(self.body(F.leaky_relu(self.up(mel))))).squeeze(1)
        window = torch.hann_window(8, dtype=made.dtype)
        a, b = (torch.stft(x, 8, window=window, return_complex=True).abs() for x in (made, wave))
        return {"loss": F.l1_loss(a, b) + F.mse_loss(made, wave), "made": made}


class Prototypes(nn.Module):
    """Classes are the nearest of learned points."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
        self.points = nn.Parameter(torch.randn(CLASSES, 8))

    def forward(self, x: Tensor) -> Tensor:
        return -torch.cdist(self.body(x), self.points)


class GraphConvolution(nn.Module):
    """Messages along edges, which are added, and of which the largest is taken (nodes are columns of each row)."""

    edges: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update, self.head = nn.Linear(4, 16), nn.Linear(32, 16), nn.Linear(16, CLASSES)
        self.register_buffer("edges", torch.randint(6, (2, 14)))

    def forward(self, x: Tensor) -> Tensor:
        source, target = self.edges
        sent = self.message(x)[:, source]
        index = target.view(1, -1, 1).expand_as(sent)
        empty = sent.new_zeros(x.shape[0], 6, 16)
        largest = empty.scatter_reduce(1, index, sent, "amax", include_self=False)
        both = torch.cat([empty.scatter_add(1, index, sent), largest], -1)
        logits: Tensor = self.head(F.relu(self.update(both)).mean(1))
        return logits


class Translator(nn.Module):
    """Torch's own encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.body = nn.Transformer(16, 2, 1, 1, 32, 0.0, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=x.dtype)
        logits: Tensor = self.head(self.body(x, x, tgt_mask=mask, tgt_is_causal=True))
        return logits


class UNet(nn.Module):
    """Down, up, and across."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, 2, 1)
        self.norm, self.up = nn.GroupNorm(4, 16), nn.ConvTranspose2d(16, 8, 2, 2)
        self.last = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        across = F.silu(self.first(x))
        up = self.up(F.silu(self.norm(self.down(across))))
        out: Tensor = self.last(torch.cat([across, up], 1))
        return out


class Mixer(nn.Module):
    """Linear layers over places and over channels (Tolstikhin et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, 16, 4, 4)
        self.places = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.channels = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.cut(x).flatten(2)
        h = (h + self.places(h)).mT
        logits: Tensor = self.head((h + self.channels(h)).mean(1))
        return logits


class Ranker(nn.Module):
    """Embeddings, and the products of all pairs of them (Naumov et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(VOCABULARY, 8) for _ in range(5))
        self.head = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, CLASSES))

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.stack([table(ids[:, i]) for i, table in enumerate(self.tables)], 1)
        rows, columns = torch.triu_indices(5, 5, 1)
        logits: Tensor = self.head((x @ x.mT)[:, rows, columns])
        return logits


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
    "CNN, batch norm, max": lambda: classifier(ConvNet(nn.BatchNorm2d, nn.AdaptiveMaxPool2d(2)), images(16)),
    "CNN, instance norm": lambda: classifier(
        ConvNet(lambda n: nn.InstanceNorm2d(n, affine=True), nn.AdaptiveAvgPool2d(2)), images(16)
    ),
    "CNN, group norm": lambda: classifier(ConvNet(lambda n: nn.GroupNorm(4, n), nn.AvgPool2d(2)), images(16)),
    "Spatial transformer": lambda: classifier(SpatialTransformer(), images(16)),
    "Vocoder, spectral loss": lambda: Made(Vocoder(), (torch.randn(ROWS, 4, 16), torch.randn(ROWS, 32))),
    "Prototypes": lambda: classifier(Prototypes(), torch.randn(ROWS, 16)),
    "Graph convolution": lambda: classifier(GraphConvolution(), torch.randn(ROWS, 6, 4)),
    "nn.Transformer": lambda: sequence(Translator()),
    "U-Net": lambda: Made(UNet(), (images(16), images(16)), loss_fn=F.mse_loss),
    "MLP-Mixer": lambda: classifier(Mixer(), images(16)),
    "DLRM": lambda: classifier(Ranker(), torch.randint(VOCABULARY, (ROWS, 5))),
    "FNO": lambda: Made(Spectral(), (torch.randn(ROWS, 2, 16), torch.randn(ROWS, 1, 16)), loss_fn=F.mse_loss),
}

ZOO: dict[str, Callable[[], Made]] = {**HUB, **PLAIN}
"""All of them, by name."""
