"""Linear layers of which every row picks its own: what experts without a capacity compute.

``grouped_linear(x, weight, experts)`` multiplies row i of ``x`` by ``weight[experts[i]]``.  Rows stay in their order,
whatever the operator does inside (it sorts them by expert), so a row is independent of all others and may lie on any
rank.  Torch's own grouped product wants all rows sorted, so that the place of each depends on the whole batch.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autoparallel.ops import shard_index


def grouped_linear(x: Tensor, weight: Tensor, experts: Tensor) -> Tensor:
    """``y[i] = x[i] @ weight[experts[i]]``; zeros where ``experts[i]`` is none of the weights.

    Args:
        x: [rows, in].
        weight: [experts, in, out].
        experts: [rows], integers.
    """
    return torch.ops.autoparallel.grouped_linear(x, weight, experts)


def grouped_linear_sharded(x: Tensor, weight: Tensor, experts: Tensor, group: str) -> Tensor:
    """A rank's summand of ``grouped_linear`` with experts that are sharded over ``group``: that of its own experts."""
    return grouped_linear(x, weight, experts - shard_index(experts, group) * weight.shape[0])


def _sorted_rows(experts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The order of rows by expert, and where each expert's rows begin and the last one's end."""
    ids, order = experts.sort(stable=True)
    bounds = torch.searchsorted(ids, torch.arange(count + 1, dtype=ids.dtype, device=ids.device))
    return order, bounds


def _fits_grouped_mm(*sizes: int, dtype: torch.dtype) -> bool:
    """Whether torch's grouped product takes it: bfloat16, rows of a multiple of 16 bytes."""
    return dtype == torch.bfloat16 and all(n % 8 == 0 for n in sizes)


@torch.library.custom_op("autoparallel::grouped_linear", mutates_args=())
def _grouped_linear(x: Tensor, weight: Tensor, experts: Tensor) -> Tensor:
    order, bounds = _sorted_rows(experts, weight.shape[0])
    out = x.new_zeros((x.shape[0], weight.shape[2]))
    if _fits_grouped_mm(*weight.shape[1:], dtype=x.dtype):
        start, end = bounds[[0, -1]].tolist()
        rows = order[start:end]
        if len(rows):
            out[rows] = F.grouped_mm(x[rows], weight.contiguous(), offs=(bounds[1:] - start).int())
        return out
    ends = bounds.tolist()
    for i, (start, end) in enumerate(itertools.pairwise(ends)):
        if end > start:
            rows = order[start:end]
            out[rows] = x[rows] @ weight[i]
    return out


@_grouped_linear.register_fake
def _(x: Tensor, weight: Tensor, experts: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[2]))


@torch.library.custom_op("autoparallel::grouped_linear_backward", mutates_args=())
def _grouped_linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, experts: Tensor, wants_x: bool, wants_weight: bool
) -> tuple[Tensor, Tensor]:
    order, bounds = _sorted_rows(experts, weight.shape[0])
    grad_x = torch.zeros_like(x, memory_format=torch.contiguous_format) if wants_x else x.new_zeros(())
    grad_weight = weight.new_zeros(weight.shape if wants_weight else ())
    ends = bounds.tolist()
    if _fits_grouped_mm(*weight.shape[1:], dtype=x.dtype):
        rows = order[ends[0] : ends[-1]]
        offsets = (bounds[1:] - ends[0]).int()
        if len(rows) and wants_x:
            grad_x[rows] = F.grouped_mm(grad[rows], weight.transpose(1, 2).contiguous(), offs=offsets)
        if len(rows) and wants_weight:
            grad_weight = F.grouped_mm(x[rows].t(), grad[rows], offs=offsets)
        return grad_x, grad_weight
    for i, (start, end) in enumerate(itertools.pairwise(ends)):
        if end > start:
            rows = order[start:end]
            if wants_x:
                grad_x[rows] = grad[rows] @ weight[i].t()
            if wants_weight:
                grad_weight[i] = x[rows].t() @ grad[rows]
    return grad_x, grad_weight


@_grouped_linear_backward.register_fake
def _(
    grad: Tensor, x: Tensor, weight: Tensor, experts: Tensor, wants_x: bool, wants_weight: bool
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape if wants_x else ()), weight.new_empty(weight.shape if wants_weight else ())


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, experts = ctx.saved_tensors
    wants_x, wants_weight, _ = ctx.needs_input_grad
    grads = torch.ops.autoparallel.grouped_linear_backward(grad, x, weight, experts, wants_x, wants_weight)
    return grads[0] if wants_x else None, grads[1] if wants_weight else None, None


_grouped_linear.register_autograd(_backward, setup_context=_setup)
