"""What is made of as many rows as values select is sharded where it leaves rows alone, proved by execution; and where
it does not, it has no rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from autoparallel.capture.functional.selections import group_selections
from autoparallel.operators.control_flow import is_selection
from autoparallel.rules import rule_for
from autoparallel.rules.calls import tensor_operands
from tests.rules.examples import real

Function = Callable[..., Tensor]
ROWS, WIDTH = 8, 3


class _Module(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


def _selection_of(function: Function, inputs: tuple[Tensor, ...]) -> tuple[fx.Node, list[Tensor]]:
    """The only call that a function's trace makes of selected rows, and its operands."""
    program = torch.export.export(_Module(function), inputs, strict=False)
    group_selections(program)
    (node,) = (node for node in program.graph.nodes if is_selection(node.target))
    assert isinstance(node, fx.Node)
    values: dict[fx.Node, Any] = dict(zip(program.graph.find_nodes(op="placeholder"), inputs, strict=True))
    for call in program.graph.nodes:
        if call is node:
            break
        if call.op == "call_function":
            values[call] = call.target(*fx.map_arg(call.args, values.__getitem__), **call.kwargs)
    return node, [values[x] for x in tensor_operands(node)]


def _part(x: Tensor, dim: int | None, rank: int) -> Tensor:
    return x if dim is None else x.chunk(2, dim)[rank]


def _run(node: fx.Node, operands: list[Tensor], cotangent: Tensor | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The result of a call, and what its gradients are."""
    inputs = [x.clone().requires_grad_(x.is_floating_point()) for x in operands]
    result = node.target((*inputs,))  # type: ignore[operator]
    flowing = [x for x in inputs if x.requires_grad]
    return result, torch.autograd.grad(result, flowing, torch.ones_like(result) if cotangent is None else cotangent)


def _inputs() -> tuple[Tensor, ...]:
    """Rows, what they are put into, weights, the experts of each row, and a mask that the first half has none of."""
    experts = torch.tensor([[0, 1], [1, 0], [1, 2], [2, 1], [0, 2], [2, 0], [0, 1], [1, 2]])
    return real(ROWS, WIDTH), real(ROWS, WIDTH), real(WIDTH, WIDTH), experts, torch.arange(ROWS) >= ROWS // 2 + 1


def put(h: Tensor, out: Tensor, weight: Tensor, experts: Tensor, mask: Tensor) -> Tensor:
    return out.index_put((mask,), F.gelu(h[mask] @ weight))


def add_to_places(h: Tensor, out: Tensor, weight: Tensor, experts: Tensor, mask: Tensor) -> Tensor:
    places = (experts == 1).nonzero()
    rows, slots = places[:, 0], places[:, 1]
    return out.index_add(0, rows, (h[rows] @ weight) * h[rows, slots, None])


def copy_to_places(h: Tensor, out: Tensor, weight: Tensor, experts: Tensor, mask: Tensor) -> Tensor:
    rows = mask.nonzero().squeeze(-1)
    return out.index_copy(0, rows, torch.softmax(h.index_select(0, rows) @ weight, -1))


def scatter(h: Tensor, out: Tensor, weight: Tensor, experts: Tensor, mask: Tensor) -> Tensor:
    rows = mask.nonzero()[:, 0]
    return out.scatter_add(0, rows[:, None].expand(-1, WIDTH), h[rows] @ weight)


def add_up(h: Tensor, out: Tensor, weight: Tensor, experts: Tensor, mask: Tensor) -> Tensor:
    return ((h[mask] @ weight) * out[mask]).sum()


def mask_twice(h: Tensor, out: Tensor, weight: Tensor, experts: Tensor, mask: Tensor) -> Tensor:
    rows = h[experts[:, 0] == 1] * out[experts[:, 0] == 1]
    return out.index_put((experts[:, 0] == 1,), rows @ weight)


def with_zeros(h: Tensor, out: Tensor, weight: Tensor, experts: Tensor, mask: Tensor) -> Tensor:
    rows = h[mask]
    return out.index_put((mask,), rows @ weight + rows.new_ones(rows.shape[0], WIDTH))


def in_heads(h: Tensor, out: Tensor, weight: Tensor, experts: Tensor, mask: Tensor) -> Tensor:
    heads = h[mask].unsqueeze(-1) * weight
    return out.index_put((mask,), heads.flatten(1)[:, :WIDTH] + heads.sum(-1))


ALONE = [put, add_to_places, copy_to_places, scatter, add_up, mask_twice, with_zeros, in_heads]


def running_sum(h: Tensor, out: Tensor, weight: Tensor, experts: Tensor, mask: Tensor) -> Tensor:
    return out.index_put((mask,), h[mask].cumsum(0))


def from_their_mean(h: Tensor, out: Tensor, weight: Tensor, experts: Tensor, mask: Tensor) -> Tensor:
    rows = h[mask]
    return out.index_put((mask,), rows - rows.mean(0))


def largest(h: Tensor, out: Tensor, weight: Tensor, experts: Tensor, mask: Tensor) -> Tensor:
    return h[mask].amax(0)


def over_rows(h: Tensor, out: Tensor, weight: Tensor, experts: Tensor, mask: Tensor) -> Tensor:
    return out.index_put((mask,), h[mask].softmax(0))


def backwards(h: Tensor, out: Tensor, weight: Tensor, experts: Tensor, mask: Tensor) -> Tensor:
    return out.index_put((mask,), h[mask].flip(0))


def by_their_number(h: Tensor, out: Tensor, weight: Tensor, experts: Tensor, mask: Tensor) -> Tensor:
    rows = h[mask]
    return out.index_put((mask,), rows / rows.shape[0])


def numbered(h: Tensor, out: Tensor, weight: Tensor, experts: Tensor, mask: Tensor) -> Tensor:
    rows = mask.nonzero().squeeze(-1)
    return out.index_put((rows,), h[rows] * rows[:, None])


def each_with_each(h: Tensor, out: Tensor, weight: Tensor, experts: Tensor, mask: Tensor) -> Tensor:
    rows = h[mask]
    return out.index_put((mask,), (rows @ rows.T).softmax(-1) @ rows)


def looked_up_elsewhere(h: Tensor, out: Tensor, weight: Tensor, experts: Tensor, mask: Tensor) -> Tensor:
    rows = mask.nonzero().squeeze(-1)
    return out.index_put((rows,), weight.repeat(4, 1)[rows])


def with_others(h: Tensor, out: Tensor, weight: Tensor, experts: Tensor, mask: Tensor) -> Tensor:
    first, second = h[experts[:, 0] == 0], h[experts[:, 0] == 1]
    torch._check(first.shape[0] == second.shape[0])
    return out.index_put((experts[:, 0] == 0,), first * second)


MIXED = [
    running_sum, from_their_mean, largest, over_rows, backwards, by_their_number, numbered, each_with_each,
    looked_up_elsewhere, with_others,
]  # fmt: skip


@pytest.mark.parametrize("function", ALONE, ids=lambda function: function.__name__)
def test_rows_that_are_left_alone_are_sharded(function: Function) -> None:
    node, operands = _selection_of(function, _inputs())
    rule = rule_for(node)
    assert rule is not None
    (factor,) = rule.factors()
    dims, end = [rule.dim_of(factors, factor) for factors in rule.operands], rule.dim_of(rule.result, factor)
    assert sum(dim is not None for dim in dims) >= 2
    cotangent = real(*node.meta["val"].shape)
    expected, gradients = _run(node, operands, cotangent)
    results, of_ranks = zip(
        *(
            _run(node, [_part(x, dim, i) for x, dim in zip(operands, dims, strict=True)], _part(cotangent, end, i))
            for i in range(2)
        ),
        strict=True,
    )
    flowing = [dim for x, dim in zip(operands, dims, strict=True) if x.is_floating_point()]
    ours = [_join(parts, dim) for parts, dim in zip(zip(*of_ranks, strict=True), flowing, strict=True)]
    torch.testing.assert_close([_join(results, end), *ours], [expected, *gradients], rtol=1e-12, atol=1e-12)


def _join(parts: tuple[Tensor, ...], dim: int | None) -> Tensor:
    return torch.stack(parts).sum(0) if dim is None else torch.cat(parts, dim)


@pytest.mark.parametrize("function", MIXED, ids=lambda function: function.__name__)
def test_rows_that_are_mixed_have_no_rule(function: Function) -> None:
    assert rule_for(_selection_of(function, _inputs())[0]) is None
