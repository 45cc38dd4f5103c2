"""`pad_vocabulary`: a table gets rows of zeros that nobody reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autoparallel.graph.captured import Captured
from autoparallel.passes.pad_vocabulary import find_vocabularies, pad_vocabulary
from tests import captures
from tests.passes.support import show

VOCABULARY, WIDTH = 13, 4


class Tied(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
        self.head.weight = self.tok.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.tok(ids))


class WithLogits(Tied):
    """Returns what is padded, beside the loss, and reads it otherwise."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits = self.head(self.tok(ids)).float()
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss + 1e-3 * logits.logsumexp(-1).mean(), "logits": logits}


def flat_loss(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), target.flatten())


IDS = torch.randint(0, VOCABULARY, (8, 3), generator=torch.Generator().manual_seed(0))


def captured(model: nn.Module, *inputs: Any, shards: int, loss_fn: Any = None) -> Captured:
    graph = captures.captured(model, *inputs, loss_fn=loss_fn)
    found = find_vocabularies(graph.graph, graph.parameters, shards)
    pad_vocabulary(graph.module, graph.parameters, found)
    graph.module.recompile()
    return graph


def text(graph: Captured) -> list[str]:
    return [line.rstrip() for line in show(graph.module)]


def test_before_and_after() -> None:
    lines = text(captured(Tied(), IDS, IDS, shards=4, loss_fn=flat_loss))
    start = next(i for i, line in enumerate(lines) if line.startswith("pad_rows"))
    assert lines[start : start + 2] == [
        "pad_rows = tables.pad_rows(p_model_tok_weight, 16)",
        "padded_embedding = tables.padded_embedding(pad_rows, args_0, -1, 13)",
    ]
    assert any("= aten.linear(" in line and line.endswith("pad_rows)") for line in lines)
    assert any(line.startswith("cross_entropy_sum") and line.endswith("None, -100, 0.0, 13)") for line in lines)


@pytest.mark.wide_where(lambda shards: shards != 9)
@pytest.mark.parametrize("shards", [1, 13, 9, 26], ids=["one", "it divides", "too much padding", "too few rows"])
def test_left_alone(shards: int) -> None:
    before = text(captured(Tied(), IDS, IDS, shards=1, loss_fn=flat_loss))
    assert text(captured(Tied(), IDS, IDS, shards=shards, loss_fn=flat_loss)) == before


def test_a_layer_that_no_loss_reads_is_left_alone() -> None:
    model = nn.Linear(WIDTH, VOCABULARY)
    assert not any("pad" in line for line in text(captured(model, torch.rand(8, WIDTH), shards=4)))


@pytest.mark.wide_where(lambda model: isinstance(model, WithLogits))
@pytest.mark.parametrize("model", [Tied(), Tied(bias=True), WithLogits()], ids=["tied", "bias", "logits"])
def test_it_computes_the_same(model: Tied) -> None:
    model = model.double()
    kept = isinstance(model, WithLogits)
    graph = captured(model, IDS, IDS, shards=4, loss_fn=None if kept else flat_loss)
    assert any("pad_rows" in line for line in text(graph))
    inputs = dict(zip(graph.inputs, (IDS, IDS), strict=True))
    values = dict(model.named_parameters())
    arguments = [
        inputs[n.name] if n.name in inputs else values[graph.parameters[n.name]]
        for n in graph.graph.nodes
        if n.op == "placeholder"
    ]
    results = graph.module(*arguments)
    expected = pytree.tree_leaves(model(IDS, IDS) if kept else flat_loss(model(IDS), IDS))
    found = [results[i] for i in graph.outputs if isinstance(i, int)]
    for ours, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    ours, plain = (torch.autograd.grad(x[0], list(model.parameters())) for x in (found, expected))
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_an_index_into_the_padding_is_an_error() -> None:
    graph = captured(Tied(), IDS, IDS, shards=4, loss_fn=flat_loss)
    bad = IDS.clone()
    bad[0, 0] = VOCABULARY
    with pytest.raises(IndexError, match="out of range"):
        graph.module(Tied().tok.weight, bad, IDS)
