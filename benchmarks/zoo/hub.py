"""Architectures of transformers, from tiny configs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import transformers

from benchmarks.zoo.inputs import (
    CLASSES,
    LENGTH,
    PIXELS,
    VOCABULARY,
    Made,
    causal,
    image_alone,
    image_class,
    masked,
    sequence_class,
    series,
    spectrograms,
    speech,
    translation,
    waves,
)

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
