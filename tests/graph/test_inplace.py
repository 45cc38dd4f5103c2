"""Writes in place, diagonals, strides and ``x.data``: as in eager, or refused with the line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import autoparallel
from tests.distributed import run_distributed
from tests.graph.eager import TOLERANCE, Program, difference, rows
from tests.runtime.support import mesh_of, raised


def part(m: Any, x: Tensor) -> Tensor:
    out = torch.zeros(x.shape[0], 6, 8, dtype=x.dtype)
    out[:, :4] = (x @ m.w)[:, :4]
    return out + m.b


def part_of_another_dtype(m: Any, x: Tensor) -> Tensor:
    out = torch.zeros(x.shape[0], 6, 8, dtype=torch.float32)
    out[:, :4] = (x @ m.w)[:, :4]
    return out.double() + m.b


def alternating(m: Any, x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[..., 0::2] = (x @ m.w)[..., :4]
    out[..., 1::2] = (x @ m.w)[..., 4:] * m.b[:4]
    return out


def broadcast(m: Any, x: Tensor) -> Tensor:
    out = (x @ m.w).clone()
    out[:, 2:4, ::2] = m.b[:4]
    return out


def copied(m: Any, x: Tensor) -> Tensor:
    return torch.empty_like(x).copy_(x @ m.w) + m.b


def overwritten(m: Any, x: Tensor) -> Tensor:
    """In eager, what is overwritten gets a gradient of zero, not none."""
    return (x @ m.w).clone().copy_(m.b)


def at_positions(m: Any, x: Tensor) -> Tensor:
    return (x @ m.w).clone().index_put_((torch.tensor([0, 1]),), m.b)


def masked(m: Any, x: Tensor) -> Tensor:
    out = (x @ m.w).clone().masked_fill_(x > 1, 0.5)
    out[x < -1] = 0
    out[(x > 0).all(-1)] = m.b.sum()
    return out


def scattered(m: Any, x: Tensor) -> Tensor:
    index = torch.zeros(x.shape[0], 6, 1, dtype=torch.int64)
    return (x @ m.w).clone().scatter_(2, index, m.b.sum().expand(x.shape[0], 6, 1))


def filled(m: Any, x: Tensor) -> Tensor:
    out = (x @ m.w).clone()
    out[:, 0].fill_(2.0)
    out[:, 1].zero_()
    out[:, 2].mul_(m.b)
    return out


def diagonal(m: Any, x: Tensor) -> Tensor:
    h = torch.einsum("bij,bkj->ik", x @ m.w, x) + m.b[:6]
    h.fill_diagonal_(0)
    return h * h


def diagonal_over_the_batch(m: Any, x: Tensor) -> Tensor:
    h = (x @ m.w)[:, 0]
    similar = h @ h.T
    similar.fill_diagonal_(0)
    return (similar * similar).mean() + m.b.sum()


def wrapped_diagonal(m: Any, x: Tensor) -> Tensor:
    h = (x @ m.w).sum(0)[:, :3] * 1
    h.fill_diagonal_(3.0, wrap=True)
    return h * m.b[:3]


def windows(m: Any, x: Tensor) -> Tensor:
    return (x @ m.w + m.b).as_strided((x.shape[0], 5, 2, 8), (48, 8, 8, 1)).sin()


def written_through_strides(m: Any, x: Tensor) -> Tensor:
    h = (x @ m.w + m.b) * 1
    h.as_strided((6, 8), (8, 1)).mul_(2)
    return h


def windows_of_another_layout(m: Any, x: Tensor) -> Tensor:
    """As Longformer's: of a tensor whose dims lie in another order in memory, in one piece."""
    h = (x @ m.w + m.b).permute(2, 0, 1)
    return h.as_strided((x.shape[0], 5, 2, 8), (48, 8, 8, 1)).sin()


def written_through_strides_of_another_layout(m: Any, x: Tensor) -> Tensor:
    h = (x @ m.w + m.b).transpose(0, 2) * 1
    h.as_strided((6, 8), (8, 1)).mul_(2)
    return h * h.detach().cumsum(1)


def data(m: Any, x: Tensor) -> Tensor:
    h = x @ m.w
    return h.data * h + m.b


def data_of_a_parameter(m: Any, x: Tensor) -> Tensor:
    return x @ m.w.data + x @ m.w * m.b.data.norm() + m.b


def straight_through(m: Any, x: Tensor) -> Tensor:
    h = x @ m.w
    return h + (h.round() - h).data + m.b


EQUAL = (
    part, part_of_another_dtype, alternating, broadcast, copied, overwritten, at_positions, masked, scattered, filled,
    diagonal, diagonal_over_the_batch, wrapped_diagonal, windows, written_through_strides,
    windows_of_another_layout, written_through_strides_of_another_layout, data, data_of_a_parameter,
    straight_through,
)  # fmt: skip


@pytest.mark.wide_where(lambda forward: forward not in EQUAL[::4])
@pytest.mark.parametrize("forward", EQUAL, ids=lambda f: f.__name__)
def test_equal_to_eager(forward: Any) -> None:
    assert difference(forward) < TOLERANCE


def write_to_data_that_is_kept(m: Any, x: Tensor) -> Tensor:
    h = (x @ m.w).exp()
    h.data[:, 0] = 0
    return h


def write_to_a_view_of_a_detached_tensor(m: Any, x: Tensor) -> Tensor:
    h = (x @ m.w).exp()
    h.detach().flatten(1).mul_(2)
    return h


def change_a_parameter(m: Any, x: Tensor) -> Tensor:
    h = x @ m.w
    m.w.data.clamp_(-1, 1)
    return h


def other_memory(m: Any, x: Tensor) -> Tensor:
    h = x @ m.w
    h.data = torch.zeros_like(h)
    return h


def strides_of_every_second(m: Any, x: Tensor) -> Tensor:
    return (x @ m.w + m.b)[:, ::2].as_strided((6, 8), (8, 1))


REFUSED = {
    write_to_data_that_is_kept: "behind autograd's back",
    write_to_a_view_of_a_detached_tensor: "behind autograd's back",
    change_a_parameter: "behind what is differentiated of it",
    other_memory: "gives a tensor other memory",
    strides_of_every_second: "does not lie in one piece in memory",
}


@pytest.mark.parametrize("forward", REFUSED, ids=lambda f: f.__name__)
def test_refused_with_line_and_cure(forward: Any) -> None:
    model = autoparallel.compile(Program(forward))
    text = raised(lambda: model(rows()))
    assert text.startswith("CaptureError") and REFUSED[forward] in text
    assert "line " in text and "What to change: " in text


def test_a_buffer_may_be_written_through_data() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.steps.data.mul_(0.9).add_(x.mean())
        return x @ m.w + m.steps

    plain = Program(forward)
    plain.register_buffer("steps", torch.ones(8, dtype=torch.float64))
    import copy

    model = autoparallel.compile(copy.deepcopy(plain))
    for step in range(2):
        assert torch.allclose(model(rows(seed=step)), plain(rows(seed=step)), atol=TOLERANCE)
    assert torch.allclose(model.get_buffer("steps"), plain.get_buffer("steps"), atol=TOLERANCE)


def _on_two_ranks(plan: str) -> dict[str, float]:
    return {f.__name__: difference(f, mesh=mesh_of(2), plan=plan, steps=1) for f in EQUAL[::3]}


@pytest.mark.wide
def test_two_ranks() -> None:
    for results in run_distributed(_on_two_ranks, "fsdp", world_size=2):
        assert all(v < TOLERANCE for v in results.values()), results
        assert max(results.values()) > 0, "what is sharded is added up in another order"
