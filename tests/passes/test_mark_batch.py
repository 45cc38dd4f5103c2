"""`mark_batch_behind_time`: a recurrent layer tells that the batch is the second dim of the inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autoparallel.passes.mark_batch import mark_batch_behind_time
from tests.passes.support import captured


class Tagger(nn.Module):
    """Words, one after another, and what a recurrent layer makes of each."""

    def __init__(self, batch_first: bool, rows: bool = False) -> None:
        super().__init__()
        self.table, self.rows = nn.Embedding(9, 4), rows
        self.rnn, self.out = nn.LSTM(4, 3, batch_first=batch_first), nn.Linear(3, 9)

    def forward(self, words: Tensor, h: Tensor, c: Tensor, weights: Tensor) -> Tensor:
        x = self.table(words)
        x = x.flatten(0, 1)[:, None] if self.rows else x
        outputs, _ = self.rnn(x, (h[:, :1], c[:, :1]) if self.rows else (h, c))
        return self.out(outputs).mean() * weights.mean()


def call(steps: int, rows: int) -> tuple[Tensor, ...]:
    state = torch.zeros(1, rows, 3)
    return torch.zeros(steps, rows, dtype=torch.int64), state, state.clone(), torch.ones(rows)


def test_time_before_the_batch_is_no_batch() -> None:
    graph = captured(Tagger(batch_first=False), *call(6, 8))
    assert mark_batch_behind_time(graph)
    assert graph.batch_dims == {0: 1, 1: 1, 2: 1, 3: 0} and not graph.batches and "test_mark_batch" in graph.time_first
    marked = {node.meta["key"] for node in graph.graph.nodes if node.meta.get("batch_factors")}
    assert any("recurrent" in key for key in marked) and any(key.startswith("out/") for key in marked)


@pytest.mark.parametrize("rows", [False, True])
def test_the_first_dim_is_the_batch_where_a_layer_does_not_say_otherwise(rows: bool) -> None:
    """Also where all words of the batch are one sequence: its times are rows, but the second dim is not."""
    model = Tagger(batch_first=not rows, rows=rows)
    words, h, c, weights = call(8, 6)
    h, c = (h, c) if rows else (torch.zeros(1, 8, 3), torch.zeros(1, 8, 3))
    graph = captured(model, words, h, c, weights)
    assert not mark_batch_behind_time(graph) and not graph.batch_dims
