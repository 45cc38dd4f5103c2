"""Tables whose rows are sharded or padded, projections whose pieces are interleaved, and look-ups."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autoparallel.comm.groups import axis_index, axis_size


def topk_indices(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Tensor:
    """Where the ``k`` largest (or smallest) entries along ``dim`` are, as ``torch.topk`` finds them."""
    return x.detach().topk(k, dim, largest, sorted)[1]


def indices_along(x: Tensor, dim: int, finder: str, k: int | None = None) -> Tensor:
    """Where what ``finder`` looks for along ``dim`` is, as torch finds it; a dim that it reduces stays, with size one.

    Args:
        finder: ``cummax``, ``cummin``, ``mode``, ``median``, ``nanmedian`` or, with ``k``, ``kthvalue``.
    """
    options = {} if finder.startswith("cum") else {"keepdim": True}
    indices: Tensor = getattr(torch, finder)(x.detach(), *() if k is None else (k,), dim, **options)[1]
    return indices


def pool_indices(x: Tensor, pool: str, arguments: Sequence[Any]) -> Tensor:
    """Where the largest of each window is, in the flattened plane, as torch's ``pool`` finds it."""
    indices: Tensor = getattr(torch.ops.aten, pool)(x.detach(), *arguments)[1]
    return indices


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


def local_rows(indices: Tensor, rows: int, group: str, total: int | None = None) -> tuple[Tensor, Tensor]:
    """Indices into a table of which this rank holds ``rows`` rows: the local index, 0 where another rank holds it, and
    whether it is here. An index outside of the whole table stays outside, so that the look-up complains as torch's.

    ``total``: how many rows of the whole table there are without padding.
    """
    local = indices - shard_index(indices, group) * rows
    is_local = (local >= 0) & (local < rows)
    wrong = (indices < 0) | (indices >= (rows * axis_size(group) if total is None else total))
    return torch.where(wrong, rows, local.where(is_local, 0)), is_local


def padded_embedding(weight: Tensor, indices: Tensor, padding_idx: int, rows: int) -> Tensor:
    """The embedding of ``indices`` in a table of ``rows`` rows, with padding behind them."""
    return torch.ops.aten.embedding(weight.narrow(0, 0, rows), indices, padding_idx)


def embedding_sharded(weight: Tensor, indices: Tensor, padding_idx: int, group: str, rows: int | None = None) -> Tensor:
    """A rank's summand of the embedding of ``indices`` in a table whose rows are sharded over ``group``.

    ``rows``: how many rows the whole table has without padding, where it is padded.
    """
    local, is_local = local_rows(indices, weight.shape[0], group, rows)
    out = F.embedding(local, weight)
    if padding_idx >= 0:
        out = out.detach().where((indices == padding_idx).unsqueeze(-1), out)
    return out.where(is_local.unsqueeze(-1), 0)
