"""`interleave_projections`: one linear that is split is sharded as if it were several."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoparallel import operators
from autoparallel.graph.captured import Captured
from tests import captures
from tests.models.fused import GATES, WAYS, FusedAttention, FusedConfig, GatedMLP
from tests.passes.support import show

RANKS = 4


class Fused(nn.Module):
    """A product and what reads it."""

    def __init__(self, rows: int, read: Callable[[Tensor], Tensor], bias: bool = False) -> None:
        super().__init__()
        self.joined, self.read = nn.Linear(4, rows, bias=bias), read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.joined(x))


def _captured(model: nn.Module, *args: Tensor, ranks: int = RANKS) -> Captured:
    return captures.captured(model, *args, options={"ranks": ranks})


def _targets(captured: Captured) -> list[object]:
    return [node.target for node in captured.graph.nodes]


def _gate(y: Tensor) -> Tensor:
    a, b = y.split([8, 4], dim=1)
    return a[:, :4] * b + a[:, 4:]


def test_a_single_row_whose_dim_a_reshape_drops_is_left_alone() -> None:
    captured = _captured(Fused(1, lambda y: y.reshape(-1)), torch.randn(8, 4))
    assert operators.interleave not in _targets(captured)


def test_a_split_product_is_interleaved() -> None:
    captured = _captured(Fused(12, lambda y: y[:, :8].sum(1) * y[:, 8:].sum(1), bias=True), torch.randn(8, 4), ranks=2)
    lines = show(captured.module)
    assert lines[3:7] + [line for line in lines[7:] if "piece(" in line] == [
        "interleave = tables.interleave(p_model_joined_weight, 0, [0, 8, 12], 2)",
        "interleave_1 = tables.interleave(p_model_joined_bias, 0, [0, 8, 12], 2)",
        "linear = aten.linear(args_0, interleave, interleave_1)",
        "piece = tables.piece(linear, 1, 0, 8, 2)",
        "piece_1 = tables.piece(linear, 1, 8, 12, 2)",
    ]


def _run(captured: Captured, model: nn.Module, x: Tensor) -> Tensor:
    values = [
        model.get_parameter(captured.parameters[n.name]) if n.name in captured.parameters else x
        for n in captured.graph.nodes
        if n.op == "placeholder"
    ]
    return captured.module(*values)[0]


@pytest.mark.wide_where(lambda way: way not in ("conv1d", "groups"))
@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_writing_attention_computes_the_same(way: str) -> None:
    torch.manual_seed(0)
    config = FusedConfig(keys=4 if way == "groups" else 2)
    model, x = FusedAttention(config, way).double(), torch.randn(8, 3, 16).double()
    captured = _captured(model, x)
    blocks = [n.args[-1] for n in captured.graph.nodes if n.target is operators.piece]
    assert blocks == [RANKS] * 3
    torch.testing.assert_close(_run(captured, model, x), model(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gate", GATES)
def test_every_way_of_writing_a_gate_computes_the_same(gate: str) -> None:
    torch.manual_seed(0)
    model, x = GatedMLP(FusedConfig(), gate).double(), torch.randn(8, 3, 16).double()
    captured = _captured(model, x)
    assert _targets(captured).count(operators.piece) == 2
    torch.testing.assert_close(_run(captured, model, x), model(x), rtol=1e-12, atol=1e-12)


def test_torchs_own_attention_is_interleaved() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    torch.manual_seed(0)
    model, x = Own().double(), torch.randn(8, 3, 8).double()
    captured = _captured(model, x)
    assert _targets(captured).count(operators.piece) == 3
    torch.testing.assert_close(_run(captured, model, x), model(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("rows", "read"),
    [
        (12, lambda y: y[:, :8].sum(1) + y[:, 4:].sum(1)),  # pieces that overlap
        (12, lambda y: y[:, :8].sum(1) + y.mean()),  # another reader
        (12, lambda y: y[:, ::2].sum(1) + y[:, 1::2].sum(1)),  # not in one stretch
        (12, lambda y: F.softmax(y, 1)[:, :8].sum(1) + y[:, 8:].sum(1)),  # used before it is split
        (9, lambda y: y[:, :3] * y[:, 3:6] + y[:, 6:]),  # no rank gets its part of each piece
        (12, lambda y: y.unflatten(1, (4, 3)).sum(1)),  # heads, but no pieces
    ],
)
def test_what_is_not_split_into_pieces_stays(rows: int, read: Callable[[Tensor], Tensor]) -> None:
    captured = _captured(Fused(rows, read), torch.randn(8, 4))
    assert not {operators.interleave, operators.piece} & set(_targets(captured))


def test_rows_that_nobody_reads_are_a_piece_of_their_own() -> None:
    captured = _captured(Fused(12, lambda y: y[:, 4:8] * y[:, 8:]), torch.randn(8, 4))
    (interleave,) = (n for n in captured.graph.nodes if n.target is operators.interleave)
    assert interleave.args[1:] == (0, [0, 4, 8, 12], 4)
