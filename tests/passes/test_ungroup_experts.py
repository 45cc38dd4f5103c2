"""`ungroup_experts`: sorted tokens and copied weights become linear layers of which every row picks its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoparallel.rules import rule_for
from tests.models import build
from tests.passes.support import captured, show

EXPERTS, WIDTH, HIDDEN, CHOICES = 4, 8, 16, 2


def sort(ids: Tensor) -> tuple[Tensor, Tensor]:
    order = ids.argsort(stable=True)
    return order, torch.histc(ids.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0).int()


def inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).index_put((order,), torch.arange(order.shape[0]))


def by_argsort(layer: Layer, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    order, ends = sort(ids)
    made = layer.grouped(x[order // CHOICES], ends) * weights[order].unsqueeze(-1)
    return made[order.argsort()].view(-1, CHOICES, WIDTH).sum(1)


def by_sort(layer: Layer, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    sorted_ids, order = ids.sort(stable=True)
    ends = F.one_hot(sorted_ids, EXPERTS).sum(0).cumsum(0, dtype=torch.int32)
    made = layer.grouped(x.repeat_interleave(CHOICES, 0).index_select(0, order), ends)
    return (made * weights[order].unsqueeze(-1))[inverse(order)].view(-1, CHOICES, WIDTH).sum(1)


def by_index_add(layer: Layer, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    order, ends = sort(ids)
    made = layer.grouped(x[order // CHOICES], ends) * weights[order].unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, order // CHOICES, made)


def by_copies(layer: Layer, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    rows = x.repeat_interleave(CHOICES, 0)
    hidden = torch.bmm(rows.unsqueeze(1), layer.up[ids]).squeeze(1)
    made = torch.bmm(layer.down.mT[ids], F.silu(hidden).unsqueeze(-1)).squeeze(-1)
    return (made * weights.unsqueeze(-1)).view(-1, CHOICES, WIDTH).sum(1)


WAYS = {f.__name__: f for f in (by_argsort, by_sort, by_index_add, by_copies)}


class Layer(nn.Module):
    """A dropless layer of experts; the experts compute in bfloat16, since torch traces its grouped product in no other
    dtype."""

    def __init__(self, way: Callable[..., Tensor]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.way = way
        self.router = nn.Parameter(torch.randn(WIDTH, EXPERTS, generator=generator))
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN, generator=generator))
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH, generator=generator))

    def grouped(self, x: Tensor, ends: Tensor) -> Tensor:
        up, down = self.up.bfloat16(), self.down.bfloat16()
        return F.grouped_mm(F.silu(F.grouped_mm(x.bfloat16(), up, offs=ends)), down, offs=ends).float()

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = (x @ self.router).softmax(-1).topk(CHOICES, -1)
        return self.way(self, x, ids.flatten(), weights.flatten())


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN))

    def forward(self, *args: Tensor) -> Any:
        return self.function(self.weight, *args)


def operators(lines: list[str]) -> list[str]:
    return [line.split(" = ")[1].split("(")[0] for line in lines if " = " in line]


@pytest.mark.wide_where(lambda way: way != "by_argsort")
@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_sorted_any_more_and_the_numbers_stay(way: str) -> None:
    model = Layer(WAYS[way])
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
    graph = captured(model, x)
    found = operators(show(graph.module))
    assert found.count("experts.grouped_linear") == 2
    assert not [name for name in found if any(w in name for w in ("sort", "grouped_mm", "index", "histc", "bmm"))]
    calls = [n for n in graph.graph.nodes if n.op == "call_function" and isinstance(n.meta["val"], Tensor)]
    assert all(rule_for(n) is not None for n in calls)

    values = [dict(model.named_parameters())[name] for name in graph.parameters.values()]
    ours = graph.module(*values, x)[0]
    theirs = model(x)
    torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02 * float(theirs.abs().max()))
    cotangent = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(2))
    for a, b in zip(
        torch.autograd.grad(ours, values, cotangent), torch.autograd.grad(theirs, values, cotangent), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02 * float(b.abs().max()))


class TestTheExample:
    def test_after(self) -> None:
        def layer(weight: Tensor, x: Tensor) -> Tensor:
            ids = x.argmax(-1)
            order = ids.argsort()
            ends = torch.histc(ids.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0).int()
            return F.grouped_mm(x[order].bfloat16(), weight.bfloat16(), offs=ends).relu()[order.argsort()]

        assert show(captured(Function(layer), torch.randn(8, WIDTH)).module) == [
            "p_model_weight",
            "args_0",
            "argmax = aten.argmax(args_0, -1)",
            "_to_copy_default = aten._to_copy(args_0, dtype=torch.bfloat16)",
            "_to_copy_3 = aten._to_copy(p_model_weight, dtype=torch.bfloat16)",
            "grouped_linear = experts.grouped_linear(_to_copy_default, _to_copy_3, argmax)",
            "relu_default = aten.relu(grouped_linear)",
            "return [relu_default]",
        ]

    @pytest.mark.slow
    def test_mixtral_has_the_same_experts_in_both_implementations(self) -> None:
        for name in ("mixtral", "mixtral_grouped"):
            case = build(name)
            from tests.rules.test_capture import _capture

            args, kwargs = case.make_batch(0, 4)
            lines = show(_capture(case.model, args, kwargs).module)
            assert operators(lines).count("experts.grouped_linear") == 4, name
            assert not any("sort" in line or "grouped_mm" in line for line in lines), name


class TestWhatIsNotRecognisedStays:
    def test_experts_that_could_be_negative(self) -> None:
        def layer(weight: Tensor, x: Tensor, ids: Tensor) -> Tensor:
            return torch.bmm(x.unsqueeze(1), weight[ids])

        found = operators(show(captured(Function(layer), torch.randn(8, WIDTH), torch.randint(0, 4, (8,))).module))
        assert "aten.bmm" in found and "experts.grouped_linear" not in found

    def test_another_order_than_the_sort(self) -> None:
        def layer(weight: Tensor, x: Tensor) -> Tensor:
            ids = x.argmax(-1)
            order = ids.argsort(descending=True)
            ends = torch.histc(ids.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0).int()
            return F.grouped_mm(x[order].bfloat16(), weight.bfloat16(), offs=ends)[order.argsort()]

        found = operators(show(captured(Function(layer), torch.randn(8, WIDTH)).module))
        assert "aten._grouped_mm" in found and "experts.grouped_linear" not in found

    def test_counts_of_other_experts(self) -> None:
        def layer(weight: Tensor, x: Tensor) -> Tensor:
            ids, others = x.argmax(-1), x[:, :EXPERTS].argmax(-1)
            order = ids.argsort()
            ends = torch.histc(others.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0).int()
            return F.grouped_mm(x[order].bfloat16(), weight.bfloat16(), offs=ends)[order.argsort()]

        found = operators(show(captured(Function(layer), torch.randn(8, WIDTH)).module))
        assert "aten._grouped_mm" in found and "experts.grouped_linear" not in found

    def test_sorted_rows_that_are_mixed(self) -> None:
        def layer(weight: Tensor, x: Tensor) -> Tensor:
            order = x.argmax(-1).argsort()
            return x[order].cumsum(0)[order.argsort()]

        assert "aten.cumsum" in operators(show(captured(Function(layer), torch.randn(8, WIDTH)).module))
