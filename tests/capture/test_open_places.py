"""A slice at a place that values tell, which eager would cut short, is an error on all ranks, with a cure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoparallel
from tests.runtime.support import mesh_of, run_on_ranks


class Crop(nn.Module):
    """Four columns, or two rows, from a place on that a buffer holds."""

    def __init__(self, at: int, rows: bool) -> None:
        super().__init__()
        self.encoder, self.rows = nn.Linear(8, 16), rows
        self.register_buffer("at", torch.tensor(at))

    def forward(self, x: Tensor) -> Tensor:
        h, at = self.encoder(x), int(self.at)
        return h[at : at + 2].sum(0) if self.rows else h[:, at : at + 4].sum(1)


def _words(model: Any) -> str:
    try:
        model(torch.ones(4, 8))
    except (RuntimeError, IndexError) as error:
        return "\n".join([str(error), *getattr(error, "__notes__", ())])
    return "nothing was raised"


def _on_ranks(plan: str) -> list[str]:
    crops = [Crop(14, rows=False), Crop(3, rows=True)]
    return [_words(autoparallel.compile(crop, mesh_of(2), plan=plan)) for crop in crops]


@pytest.mark.parametrize("rows", [False, True])
def test_a_slice_past_the_end_names_its_line_and_a_cure(rows: bool) -> None:
    words = _words(autoparallel.compile(Crop(3 if rows else 14, rows)))
    assert "test_open_places.py" in words and "at most x.shape" in words, words


@pytest.mark.parametrize("plan", ["fsdp", "tensor_parallel"])
def test_a_slice_past_the_end_ends_all_ranks(plan: str) -> None:
    for ranks in run_on_ranks(_on_ranks, plan, world_size=2):
        for words in ranks:
            assert "at most x.shape" in words, words
