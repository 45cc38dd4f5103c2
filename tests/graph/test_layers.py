"""Layers with several results, control flow on values and losses of rows: as in eager, on one rank and sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.distributed import run_distributed
from tests.graph.eager import TOLERANCE, difference
from tests.runtime.support import mesh_of

OLD = torch.__version__.startswith(("2.11.", "2.12."))


def lstm(m: Any, x: Tensor) -> Tensor:
    """The outputs and both last states are used, and the steps come first."""
    zeros = x.new_zeros(1, x.shape[0], 2)
    out, h, c = torch.lstm(x.transpose(0, 1), [zeros, zeros], [m.w, m.w[:, :2]], False, 1, 0.0, True, False, False)
    return out[-1] * m.b[:2] + h[0].sin() + c.sum(0)


def gru(m: Any, x: Tensor) -> Tensor:
    weights = [m.w[:6], m.w[:6, :2], m.b[:6], m.b[2:]] * 2
    out, last = torch.gru(x, x.new_zeros(2, x.shape[0], 2), weights, True, 1, 0.0, True, True, True)
    return out.square().sum((1, 2)) + last.sum((0, 2))


def cells(m: Any, x: Tensor) -> Tensor:
    h = c = x.new_zeros(x.shape[0], 2)
    for step in x.unbind(1)[:2]:
        h, c = torch.lstm_cell(step, (h, c), m.w, m.w[:, :2], m.b, m.b)
        h = torch.gru_cell(step, h, m.w[:6], m.w[:6, :2], m.b[:6], m.b[2:])
        h = torch.rnn_tanh_cell(step, h, m.w[:2], m.w[:2, :2], m.b[:2], m.b[2:4])
    return h * c


def bags(m: Any, x: Tensor) -> Tensor:
    ids = x.abs().argsort(-1)[:, 0, :3]
    bags = [F.embedding_bag(ids, m.w, mode=mode) for mode in ("sum", "mean", "max")]
    bags.append(F.embedding_bag(ids, m.w, mode="sum", per_sample_weights=x[:, 0, :3] * m.b[:3]))
    return torch.cat(bags, -1) * m.b.sum()


def positions(m: Any, x: Tensor) -> Tensor:
    h = x @ m.w + m.b
    values = torch.cummax(h, 1)[0] + torch.cummin(h, 2).values
    least = h.kthvalue(2, 1).values + h.median(1, keepdim=True).values.squeeze(1) * 3
    greatest = h.amax(1) if OLD else torch.aminmax(h, dim=1).max  # torch differentiates it from 2.13 on
    return values.sum(1) * least + greatest


def pools(m: Any, x: Tensor) -> Tensor:
    h = x @ m.w + m.b
    pooled, where = F.adaptive_max_pool1d(h, 3, return_indices=True)
    planes, places = F.max_pool2d(h[:, None], 2, return_indices=True)
    whole = F.max_unpool2d(planes, places, 2)
    return pooled.sum((1, 2)) + (pooled * where).sum((1, 2)) + whole.square().sum((1, 2, 3))


def spectrum(m: Any, x: Tensor) -> Tensor:
    """Slices of complex numbers are written."""
    frequencies = torch.fft.rfft(x @ m.w)
    kept = torch.zeros_like(frequencies)
    kept[..., :2] = frequencies[..., :2] * 2
    kept[:, 0] = frequencies[:, 1]
    return torch.fft.irfft(kept, n=8) * m.b


def rows_of_a_loss(m: Any, x: Tensor) -> Tensor:
    logits, target = (x @ m.w + m.b)[:, 0], x[:, 0].argmax(-1)
    weight = torch.arange(1.0, 9.0, dtype=x.dtype)
    plain = F.cross_entropy(logits, target, reduction="none") * torch.arange(x.shape[0])
    weighed = F.cross_entropy(logits, target, weight, ignore_index=3, reduction="none", label_smoothing=0.1)
    return plain + weighed + F.nll_loss(logits.log_softmax(-1), target, reduction="none").exp()


def choice(m: Any, x: Tensor) -> Tensor:
    """The way that is not taken reads the vector, which gets zeros; a slice is written in the other."""
    w, b = m.w, m.b

    def taken(h: Tensor) -> Tensor:
        out = (h @ w).clone()
        out[:, 0] = out[:, 1] * 2
        return out

    return torch.cond(x.sum() > -1e9, taken, lambda h: h * b, (x.sin(),))


def loop(m: Any, x: Tensor) -> Tensor:
    from torch._higher_order_ops.while_loop import while_loop

    steps = while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, h * 1.5), (torch.tensor(0), x.cos()))
    return (x * steps[1]) @ m.w + m.b


def scan(m: Any, x: Tensor) -> Tensor:
    from torch._higher_order_ops.scan import scan as torch_scan

    def step(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        return carry + row, carry * row

    carry, made = torch_scan(step, torch.zeros_like(x[:, 0]), (x @ m.w).transpose(0, 1))
    return made.sum(0) + carry * m.b


EQUAL = (
    lstm, gru, cells, bags, positions, pools, spectrum, rows_of_a_loss, choice, loop,
    *(() if OLD else (scan,)),  # before 2.13 torch's own gradients are wrong where the first state has none
)  # fmt: skip


@pytest.mark.wide_where(lambda forward: forward not in (lstm, choice))
@pytest.mark.parametrize("forward", EQUAL, ids=lambda f: f.__name__)
def test_equal_to_eager(forward: Any) -> None:
    assert difference(forward, steps=1) < TOLERANCE


def _on_two_ranks(plan: str) -> dict[str, float]:
    return {f.__name__: difference(f, mesh=mesh_of(2), plan=plan, steps=1) for f in EQUAL}


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["fsdp", "tensor_parallel"])
def test_two_ranks(plan: str) -> None:
    for results in run_distributed(_on_two_ranks, plan, world_size=2):
        assert all(v < TOLERANCE for v in results.values()), results
        assert plan != "fsdp" or max(results.values()) > 0, "what is sharded is added up in another order"
