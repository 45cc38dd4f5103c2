"""Operators of our own that appear in a program: what torch's operator computes, in a form that can be sharded.

What depends on a rank (its rows of a table, its positions in a dropout mask) is asked for by the name of the axis
when the operator runs, so that the program is the same text on every rank.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autoparallel.collectives import all_reduce
from autoparallel.groups import axis_index, axis_size

# ---------------------------------------------------------------------------------------------------------- dropout


@dataclass(frozen=True)
class RandomState:
    """What a call's dropout masks depend on beside the operator and the global position of an element.

    The rows of microbatch ``microbatch`` of ``microbatches`` stand in the batch behind those of the ones before it.
    """

    seed: int
    call: int
    microbatch: int = 0
    microbatches: int = 1


class _Current(threading.local):
    state = RandomState(0, 0)


_CURRENT = _Current()

MICROBATCH = "microbatch"
"""Stands for an axis in what shards a dropout's dim: the microbatches of a pipeline cut the batch."""

_MASK64 = (1 << 64) - 1


def set_random_state(state: RandomState) -> None:
    """Sets the seed and the call number of the dropout masks that this thread makes from now on."""
    _CURRENT.state = state


def random_state() -> RandomState:
    """What this thread's dropout masks depend on now."""
    return _CURRENT.state


def _mix(z: int) -> int:
    """One round of splitmix64 (Steele, Lea, Flood 2014) on a Python integer."""
    z = (z + 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def _signed(z: int) -> int:
    return z - (1 << 64) if z >= 1 << 63 else z


def _logical_shift(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)


@torch.library.custom_op("autoparallel::dropout_mask", mutates_args=())
def _dropout_mask(x: Tensor, p: float, operator: int, shards: str) -> Tensor:
    state = _CURRENT.state
    key = _mix(_mix(_mix(state.seed & _MASK64) ^ operator) ^ state.call)
    index = torch.zeros((), dtype=torch.int64, device=x.device)
    groups = shards.split(";") if shards else [""] * x.ndim
    stride = 1
    for dim in range(x.ndim - 1, -1, -1):
        local = x.shape[dim]
        coordinate, count = _coordinate(groups[dim])
        positions = torch.arange(local, dtype=torch.int64, device=x.device) + coordinate * local
        index = index + (positions * stride).view([-1 if d == dim else 1 for d in range(x.ndim)])
        stride *= local * count
    z = index + _signed(key)
    z = (z ^ _logical_shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _logical_shift(z, 27)) * _signed(0x94D049BB133111EB)
    keep = _logical_shift(z ^ _logical_shift(z, 31), 40) >= round(p * (1 << 24))
    return keep.to(x.dtype) * (1.0 / (1.0 - p) if p < 1 else 0.0)


@_dropout_mask.register_fake
def _(x: Tensor, p: float, operator: int, shards: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _coordinate(groups: str) -> tuple[int, int]:
    """This rank's position and the number of positions along a dim sharded by ``groups`` (outermost first)."""
    index, count = 0, 1
    for group in groups.split(",") if groups else ():
        if group == MICROBATCH:
            here, n = _CURRENT.state.microbatch, _CURRENT.state.microbatches
        else:
            here, n = axis_index(group), axis_size(group)
        index, count = index * n + here, count * n
    return index, count


def dropout(x: Tensor, p: float, operator: int, shards: str = "") -> Tensor:
    """Dropout whose mask depends on the seed, the operator, the call and the *global* position of each element.

    Args:
        x: any shape.
        p: the probability of a zero.
        operator: a number that tells this dropout from the others of the program.
        shards: for each dim (joined by ";") the axes that shard it (joined by ",", outermost first); empty when whole.
            ``MICROBATCH`` counts as one.
    """
    return x * torch.ops.autoparallel.dropout_mask(x.detach(), p, operator, shards)


# ----------------------------------------------------------------------------------------------------------- routing


def topk_indices(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Tensor:
    """Where the ``k`` largest (or smallest) entries along ``dim`` are, as ``torch.topk`` finds them."""
    return x.detach().topk(k, dim, largest, sorted)[1]


# ---------------------------------------------------------------------------------------------------- sharded tables


@torch.library.custom_op("autoparallel::shard_index", mutates_args=())
def _shard_index(x: Tensor, group: str) -> Tensor:
    return torch.tensor(axis_index(group), dtype=torch.int64, device=x.device)


@_shard_index.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=x.device)


def shard_index(x: Tensor, group: str) -> Tensor:
    """This rank's coordinate on an axis, as a scalar int64 tensor on the device of ``x``."""
    return torch.ops.autoparallel.shard_index(x.detach(), group)


def pad_rows(x: Tensor, rows: int) -> Tensor:
    """``x`` [n, ...] with zeros behind its rows, ``rows`` in all."""
    return F.pad(x, [0, 0] * (x.ndim - 1) + [0, rows - x.shape[0]])


def interleave(x: Tensor, dim: int, bounds: Sequence[int], blocks: int) -> Tensor:
    """``x`` with the pieces of one dim dealt out in blocks, each of which has its part of every piece, in their order.

    Args:
        bounds: where the pieces begin, and where the last one ends.
        blocks: how many; every piece divides by it.
    """
    pieces = itertools.pairwise(bounds)
    parts = [x.narrow(dim, start, end - start).unflatten(dim, (blocks, -1)) for start, end in pieces]
    return torch.cat(parts, dim + 1).flatten(dim, dim + 1)


def piece(x: Tensor, dim: int, start: int, end: int, blocks: int) -> Tensor:
    """The piece of a dim that ``start`` and ``end`` bound, out of ``blocks`` blocks that ``interleave`` made."""
    if blocks == 1:
        return x.narrow(dim, start, end - start)
    cut = x.unflatten(dim, (blocks, -1)).narrow(dim + 1, start // blocks, (end - start) // blocks)
    return cut.flatten(dim, dim + 1)


def _local_rows(indices: Tensor, rows: int, group: str, total: int | None = None) -> tuple[Tensor, Tensor]:
    """Indices into a table of which this rank holds ``rows`` rows: the local index, 0 where another rank holds it, and
    whether it is here. An index outside of the whole table stays outside, so that the look-up complains as torch's.

    ``total``: how many rows of the whole table there are without padding.
    """
    local = indices - shard_index(indices, group) * rows
    mine = (local >= 0) & (local < rows)
    wrong = (indices < 0) | (indices >= (rows * axis_size(group) if total is None else total))
    return torch.where(wrong, rows, local.where(mine, 0)), mine


# --------------------------------------------------------------------------------------------------- cross-entropy


def cross_entropy_sum(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    classes: int | None = None,
) -> Tensor:
    """The sum of the cross-entropies of ``x`` [N, C, ...] or [C] and class indices ``target`` [N, ...] or [].

    float32 or wider: a sum over a batch does not fit into half precision.  The columns from ``classes`` on are padding.
    """
    if classes is not None:
        x = x.narrow(1, 0, classes)
    half = x.dtype in (torch.float16, torch.bfloat16)
    losses = F.cross_entropy(
        x,
        target,
        weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="none" if half else "sum",
    )
    return losses.float().sum() if half else losses


def cross_entropy_weight(target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """What ``reduction="mean"`` divides by: the number (or summed class weight) of the targets not ignored."""
    valid = target != ignore_index
    if weight is None:
        return valid.sum().to(dtype)
    return (weight[target.where(valid, 0)] * valid).sum().to(dtype)


def weighted_mean(total: Tensor, weight: Tensor) -> Tensor:
    """``total / weight``, element by element, with a gradient that stays finite where ``weight`` is 0: ``total``'s."""
    return _WeightedMean.apply(total, weight)


class _WeightedMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, weight: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(weight)
        return total / weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if grads[0] is None:
            return None, None
        (weight,) = ctx.saved_tensors
        return grads[0] / torch.where(weight == 0, 1, weight), None


def cross_entropy_sum_sharded(
    x: Tensor, target: Tensor, ignore_index: int, group: str, classes: int | None = None
) -> Tensor:
    """``cross_entropy_sum`` of logits whose classes (dim 1, or dim 0 of a vector) are sharded over ``group``.

    Two all-reduces of [N]-shaped tensors forward, none backward (Shoeybi et al. 2019, Megatron-LM, section 3).
    """
    return _ShardedCrossEntropy.apply(x, target, ignore_index, group, classes)


class _ShardedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Tensor, ignore_index: int, group: str, total: int | None) -> Tensor:
        classes = 0 if x.ndim == 1 else 1
        ctx.dtype = x.dtype
        ctx.set_materialize_grads(False)
        if x.dtype in (torch.float16, torch.bfloat16):
            x = x.float()
        if total is not None:  # columns of padding count as minus infinity
            own = max(0, min(x.shape[classes], total - axis_index(group) * x.shape[classes]))
            if own < x.shape[classes]:
                x = x.clone()
                x.narrow(classes, own, x.shape[classes] - own).fill_(-torch.inf)
        valid = target != ignore_index
        local, mine = _local_rows(target.where(valid, 0), x.shape[classes], group, total)
        local = local.unsqueeze(classes)
        shifted = x - all_reduce(x.amax(classes), "max", group).unsqueeze(classes)
        exp = shifted.exp()
        picked = shifted.gather(classes, local).squeeze(classes).where(mine, 0)
        totals = all_reduce(torch.stack([exp.sum(classes), picked]), "sum", group)
        softmax = exp / totals[0].unsqueeze(classes)
        ctx.save_for_backward(softmax, local, mine, valid)
        return (totals[0].log() - totals[1]).where(valid, 0).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if grads[0] is None:
            return None, None, None, None, None
        softmax, local, mine, valid = ctx.saved_tensors
        classes = 0 if softmax.ndim == 1 else 1
        grad = softmax.scatter_add(classes, local, -mine.to(softmax.dtype).unsqueeze(classes))
        return (grad.where(valid.unsqueeze(classes), 0) * grads[0]).to(ctx.dtype), None, None, None, None


# ------------------------------------------------------------------------------------------------------- embedding


def padded_embedding(weight: Tensor, indices: Tensor, padding_idx: int, rows: int) -> Tensor:
    """The embedding of ``indices`` in a table of ``rows`` rows, with padding behind them."""
    return torch.ops.aten.embedding(weight.narrow(0, 0, rows), indices, padding_idx)


def embedding_sharded(
    weight: Tensor, indices: Tensor, padding_idx: int, group: str, rows: int | None = None
) -> Tensor:
    """A rank's summand of the embedding of ``indices`` in a table whose rows are sharded over ``group``.

    ``rows``: how many rows the whole table has without padding, where it is padded.
    """
    local, mine = _local_rows(indices, weight.shape[0], group, rows)
    out = F.embedding(local, weight)
    if padding_idx >= 0:
        out = out.detach().where((indices == padding_idx).unsqueeze(-1), out)
    return out.where(mine.unsqueeze(-1), 0)
