"""What a model under test comes with: data for it, and what is known of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


def seeded(step: int, seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000_003 * (seed + 1) + step)


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


def token_dictionary(step: int, rows: int, seed: int, vocabulary: int, length: int, mask: bool) -> Batch:
    generator = seeded(step, seed)
    tokens, labels = ragged_tokens(generator, rows, length, vocabulary)
    batch: dict[str, Any] = {"input_ids": tokens, "labels": labels}
    if mask:
        batch["attention_mask"] = torch.ones_like(tokens)
    return (), batch
