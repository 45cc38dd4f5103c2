"""`settle_interleaving`: as many blocks of interleaved pieces stay as a plan shards a fused projection into."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autoparallel import operators
from autoparallel.graph.captured import Captured
from autoparallel.passes.cut_stages import cut_stages
from autoparallel.passes.settle_interleaving import count_blocks, leave_blocks, settle_interleaving
from autoparallel.placements.modes import parse_mode
from tests.passes.support import show
from tests.passes.test_interleave_projections import Fused, _captured, _gate


def settle(captured: Captured, chosen: dict[str, list[str]], axis_sizes: tuple[int, ...]) -> list[str]:
    """The product and its pieces after the pass; ``chosen`` tells how the operators run that have a word in their key,
    all others run whole."""
    modes = {}
    for node in captured.graph.nodes:
        if node.op == "call_function":
            key = node.meta["key"]
            texts = next((texts for word, texts in chosen.items() if word in key), ["I"] * len(axis_sizes))
            modes[key] = tuple(map(parse_mode, texts))
    settle_interleaving(captured.module, modes, axis_sizes)
    captured.graph.lint()
    return [line for line in show(captured.module) if any(x in line for x in ("linear(", "piece(", "interleave("))]


def fused(bias: bool = False) -> Captured:
    return _captured(Fused(12, _gate, bias), torch.randn(8, 4))


class TestBeforeAndAfter:
    def test_before(self) -> None:
        assert [line for line in show(fused().module) if "interleave(" in line or "piece(" in line] == [
            "interleave = tables.interleave(p_model_joined_weight, 0, [0, 8, 12], 4)",
            "piece = tables.piece(linear, 1, 0, 8, 4)",
            "piece_1 = tables.piece(linear, 1, 8, 12, 4)",
        ]

    @pytest.mark.parametrize(("linear", "ranks"), [("shard:...0", 2), ("shard:n", 2), ("shard:n", 3)])
    def test_without_sharded_pieces_nothing_is_interleaved(self, linear: str, ranks: int) -> None:
        """Whole pieces need not divide by the ranks that shard the product."""
        assert settle(fused(), {"linear": [linear]}, (ranks,)) == [
            "linear = aten.linear(args_0, p_model_joined_weight)",
            "piece = tables.piece(linear, 1, 0, 8, 1)",
            "piece_1 = tables.piece(linear, 1, 8, 12, 1)",
        ]

    @pytest.mark.parametrize(("piece", "linear"), [("shard:o", "shard:n"), ("shard:o", "I")])
    def test_there_are_as_many_blocks_as_shards(self, piece: str, linear: str) -> None:
        assert settle(fused(), {"piece": [piece], "linear": [linear]}, (2,)) == [
            "interleave = tables.interleave(p_model_joined_weight, 0, [0, 8, 12], 2)",
            "linear = aten.linear(args_0, interleave)",
            "piece = tables.piece(linear, 1, 0, 8, 2)",
            "piece_1 = tables.piece(linear, 1, 8, 12, 2)",
        ]


def test_axes_multiply_and_only_those_that_shard_the_dim_count() -> None:
    both = settle(fused(), {"piece": ["shard:o", "shard:o"], "linear": ["shard:n", "shard:n"]}, (2, 2))
    assert both[0].endswith("[0, 8, 12], 4)")
    one = settle(fused(), {"piece": ["shard:d0", "shard:o"], "linear": ["shard:...0", "shard:n"]}, (2, 2))
    assert one[0].endswith("[0, 8, 12], 2)")


def test_the_bias_is_dealt_out_as_the_weight_is() -> None:
    lines = settle(fused(bias=True), {"piece": ["shard:o"], "linear": ["shard:n"]}, (2,))
    assert [line.rpartition(", ")[2] for line in lines if "interleave(" in line] == ["2)", "2)"]
    lines = settle(fused(bias=True), {}, (2,))
    assert lines[0] == "linear = aten.linear(args_0, p_model_joined_weight, p_model_joined_bias)"


def test_settling_again_changes_nothing() -> None:
    captured = fused()
    chosen = {"piece": ["shard:o"], "linear": ["shard:n"]}
    assert settle(captured, chosen, (2,)) == settle(captured, chosen, (2,))


def test_a_product_that_was_never_interleaved_is_left_alone() -> None:
    def read(y: Tensor) -> Tensor:
        return y * 2

    captured = _captured(Fused(12, read), torch.randn(8, 4))
    before = show(captured.module)
    settle(captured, {"linear": ["shard:n"]}, (2,))
    assert show(captured.module) == before
    assert not any(n.target is operators.interleave for n in captured.graph.nodes)


def test_stages_that_part_a_product_from_its_pieces_leave_as_many_blocks() -> None:
    captured = fused()
    piece = next(n.meta["key"] for n in captured.graph.nodes if n.target is operators.piece)
    modes = {n.meta["key"]: (parse_mode("I"),) for n in captured.graph.nodes if n.op == "call_function"}
    modes[piece] = (parse_mode("shard:o"),)
    blocks = count_blocks(captured.graph, modes, (2,))
    lines = []
    for stage in cut_stages(captured, [piece], [0]):
        leave_blocks(stage.captured.graph, blocks)
        settle_interleaving(stage.captured.module, modes, (2,))  # there is nothing left to count
        stage.captured.graph.lint()
        lines.append([line for line in show(stage.captured.module) if "interleave(" in line or "piece(" in line])
    assert lines == [
        ["interleave = tables.interleave(p_model_joined_weight, 0, [0, 8, 12], 2)"],
        ["piece = tables.piece(linear, 1, 0, 8, 2)", "piece_1 = tables.piece(linear, 1, 8, 12, 2)"],
    ]
