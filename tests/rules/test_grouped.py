"""Grouped linear layers beyond what the proof of their rule shows: extreme routings, bfloat16, rows nobody serves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autoparallel.comm.simulate import simulate
from autoparallel.operators.experts import grouped_linear, grouped_linear_exchanged
from tests.rules.examples import real

ROUTINGS = {
    "all to one": [5] * 8,
    "none to the first rank": [2, 3, 4, 5, 5, 4, 3, 2],
    "each rank to itself": [0, 1, 0, 1, 2, 3, 4, 5],
    "some to nobody": [-1, 0, 6, 1, -7, 2, 100, 5],
}


def _plain(x: Tensor, weight: Tensor, experts: Tensor) -> Tensor:
    served = (experts >= 0) & (experts < len(weight))
    rows = torch.bmm(x.unsqueeze(1), weight[experts.where(served, 0)]).squeeze(1)
    return rows * served.unsqueeze(-1)


def _gradients(y: Tensor, x: Tensor, weight: Tensor, cotangent: Tensor) -> tuple[Tensor, ...]:
    return (y.detach(), *torch.autograd.grad(y, (x, weight), cotangent))


@pytest.mark.parametrize("routing", ROUTINGS)
def test_rows_reach_their_experts_however_uneven(routing: str) -> None:
    experts = torch.tensor(ROUTINGS[routing])
    x, weight, cotangent = real(8, 4), real(6, 4, 3), real(8, 3)
    inputs = x.clone().requires_grad_(), weight.clone().requires_grad_()
    expected = _gradients(_plain(*inputs, experts), *inputs, cotangent)
    whole = _gradients(grouped_linear(*inputs, experts), *inputs, cotangent)
    for ours, plain in zip(whole, expected, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)

    def rank(index: int) -> tuple[Tensor, ...]:
        mine = slice(4 * index, 4 * index + 4)
        local = x[mine].clone().requires_grad_(), weight[3 * index : 3 * index + 3].clone().requires_grad_()
        y = grouped_linear_exchanged(*local, experts[mine], "mesh/ep", "mesh/ep")
        return _gradients(y, *local, cotangent[mine])

    for parts, plain in zip(zip(*simulate(rank, (2,), ("ep",)), strict=True), expected, strict=True):
        torch.testing.assert_close(torch.cat(parts), plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("out", [16, 12], ids=["torch's grouped product", "one product per expert"])
def test_bfloat16(out: int) -> None:
    experts = torch.tensor([3, -1, 0, 0, 9, 3, 1, 0])
    exact = real(8, 8).float(), real(4, 8, out).float()
    inputs = tuple(t.bfloat16().requires_grad_() for t in exact)
    wide = tuple(t.detach().float().requires_grad_() for t in inputs)
    cotangent = real(8, out).bfloat16()
    found = _gradients(grouped_linear(*inputs, experts), *inputs, cotangent)
    expected = _gradients(_plain(*wide, experts), *wide, cotangent.float())
    for ours, plain in zip(found, expected, strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.float(), plain, rtol=0.02, atol=0.02)


def test_only_what_is_wanted_is_differentiated() -> None:
    experts = torch.tensor([1, 0, 1])
    for wants_x, wants_weight in ((True, False), (False, True)):
        x, weight = real(3, 4).requires_grad_(wants_x), real(2, 4, 3).requires_grad_(wants_weight)
        grouped_linear(x, weight, experts).sum().backward()
        assert (x.grad is not None) == wants_x and (weight.grad is not None) == wants_weight
