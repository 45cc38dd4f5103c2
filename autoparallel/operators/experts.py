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

from autoparallel.comm.groups import axis_index, axis_size, communicator_of
from autoparallel.operators.tables import shard_index


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


def grouped_linear_exchanged(x: Tensor, weight: Tensor, experts: Tensor, group: str, owners: str) -> Tensor:
    """``grouped_linear`` of a rank's rows with experts that are sharded over the same axes: every row travels to the
    rank that has its expert, and the result back (Shazeer et al. 2017; dropless, so the parts are uneven).

    Three all-to-alls forward (how many rows, the rows, the results) and three backward.

    Args:
        x, experts: this rank's rows.
        weight: this rank's experts.
        group: the axes along which rows travel.
        owners: all axes that shard the experts, outermost first, those along which rows do not travel with a "-".
    """
    return torch.ops.autoparallel.grouped_linear_exchanged(x, weight, experts, group, owners)


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


# ------------------------------------------------------------------------------------------- rows that go to experts


class _Exchange:
    """Which rows go where. The shapes of what travels depend on data; those of the operators around it do not."""

    def __init__(self, experts: Tensor, count: int, group: str, owners: str) -> None:
        self.communicator, self.axis = communicator_of(group)
        ranks = self.communicator.size(self.axis)
        owner, travels = _owners(experts, count, owners)
        # By rank, and on each rank by expert; rows that nobody serves come first.
        key = torch.where(travels, owner * count + experts.remainder(count), -1)
        key, order = key.sort(stable=True)
        bounds = torch.searchsorted(key, torch.arange(ranks * count + 1, dtype=key.dtype, device=key.device))
        self.rows = order[int(bounds[0]) :]
        counts = bounds.diff().view(ranks, count)
        received = self.communicator.all_to_all(counts.contiguous(), self.axis)()
        self.send_counts, self.receive_counts = counts.sum(1).tolist(), received.sum(1).tolist()
        local = torch.arange(count, device=experts.device).expand(ranks, count)
        self.experts = local.reshape(-1).repeat_interleave(received.view(-1))

    def send(self, x: Tensor) -> Tensor:
        """Rows to the ranks of their experts."""
        return self.communicator.all_to_all_rows(x[self.rows], self.send_counts, self.receive_counts, self.axis)

    def bring_back(self, y: Tensor, like: Tensor) -> Tensor:
        """Results to the ranks of their rows; zeros for rows that nobody serves."""
        out = y.new_zeros((like.shape[0], y.shape[1]))
        out[self.rows] = self.communicator.all_to_all_rows(y, self.receive_counts, self.send_counts, self.axis)
        return out


def _owners(experts: Tensor, count: int, owners: str) -> tuple[Tensor, Tensor]:
    """For each row, the rank (in the group of travel) that has its expert, and whether there is one."""
    rest = experts.div(count, rounding_mode="floor")
    travels = rest >= 0
    owner, stride = torch.zeros_like(rest), 1
    for name in reversed(owners.split(" ")):
        ranks = axis_size(name.removeprefix("-"))
        at, rest = rest.remainder(ranks), rest.div(ranks, rounding_mode="floor")
        if name.startswith("-"):
            travels = travels & (at == axis_index(name.removeprefix("-")))
        else:
            owner, stride = owner + at * stride, stride * ranks
    return owner, travels & (rest == 0)


@torch.library.custom_op("autoparallel::grouped_linear_exchanged", mutates_args=())
def _grouped_linear_exchanged(x: Tensor, weight: Tensor, experts: Tensor, group: str, owners: str) -> Tensor:
    exchange = _Exchange(experts, weight.shape[0], group, owners)
    return exchange.bring_back(grouped_linear(exchange.send(x), weight, exchange.experts), x)


@_grouped_linear_exchanged.register_fake
def _(x: Tensor, weight: Tensor, experts: Tensor, group: str, owners: str) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[2]))


@torch.library.custom_op("autoparallel::grouped_linear_exchanged_backward", mutates_args=())
def _grouped_linear_exchanged_backward(
    grad: Tensor, x: Tensor, weight: Tensor, experts: Tensor, group: str, owners: str
) -> tuple[Tensor, Tensor]:
    exchange = _Exchange(experts, weight.shape[0], group, owners)
    both = exchange.send(torch.cat([x, grad], 1))
    rows, grads = both.split([x.shape[1], grad.shape[1]], 1)
    grad_x, grad_weight = torch.ops.autoparallel.grouped_linear_backward(
        grads.contiguous(), rows.contiguous(), weight, exchange.experts, True, True
    )
    return exchange.bring_back(grad_x, x), grad_weight


@_grouped_linear_exchanged_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, experts: Tensor, group: str, owners: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), weight.new_empty(weight.shape)


def _setup_exchange(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.names = inputs[3:]


def _backward_exchange(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grads = torch.ops.autoparallel.grouped_linear_exchanged_backward(grad, *ctx.saved_tensors, *ctx.names)
    wants_x, wants_weight, *_ = ctx.needs_input_grad
    return grads[0] if wants_x else None, grads[1] if wants_weight else None, None, None, None


_grouped_linear_exchanged.register_autograd(_backward_exchange, setup_context=_setup_exchange)
