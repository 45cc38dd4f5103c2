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


def image_prompt() -> dict[str, Any]:
    """Sixteen places for the patches of an image, then text."""
    ids = torch.cat([torch.full((ROWS, 16), 3), tokens()], 1)
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
