"""Operators that scripts and optimizers tell where to write, that change a tensor's shape, and that mix lists."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.runtime.support import Net, batch, compiled_pair, off, raised, run_on_ranks

Made = Callable[[list[Tensor]], Tensor]


def _into(operator: Callable[..., Any], *operands: Any, like: Tensor, **options: Any) -> Tensor:
    out = torch.zeros_like(like)
    assert operator(*operands, out=out, **options) is out
    return out


def _replaced(p: list[Tensor]) -> Tensor:
    norms = [x.norm() for x in p[:2]]
    torch.minimum(*norms, out=norms[1])
    return norms[1]


def _turned(x: Tensor) -> Tensor:
    x = x.clone()
    x.t_()
    x.unsqueeze_(1)
    x.transpose_(0, 2)
    return x.squeeze_(1) * 2


def _copied(x: Tensor) -> Tensor:
    again, beside = copy.deepcopy([x, x])
    assert again is beside and again is not x
    x.mul_(2)
    return again


def _ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64)


def _indices(p: list[Tensor]) -> Tensor:
    values, indices = torch.zeros_like(p[0][0]), torch.zeros_like(p[0][0], dtype=torch.int64)
    torch.max(p[0], 0, out=(values, indices))
    return values + indices


MADE: dict[str, Made] = {
    "of parts": lambda p: _into(torch.mul, p[0], p[1].t(), like=p[0]),
    "of parts otherwise cut": lambda p: _into(torch.add, p[0].t(), p[1], like=p[1]),
    "of plain tensors": lambda p: _into(torch.mul, torch.ones(16, 1), torch.arange(8.0), like=p[0]),
    "of numbers": lambda p: _into(torch.arange, 8, like=p[0][0]),
    "into a plain one": lambda p: torch.sum(p[0], 1, out=torch.zeros(16).double()),
    "into one of no size": lambda p: torch.sum(p[0], 1, out=torch.zeros(0).double()),
    "into one of its operands": lambda p: torch.sqrt(x := p[0].abs(), out=x),
    "weighted": lambda p: _into(torch.lerp, p[0], p[1].t(), like=p[0], weight=0.3),
    "a product": lambda p: _into(torch.matmul, p[1], p[0], like=p[1] @ p[0]),
    "joined": lambda p: _into(torch.cat, [p[0], p[0]], like=p[0].repeat(2, 1)),
    "a norm": _replaced,
    "two results": _indices,
    "a vector by a matrix": lambda p: torch.arange(16).double() @ p[0],
    "a row by a matrix": lambda p: p[0][1] @ p[1],
    "a matrix by a row": lambda p: p[0] @ p[0][3],
    "turned": lambda p: _turned(p[0].detach()),
    "deeply copied": lambda p: _copied(p[0].grad.clone()),  # type: ignore[union-attr]
    "convolved rows": lambda p: F.conv1d(p[0].unsqueeze(1), _ones(2, 1, 3) * p[1].sum(), padding=1),
    "convolved columns": lambda p: F.conv1d(p[0].t().unsqueeze(0), _ones(2, 8, 3) / 3, stride=2),
    "a kernel": lambda p: F.conv_transpose1d(_ones(2, 16, 5), p[0].unsqueeze(-1), padding=0),
    "unfolded": lambda p: F.unfold(p[0][None, None], 3),
    "reflected": lambda p: F.pad(p[0][None], (1, 1), mode="reflect"),
    "lists beside plain ones": lambda p: torch._foreach_div([p[0], p[1]], [_ones(8) * 3, _ones(8, 1) * 2])[1],
    "plain lists beside them": lambda p: torch._foreach_mul([_ones(16, 8), _ones(8, 16)], [p[0], p[1]])[0],
}
"""What is made of a matrix of 16 rows and 8 columns, and of another of 8 and 16."""


def _make(plan: str) -> dict[str, Any]:
    model, plain = compiled_pair(partial(Net, 8, 16, 8), 2, plan=plan, loss_fn=None)
    for m in (model, plain):
        m(batch(0)[0]).square().sum().backward()
    mine, theirs = ([m.up.weight, m.down.weight] for m in (model, plain))
    seen: dict[str, Any] = {"cut": any(p.to_local().shape != p.shape for p in mine)}
    with torch.no_grad():
        for what, make in MADE.items():
            seen[what] = off(make(mine), make(theirs))
        for m, (first, second) in ((model, mine), (plain, theirs)):  # into parameters, which go on from there
            torch.sub(second.t(), first, alpha=0.3, out=first)
            m.norm.weight.data.copy_(torch.arange(16).double() @ first[:, :1] * m.norm.bias.exp())
        seen["of another shape"] = raised(lambda: torch.sum(mine[0], 0, out=torch.zeros_like(mine[0])))
        seen["a parameter"] = raised(mine[0].t_)
        seen["sent"] = raised(lambda: dist.all_reduce(mine[0].grad)) + raised(lambda: dist.broadcast(mine[0].data, 0))
    kernel = _ones(2, 1, 3).requires_grad_()
    for m in (model, plain):
        m.zero_grad()
        smooth = F.conv1d(m.up.weight.unsqueeze(1), kernel * m.norm.bias.exp().sum(), padding=1)  # type: ignore[operator, union-attr]
        (
            m(batch(1)[0]).square().sum() + 0.1 * smooth.square().sum() + F.pad(smooth, (1, 1), mode="reflect").sum()
        ).backward()
        seen["of a kernel"] = off(kernel.grad, seen.pop("first kernel", kernel.grad))  # type: ignore[arg-type]
        seen["first kernel"], kernel.grad = kernel.grad, None
    seen["a plain gradient"] = float(isinstance(seen.pop("first kernel"), DTensor))
    seen["parameters"] = max(off(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    seen["gradients"] = max(off(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))  # type: ignore[arg-type]
    return seen


@pytest.mark.parametrize("plan", ["fsdp", pytest.param("tensor_parallel", marks=pytest.mark.wide)])
def test_results_are_written_where_they_are_wanted(plan: str) -> None:
    for seen in run_on_ranks(_make, plan, world_size=2):
        assert seen.pop("cut")
        assert "give one of the result's shape" in seen.pop("of another shape")
        assert seen.pop("sent").count("leave it out: gradients are those of the whole batch") == 2
        assert "changes the shape of a parameter" in seen.pop("a parameter")
        assert all(far < 1e-12 for far in seen.values()), seen
