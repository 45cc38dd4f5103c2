"""Modules that people bring on the first day, under presets that once refused what they could not cut."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoparallel
from tests.runtime.support import gradients_off, make, mesh_of, off, raised, run_on_ranks


class Recurrent(nn.Module):
    """All that torch has, with the batch and with times first, and step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(4, 4, batch_first=True), nn.GRU(4, 4, bidirectional=True, batch_first=True)
        self.rnn, self.cell = nn.RNN(8, 4), nn.LSTMCell(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.rnn(self.gru(self.lstm(x)[0])[0].transpose(0, 1))[0]
        state = h.new_zeros(len(x), 4), h.new_zeros(len(x), 4)
        for step in h:
            state = self.cell(step, state)
        return state[0]


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(16, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.bag(x.argsort(1)[..., 0]))


class NamesByCase(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.W, self.w = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.w(self.W(x))


class Images(nn.Sequential):
    def __init__(self) -> None:
        layers = nn.Conv1d(3, 4, 2), nn.InstanceNorm1d(4, affine=True), nn.AdaptiveMaxPool1d(2), nn.Flatten()
        super().__init__(*layers, nn.Linear(8, 4))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "recurrent": Recurrent, "a bag": Bag, "names that differ by case": NamesByCase, "images": Images,
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True),
}  # fmt: skip


def _gradients(name: str, plan: str) -> tuple[float, int]:
    plain = make(MODELS[name])
    model: Any = autoparallel.compile(copy.deepcopy(plain), mesh_of(2), plan=plan)
    x = torch.randn(8, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    result, expected = model(x), plain(x)
    result.square().mean().backward(), expected.square().mean().backward()
    sharded = sum(p.placements[0].is_shard() for p in model.parameters())
    return max(off(result, expected), gradients_off(model, plain)), sharded


@pytest.mark.wide_where(lambda plan, name: (name, plan) != ("images", "tensor_parallel"))
@pytest.mark.parametrize("plan", ["fsdp", "tensor_parallel"])
@pytest.mark.parametrize("name", MODELS)
def test_presets_take_what_they_cannot_cut(name: str, plan: str) -> None:
    for difference, sharded in run_on_ranks(_gradients, name, plan, world_size=2):
        assert difference < 1e-9 and sharded


def _alone() -> tuple[str, float]:
    """A state of an environment, without a batch, and with one."""
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    model: Any = autoparallel.compile(copy.deepcopy(plain), mesh_of(2), plan="fsdp")
    x = torch.arange(4, dtype=torch.float64)
    words = raised(lambda: model(x))
    return words, off(model(x[None]), plain(x[None]))


def test_an_input_without_a_batch() -> None:
    for words, difference in run_on_ranks(_alone, world_size=2):
        assert "the first dim of the first input is taken for the batch: x[None]" in words
        assert difference < 1e-12
