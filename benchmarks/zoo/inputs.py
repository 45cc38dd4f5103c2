"""What a model of the zoo is, and the batches that models are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
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


def image_and_text() -> dict[str, Any]:
    return {"input_ids": tokens(), "pixel_values": images(), "return_loss": True}


def videos() -> dict[str, Any]:
    return {"pixel_values": torch.randn(ROWS, 4, 3, PIXELS, PIXELS), "labels": classes()}


def series_in_time() -> dict[str, Any]:
    return {
        "past_values": torch.randn(ROWS, 12),
        "past_time_features": torch.randn(ROWS, 12, 1),
        "past_observed_mask": torch.ones(ROWS, 12),
        "future_values": torch.randn(ROWS, 4),
        "future_time_features": torch.randn(ROWS, 4, 1),
    }


def image_segments() -> dict[str, Any]:
    return {"pixel_values": images(), "labels": torch.randint(CLASSES, (ROWS, PIXELS, PIXELS))}


def speech_frames() -> dict[str, Any]:
    return {"input_features": torch.randn(ROWS, 32, 8), "labels": tokens(8)}


def music() -> dict[str, Any]:
    """Codes of two books: a row for each of a sample's, and their labels."""
    return {
        "input_ids": torch.randint(VOCABULARY, (2 * ROWS, LENGTH)),
        "labels": torch.randint(VOCABULARY, (ROWS, LENGTH, 2)),
    }


def image_caption() -> dict[str, Any]:
    ids = tokens()
    return {"input_ids": ids, "pixel_values": images(), "labels": ids}


def image_prompt(places: int = 16) -> dict[str, Any]:
    """Places for the patches of an image, then text."""
    ids = torch.cat([torch.full((ROWS, places), 3), tokens()], 1)
    return {"input_ids": ids, "pixel_values": images(), "labels": ids}


def image_question() -> dict[str, Any]:
    return {"input_ids": tokens(), "pixel_values": images(), "labels": torch.rand(ROWS, CLASSES)}


def wave_alone() -> dict[str, Any]:
    return {"input_values": torch.randn(ROWS, 1, 64)}


def decisions() -> dict[str, Any]:
    return {
        "states": torch.randn(ROWS, 6, 4),
        "actions": torch.randn(ROWS, 6, 2),
        "rewards": torch.randn(ROWS, 6, 1),
        "returns_to_go": torch.randn(ROWS, 6, 1),
        "timesteps": torch.arange(6).repeat(ROWS, 1),
        "attention_mask": torch.ones(ROWS, 6),
    }


def masked_image_prompt() -> dict[str, Any]:
    prompt = image_prompt(4)
    return {**prompt, "attention_mask": torch.ones_like(prompt["input_ids"])}


def typed_image_prompt(places: int, kind: int) -> dict[str, Any]:
    """A prompt that tells tokens of images, whose kind is given, from those of text."""
    prompt = image_prompt(places)
    return {**prompt, "token_type_ids": torch.where(prompt["input_ids"] == 3, kind, 1 - kind)}


def image_list_prompt() -> dict[str, Any]:
    prompt = image_prompt(4)
    return {**prompt, "pixel_values": prompt["pixel_values"][:, None]}


def sized_image_prompt() -> dict[str, Any]:
    return {**image_prompt(4), "image_sizes": torch.tensor([[PIXELS, PIXELS]] * ROWS)}


def patch_prompt() -> dict[str, Any]:
    """Images of 4 x 4 patches one after the other, of which each four become a token."""
    ids = torch.cat([torch.full((ROWS, 1), 5), torch.full((ROWS, 4), 3), tokens()], 1)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == 3).int(),
        "pixel_values": torch.randn(ROWS * 16, 96),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * ROWS),
        "labels": ids,
    }


def image_and_ended_text() -> dict[str, Any]:
    ids = torch.cat([tokens(LENGTH - 1), torch.full((ROWS, 1), 2)], 1)
    return {**image_and_text(), "input_ids": ids}


def visual_question() -> dict[str, Any]:
    return {
        "input_ids": tokens(),
        "attention_mask": torch.ones(ROWS, LENGTH, dtype=torch.int64),
        "visual_embeds": torch.randn(ROWS, 4, 16),
        "labels": torch.rand(ROWS, CLASSES).softmax(-1),
    }


def videos_alone_class() -> dict[str, Any]:
    return {"pixel_values_videos": torch.randn(ROWS, 4, 3, PIXELS, PIXELS), "labels": classes()}


def frames_class() -> dict[str, Any]:
    return {"input_features": torch.randn(ROWS, 16, 8), "labels": classes()}


def frames_in_words() -> dict[str, Any]:
    mask = torch.ones(ROWS, 64, dtype=torch.int64)
    return {"input_features": torch.randn(ROWS, 64, 8), "attention_mask": mask, "labels": tokens(4)}


def waves_in_words(samples: int, words: int) -> dict[str, Any]:
    return {"input_values": torch.randn(ROWS, samples), "labels": tokens(words)}


def series_alone() -> dict[str, Any]:
    return {
        "past_values": torch.randn(ROWS, 32),
        "future_values": torch.randn(ROWS, 8),
        "freq": torch.zeros(ROWS, 1, dtype=torch.int64),
    }


def _global_mask() -> Tensor:
    """The first token of each row attends globally."""
    mask = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    mask[:, 0] = 1
    return mask


def summary() -> dict[str, Any]:
    mask = torch.ones(ROWS, LENGTH, dtype=torch.int64)
    mask[:3, 9:] = 0
    return {**translation(), "attention_mask": mask, "global_attention_mask": _global_mask()}


def masked_globally() -> dict[str, Any]:
    mask = _global_mask()
    mask[2, 5] = 1
    return {**masked(), "global_attention_mask": mask}
