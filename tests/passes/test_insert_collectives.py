"""`insert_collectives`: small programs, before and after, as text."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autoparallel.passes.verify_placements import verify_placements
from autoparallel.placements import Shard
from autoparallel.rules.ways import call_modes
from tests.passes.support import MLP, PAIR_MODES, PAIR_PARAMETERS, captured, localized, placed, show

DATA_MODES = {f"{name}/aten.linear#0": ["shard:...0"] for name in ("pre", "w1", "w2")}


class TestTheMegatronPair:
    def test_before_and_after(self) -> None:
        graph = captured(MLP(), torch.rand(8, 4))
        assert show(graph.module) == [
            "p_model_pre_weight",
            "p_model_w1_weight",
            "p_model_w2_weight",
            "args_0",
            "linear = aten.linear(args_0, p_model_pre_weight)",
            "linear_1 = aten.linear(linear, p_model_w1_weight)",
            "linear_2 = aten.linear(linear_1, p_model_w2_weight)",
            "return [linear_2]",
        ]
        program, specification = placed(graph, PAIR_MODES, PAIR_PARAMETERS)
        assert show(program) == [
            "p_model_pre_weight  I",
            "p_model_w1_weight  S0",
            "p_model_w2_weight  S1",
            "args_0  I",
            "linear = aten.linear(args_0, p_model_pre_weight)  I",
            "redistribute = collectives.redistribute(linear, 'I', 'R', 'mesh0/tp')  R",
            "linear_1 = aten.linear(redistribute, p_model_w1_weight)  S1",
            "linear_2 = aten.linear(linear_1, p_model_w2_weight)  P",
            "redistribute_1 = collectives.redistribute(linear_2, 'P', 'I', 'mesh0/tp')  I",
            "return [redistribute_1]",
        ]
        verify_placements(program, specification)

    def test_an_input_without_a_gradient_needs_nothing(self) -> None:
        model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False))
        modes = {"0/aten.linear#0": ["shard:n"], "1/aten.linear#0": ["shard:k"]}
        program = localized(captured(model, torch.rand(8, 4)), modes, {"0.weight": "S0", "1.weight": "S1"})
        assert [line for line in show(program) if "redistribute" in line] == [
            "redistribute = collectives.redistribute(linear_1, 'P', 'I', 'mesh0/tp')  I",
            "return [redistribute]",
        ]

    def test_a_bias_of_a_summand_is_added_once(self) -> None:
        model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 4))
        modes = {"0/aten.linear#0": ["shard:n"], "1/aten.linear#0": ["shard:k"]}
        program = localized(captured(model, torch.rand(8, 4)), modes, {"0.weight": "S0", "1.weight": "S1"})
        assert "collectives.redistribute(p_model_1_bias, 'I', 'P', 'mesh0/tp')  P" in "\n".join(show(program))

    def test_two_readers_share_one_collective(self) -> None:
        class Two(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.pre, self.a, self.b = (nn.Linear(4, 4, bias=False) for _ in range(3))

            def forward(self, x: Tensor) -> Tensor:
                x = self.pre(x)
                return torch.cat([self.a(x), self.b(x)])

        modes = {"a/aten.linear#0": ["shard:n"], "b/aten.linear#0": ["shard:n"]}
        program = localized(captured(Two(), torch.rand(8, 4)), modes, {"a.weight": "S0", "b.weight": "S0"})
        made = [line for line in show(program) if "redistribute(linear, 'I', 'R'" in line]
        assert len(made) == 1, "their gradients are summed before the one all-reduce"


class TestData:
    def test_parameters_are_gathered_and_their_gradients_scattered(self) -> None:
        parameters = {"pre.weight": "S0", "w1.weight": "S1"}
        program = localized(captured(MLP(), torch.rand(8, 4)), DATA_MODES, parameters, axes=[("dp", 2)])
        assert show(program) == [
            "p_model_pre_weight  S0",
            "p_model_w1_weight  S1",
            "p_model_w2_weight  I",
            "args_0  I",
            "redistribute = collectives.redistribute(args_0, 'I', 'S0', 'mesh0/dp')  S0",
            "redistribute_1 = collectives.redistribute(p_model_pre_weight, 'S0', 'R', 'mesh0/dp')  R",
            "linear = aten.linear(redistribute, redistribute_1)  S0",
            "redistribute_2 = collectives.redistribute(p_model_w1_weight, 'S1', 'R', 'mesh0/dp')  R",
            "linear_1 = aten.linear(linear, redistribute_2)  S0",
            "redistribute_3 = collectives.redistribute(p_model_w2_weight, 'I', 'R', 'mesh0/dp')  R",
            "linear_2 = aten.linear(linear_1, redistribute_3)  S0",
            "redistribute_4 = collectives.redistribute(linear_2, 'S0', 'I', 'mesh0/dp')  I",
            "return [redistribute_4]",
        ]

    def test_an_output_may_stay_as_it_is_made(self) -> None:
        program = localized(captured(MLP(), torch.rand(8, 4)), DATA_MODES, axes=[("dp", 2)], outputs=[None])
        assert show(program)[-2:] == ["linear_2 = aten.linear(linear_1, redistribute_3)  S0", "return [linear_2]"]

    def test_a_mean_over_the_batch_is_the_global_mean(self) -> None:
        class Mean(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.lin = nn.Linear(4, 4, bias=False)

            def forward(self, x: Tensor) -> Tensor:
                return self.lin(x).mean(0)

        graph = captured(Mean(), torch.rand(8, 4))
        (mean,) = (n for n in graph.graph.nodes if "mean" in n.name)
        (reduced,) = {str(t.mode) for t in call_modes(mean) if t.mode.kind == "shard" and t.operands[0] == Shard(0)}
        modes = {"lin/aten.linear#0": ["shard:...0"], mean.meta["key"]: [reduced]}
        lines = show(localized(graph, modes, axes=[("dp", 2)]))
        assert lines[-4:] == [
            "mean = aten.mean.dim(linear, [0])  P",
            "div_tensor = aten.div.Tensor(mean, 2)  P",
            "redistribute_2 = collectives.redistribute(div_tensor, 'P', 'I', 'mesh0/dp')  I",
            "return [redistribute_2]",
        ]

    def test_a_size_that_the_model_reads_stays_the_global_one(self) -> None:
        class ByRows(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.lin = nn.Linear(4, 4, bias=False)

            def forward(self, x: Tensor) -> Tensor:
                y = self.lin(x)
                return y.sum() / y.shape[0]

        graph = captured(ByRows(), torch.rand(8, 4))
        lines = show(localized(graph, {"lin/aten.linear#0": ["shard:...0"]}, axes=[("dp", 2)]))
        sizes = [line for line in lines if "sym_size" in line]
        for line in sizes:
            source = line.split("(")[1].split(",")[0]
            if next(text for text in lines if text.startswith(f"{source}")).endswith("S0"):
                name = line.split(" =")[0]
                assert any(f"operator.mul({name}, 2)" in text for text in lines), lines


class TestSeveralAxes:
    def test_data_and_tensor_together(self) -> None:
        modes = {
            "pre/aten.linear#0": ["shard:...0", "I"],
            "w1/aten.linear#0": ["shard:...0", "shard:n"],
            "w2/aten.linear#0": ["shard:...0", "shard:k"],
        }
        parameters = {"w1.weight": "S0,S0", "w2.weight": "I,S1"}
        program, specification = placed(
            captured(MLP(), torch.rand(8, 4)), modes, parameters, axes=[("dp", 2), ("tp", 2)], outputs=[None]
        )
        verify_placements(program, specification)
        text = "\n".join(show(program))
        # Only the innermost of the axes that cut a dim may be gathered alone: w1 goes S0,S0 -> R,S0 in more than one.
        assert "aten.linear(redistribute" in text and text.rstrip().endswith("]")
        kinds = [line.split("(")[1].split(", ")[1:4] for line in show(program) if "collectives.redistribute" in line]
        assert ["'P'", "'I'", "'mesh0/tp')  S0,I"] in kinds, kinds

    def test_a_sum_over_both_axes_is_one_all_reduce(self) -> None:
        class Sum(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(8, 8))

            def forward(self, x: Tensor) -> Tensor:
                return (x * self.weight).sum()

        graph = captured(Sum(), torch.rand(8, 8))
        node = next(n for n in graph.graph.nodes if "sum" in n.name)
        shards = [str(t.mode) for t in call_modes(node) if t.mode.kind == "shard" and t.result.kind == "P"]
        lines = show(localized(graph, {node.meta["key"]: shards[:2]}, axes=[("dp", 2), ("tp", 2)]))
        sums = [line for line in lines if "'P', 'I'" in line]
        assert len(sums) == 1 and "'mesh0/dp+tp'" in sums[0], lines


def test_an_output_may_be_reshaped_to_sizes_that_are_divided() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).flatten(0, 1)

    graph = captured(Rows(), torch.rand(8, 3, 4))
    modes = {node.meta["key"]: ["shard:...0"] for node in graph.graph.nodes if "linear" in node.name}
    (rows,) = [node for node in graph.graph.nodes if "reshape" in node.name]
    modes[rows.meta["key"]] = [str(way.mode) for way in call_modes(rows) if way.result == Shard(0)]
    program, specification = placed(graph, modes, axes=[("dp", 2)], outputs=[None])
    assert any("floordiv" in line for line in show(program)), show(program)
    verify_placements(program, specification)


def test_what_an_operator_cannot_do_is_refused_by_its_key() -> None:
    with pytest.raises(ValueError, match=r"w1/aten\.linear#0 cannot run as shard:zz"):
        localized(captured(MLP(), torch.rand(8, 4)), {"w1/aten.linear#0": ["shard:zz"]})
