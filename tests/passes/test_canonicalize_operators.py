"""`canonicalize_operators`: what is left of an operator, as text; that the numbers stay is proved in tests/rules."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from autoparallel._torch.export import make_fake_mode
from autoparallel.passes.canonicalize_operators import canonicalize_operators
from tests.passes.support import captured, show


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


def lines_of(function: Callable[..., Any] | nn.Module, *args: Tensor, loss_fn: Any = None) -> list[str]:
    model = function if isinstance(function, nn.Module) else Function(function)
    return show(captured(model, *args, loss_fn=loss_fn).module)


def operators(lines: list[str]) -> list[str]:
    return [line.split(" = ")[1].split("(")[0] for line in lines if " = " in line]


class TestTheExample:
    def test_after(self) -> None:
        logits, target = torch.rand(8, 2, 10), torch.randint(0, 10, (16,))
        assert lines_of(lambda x: x.view(-1, 10), logits, target, loss_fn=F.cross_entropy) == [
            "args_0",
            "args_1",
            "reshape_default = aten.reshape(args_0, [-1, 10])",
            "cross_entropy_sum = losses.cross_entropy_sum(reshape_default, args_1, None, -100, 0.0)",
            "cross_entropy_weight = losses.cross_entropy_weight(args_1, None, -100, torch.float32)",
            "div_tensor = aten.div.Tensor(cross_entropy_sum, cross_entropy_weight)",
            "return [div_tensor]",
        ]


class TestRowsOfLosses:
    def test_those_that_were_flattened_stay_in_their_dims_and_are_rounded_as_they_were(self) -> None:
        def loss(x: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(x.view(-1, 10).bfloat16().float(), target.view(-1))

        logits, target = torch.rand(8, 2, 10), torch.randint(0, 10, (8, 2))
        assert lines_of(loss, logits, target)[2:5] == [
            "_to_copy_default = aten._to_copy(args_0, dtype=torch.bfloat16)",
            "_to_copy_default_1 = aten._to_copy(_to_copy_default, dtype=torch.float32)",
            "cross_entropy_sum = losses.cross_entropy_sum(_to_copy_default_1, args_1, None, -100, 0.0)",
        ]


class TestRandomness:
    def test_every_dropout_has_a_number_of_its_own(self) -> None:
        lines = lines_of(lambda x: F.dropout(F.dropout(x, 0.5, True) + 1, 0.1, True), torch.rand(8, 4))
        assert [line.split(", ")[-1] for line in lines if "draws.dropout" in line] == ["0)", "1)"]

    @pytest.mark.parametrize("p, training", [(0.5, False), (0.0, True)])
    def test_one_that_does_nothing_is_gone(self, p: float, training: bool) -> None:
        found = operators(lines_of(lambda x: F.dropout(x, p, training) + 1, torch.rand(8, 4)))
        assert not any("dropout" in name for name in found) and found[-1] == "aten.add.Tensor"

    def test_attention_drops_its_weights_by_position(self) -> None:
        def attend(q: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5, is_causal=True)

        found = operators(lines_of(attend, torch.rand(8, 2, 3, 4)))
        assert "draws.dropout" in found and "aten.scaled_dot_product_attention" not in found

    def test_attention_without_dropout_stays_whole(self) -> None:
        found = operators(lines_of(lambda q: F.scaled_dot_product_attention(q, q, q), torch.rand(8, 2, 3, 4)))
        assert found == ["aten.scaled_dot_product_attention"]


class TestBatchNorm:
    def test_statistics_are_means_over_the_batch(self) -> None:
        found = operators(lines_of(nn.BatchNorm1d(4), torch.rand(8, 4)))
        assert found.count("aten.mean.dim") == 2, "mean and variance"
        assert found.count("aten.detach") == 2, "no gradient flows into the running statistics"
        assert not any("batch_norm" in name for name in found)

    def test_the_unbiased_variance_divides_by_the_actual_batch(self) -> None:
        lines = lines_of(nn.BatchNorm1d(4), torch.rand(8, 4))
        assert any("aten.sym_size.int(args_0, 0)" in line for line in lines)
        assert not any(re.search(r"\b8\b", line) for line in lines), "the size is not written down"

    def test_evaluation_changes_no_buffer(self) -> None:
        found = operators(lines_of(nn.BatchNorm1d(4).eval(), torch.rand(8, 4)))
        assert "aten.mean.dim" not in found and "aten.rsqrt" in found

    @pytest.mark.parametrize("training", [True, False])
    def test_the_backward_finds_one_tensor_of_its_size(self, training: bool) -> None:
        norm = nn.BatchNorm2d(3).double().train(training)
        x = torch.randn(4, 3, 5, 5, dtype=torch.float64)
        program = captured(norm, x)
        values = {**dict(norm.named_parameters()), **dict(norm.named_buffers())}
        places = [n for n in program.graph.nodes if n.op == "placeholder"]
        names = {**program.parameters, **program.buffers}
        x.requires_grad_()
        saved: dict[int, Tensor] = {}

        def keep(value: Tensor) -> Tensor:
            return saved.setdefault(id(value.untyped_storage()), value)

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
            made = program.module(*[values[names[n.name]] if n.name in names else x for n in places])
        assert [t.shape for t in saved.values() if t.numel() == x.numel()] == [x.shape]
        torch.testing.assert_close(made[-1], norm(x))


class TestShapes:
    def test_views_become_reshapes(self) -> None:
        lines = lines_of(lambda x: x.view(x.shape[0], 2, 4), torch.rand(8, 8))
        size = lines[1].split(" = ")[0]
        assert lines[2:] == [f"reshape_default = aten.reshape(args_0, [{size}, 2, 4])", "return [reshape_default]"]

    def test_several_results_become_several_operators(self) -> None:
        def parts(x: Tensor) -> list[Tensor]:
            a, b = x.split(4, -1)
            c, d = x.unflatten(1, (2, 4)).unbind(1)
            return [a, b, c, d]

        found = operators(lines_of(parts, torch.rand(8, 8)))
        assert "_operator.getitem" not in found
        assert found.count("aten.slice.Tensor") == 2 and found.count("aten.select.int") == 2

    def test_a_slice_of_everything_is_gone(self) -> None:
        assert operators(lines_of(lambda x: x[:, 0:] + 1, torch.rand(8, 4))) == ["aten.add.Tensor"]


def test_nothing_dead_is_left() -> None:
    def wasteful(x: Tensor) -> Tensor:
        x.relu() + 3
        assert x.shape[1] == 4
        return x * 2

    assert operators(lines_of(wasteful, torch.rand(8, 4))) == ["aten.mul.Tensor"]


def test_changes_in_place_are_gone() -> None:
    def change(x: Tensor) -> Tensor:
        y = x + 1
        y.relu_()
        y[:, 0] = 0
        y += x
        return y

    for line in lines_of(change, torch.rand(8, 4)):
        assert not re.search(r"aten\.\w+_[.(]", line), line


class TestSeveralResults:
    @staticmethod
    def canonical(target: Any, results: list[int], *shapes: tuple[int, ...], rest: tuple[Any, ...] = ()) -> fx.Graph:
        """The graph of one call, of whose results some are returned, after the pass."""
        graph = fx.Graph()
        with make_fake_mode():
            inputs = [graph.placeholder(f"x{i}") for i in range(len(shapes))]
            for node, shape in zip(inputs, shapes, strict=True):
                node.meta["val"] = torch.empty(shape)
            call = graph.call_function(target, (*inputs, *rest))
            call.meta["val"] = target(*(node.meta["val"] for node in inputs), *rest)
        parts = [graph.call_function(operator.getitem, (call, i)) for i in results]
        for part, i in zip(parts, results, strict=True):
            part.meta["val"] = call.meta["val"][i]
        graph.output(tuple(parts))
        canonicalize_operators(fx.GraphModule(nn.Module(), graph))
        return graph

    def test_readers_of_a_pooled_tensor_share_one_pool(self) -> None:
        pool = torch.ops.aten.max_pool2d_with_indices.default
        graph = self.canonical(pool, [0, 0, 0], (2, 3, 8, 8), rest=([2, 2],))
        made = [node for node in graph.nodes if node.op == "call_function"]
        assert [node.target for node in made] == [torch.ops.aten.max_pool2d.default]
        assert graph.output_node().args[0] == (made[0],) * 3

    def test_the_gates_that_torch_splits_in_a_cell_are_slices(self) -> None:
        graph = self.canonical(torch.ops.aten.unsafe_split.Tensor, [0, 3], (2, 8), rest=(2, 1))
        calls = [node for node in graph.nodes if node.op == "call_function"]
        assert [node.target for node in calls] == [torch.ops.aten.slice.Tensor] * 2
        assert [tuple(node.args[1:]) for node in calls] == [(1, 0, 2), (1, 6, 8)]

    def test_running_statistics_that_are_not_trained_stay_what_they_are(self) -> None:
        norm = torch.ops.aten._native_batch_norm_legit_functional.default
        shapes = ((6, 3), (3,), (3,), (3,), (3,))
        graph = self.canonical(norm, [0, 3, 4], *shapes, rest=(False, 0.1, 1e-5))
        values = [torch.randn(6, 3), torch.randn(3), torch.randn(3), torch.randn(3), torch.rand(3) + 0.5]
        made = fx.GraphModule(nn.Module(), graph)(*values)
        expected = norm(*values, False, 0.1, 1e-5)
        for ours, i in zip(made, (0, 3, 4), strict=True):
            torch.testing.assert_close(ours, expected[i])
