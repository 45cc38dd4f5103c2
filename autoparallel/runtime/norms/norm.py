"""The arithmetic of the global gradient norm; ``program`` puts it together.

Local sums are taken in float32 or the gradient's dtype, whichever is wider, and in float64 where that would overflow
or vanish; what is added across tensors and ranks is float64.  Nothing here waits for a device: only on a CPU, where
looking at a value waits for nothing, is it decided by values what must be summed again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from autoparallel import _torch
from autoparallel.comm.collectives import settled
from autoparallel.comm.groups import axis_index, communicator_of

_SAFE = (1e-15, 1e15)
"""Norms in float32 whose squares neither overflow nor vanish."""

_PIECE = 1 << 15
"""Elements that one float32 sum may run over on a CPU: over a million elements it is off by 1e-5, over these by 3e-7.
A conversion to float64 of so many stays in the cache."""


def require_norm_type(norm_type: float) -> float:
    """p as a float. Raises ValueError when it is not positive."""
    p = float(norm_type)
    if math.isnan(p) or p <= 0:
        raise ValueError(f"norm_type must be positive or inf, got {norm_type}")
    return p


def join(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same memory in as few tensors as possible: neighbours in one storage become one flat view.

    The gradients that one collective has reduced lie side by side in its buffer, so that one kernel serves all of
    them. Empty tensors are left out.
    """
    tensors = [t for t in tensors if t.numel()]
    bases = [base for t in tensors if (base := t._base) is not None]
    if len(set(map(id, bases))) == len(bases):
        return tensors
    by_base: dict[int, list[Tensor]] = {}
    for t in tensors:
        base = t._base
        by_base.setdefault(id(t if base is None else base), []).append(t)
    return [each for views in by_base.values() for each in _join_views(views)]


def _join_views(views: Sequence[Tensor]) -> Iterator[Tensor]:
    """``join`` of one tensor, or of views of one."""
    runs: list[list[Tensor]] = []
    end = 0  # in memory, of the last run, where another view may follow
    for t in sorted(views, key=Tensor.data_ptr):
        begin, whole = t.data_ptr(), t.is_contiguous()
        if begin == end and whole and t.dtype == runs[-1][0].dtype:
            runs[-1].append(t)
        else:
            runs.append([t])
        end = begin + t.nbytes if whole else 0
    for run in runs:
        base, count = run[0]._base, sum(map(Tensor.numel, run))
        yield run[0] if base is None or len(run) < 2 else base.as_strided((count,), (1,), run[0].storage_offset())


def _norms(grads: Sequence[Tensor], p: float) -> Tensor:
    """p-norms of parts that together are the tensors, in one float64 tensor; of one dtype and device."""
    dtype = grads[0].dtype
    if grads[0].device.type != "cpu" or dtype == torch.float64:
        wide = torch.float32 if dtype.itemsize < 4 else torch.float64  # the units for float64 are few
        return torch.stack(torch._foreach_norm(list(grads), p, dtype=wide)).double()
    if p not in (1.0, 2.0):
        return torch.stack(torch._foreach_norm(_pieces(grads), p, dtype=torch.float64))
    if dtype != torch.float32:
        grads = _pieces(grads)
    rows, rest = _rows(grads)
    parts = [torch.linalg.vector_norm(r, p, dim=1) for r in rows]
    if rest:
        parts.append(torch.stack(torch._foreach_norm(rest, p, dtype=torch.float32)))
    norms = (parts[0] if len(parts) == 1 else torch.cat(parts)).double()
    # On a CPU looking at the values waits for nothing. A zero may have vanished.
    again = [i for i, x in enumerate(norms.tolist()) if not _SAFE[0] <= x <= _SAFE[1] and x == x]
    if again:
        pieces = [piece for r in rows for piece in r.unbind(0)] + rest
        for i in again:
            norms[i] = torch.linalg.vector_norm(pieces[i], p, dtype=torch.float64)
    return norms


def _rows(grads: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Long float32 tensors as [rows, _PIECE], and what remains of them and of the others, none longer than that."""
    rows: list[Tensor] = []
    rest: list[Tensor] = []
    for g in grads:
        if g.numel() <= _PIECE:
            rest.append(g)
            continue
        flat = g.reshape(-1)
        whole = flat.numel() // _PIECE * _PIECE
        rows.append(flat[:whole].view(-1, _PIECE))
        if whole < flat.numel():
            rest.append(flat[whole:])
    return rows, rest


def _pieces(grads: Sequence[Tensor]) -> list[Tensor]:
    """The same elements in tensors of at most ``_PIECE``, small enough to be converted in the cache."""
    if all(g.numel() <= _PIECE for g in grads):
        return list(grads)
    return [piece for g in grads for piece in g.reshape(-1).split(_PIECE)]


def local_sum(grads: Sequence[Tensor], p: float) -> Tensor:
    """The sum of |g|^p over a rank's elements of some gradients, or their largest |g| for p = inf; float64 scalar.

    Of a complex gradient |g| is the modulus, as for torch.

    Args:
        grads: at least one tensor; any shapes and dtypes, on one device.
        p: positive, or inf.
    """
    if not all(map(Tensor.numel, grads)):
        device, grads = grads[0].device, [g for g in grads if g.numel()]
        if not grads:
            return torch.zeros((), dtype=torch.float64, device=device)
    groups = [_real(alike, p) if alike[0].is_complex() else alike for alike in _torch.tensors.by_dtype(grads)]
    if math.isinf(p):
        return torch.stack([_largest(g).double() for alike in groups for g in alike]).amax()
    sums = [_norms(alike, p).pow(p).sum() for alike in groups]
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def _real(grads: Sequence[Tensor], p: float) -> list[Tensor]:
    """Real tensors with the p-norms of complex ones."""
    return [torch.view_as_real(settled(g)) if p == 2.0 else g.abs() for g in grads]


def local_norm(grad: Tensor, p: float) -> Tensor:
    """The p-norm of a rank's elements of one gradient; float64 scalar."""
    total = local_sum([grad], p)
    return total if math.isinf(p) else total.pow(1.0 / p)


def _largest(g: Tensor) -> Tensor:
    low, high = torch.aminmax(g)
    return torch.maximum(low.abs(), high.abs())


def count_once(total: Tensor, groups: Sequence[str]) -> Tensor:
    """Keeps a sum over replicas on the first of them: zero on a rank whose coordinate on any axis is not 0."""
    if all(axis_index(group) == 0 for group in groups):
        return total
    return torch.zeros_like(total)


def pack(totals: Sequence[Tensor], originals: Sequence[Tensor], p: float, parts: Sequence[Sequence[int]]) -> Tensor:
    """What travels, [2, norms]: the rank's share of each norm's total, and a flag, positive where it is not finite.

    For p = inf the flag is 1 for an infinite and 2 for a NaN value, because a maximum may drop a NaN.

    Args:
        totals: the sums that this rank answers for, one for each set of gradients; float64 scalars.
        originals: the same before ``count_once``.
        p: positive, or inf.
        parts: for each norm, the indices of the sums that it is made of.
    """
    shares, sums = torch.stack(list(totals)), torch.stack(list(originals))
    if math.isinf(p):
        flags = torch.maximum(sums.isnan().double() * 2, sums.isinf().double())
        shares = shares.nan_to_num(nan=0.0, posinf=math.inf)
    else:
        flags = _not_finite(sums).double()
    both = torch.stack([shares, flags])
    if len(parts) == 1 and len(parts[0]) == len(totals):
        return _over(both, p).unsqueeze(1)
    empty = both.new_zeros(2)
    return torch.stack([_over(both[:, list(part)], p) if part else empty for part in parts], dim=1)


def _over(both: Tensor, p: float) -> Tensor:
    return both.amax(-1) if math.isinf(p) else both.sum(-1)


def norms_here(sums: Sequence[Tensor], p: float, parts: Sequence[Sequence[int]]) -> Tensor:
    """The global norms, [norms], where no other rank has a share: the values say themselves what is not finite.

    Args:
        sums: one for each set of gradients, float64 scalars.
        p: positive, or inf.
        parts: for each norm, the indices of the sums that it is made of.
    """
    alone = [[sums[i] for i in part] or [torch.zeros_like(sums[0])] for part in parts]
    sums = [some[0] if len(some) == 1 else _over(torch.stack(some), p) for some in alone]
    totals = sums[0].unsqueeze(0) if len(sums) == 1 else torch.stack(sums)
    return totals if math.isinf(p) else totals.pow(1.0 / p)


def reduce_packed(packed: Tensor, p: float, group: str) -> Tensor:
    """One all-reduce over the whole mesh."""
    communicator, axis = communicator_of(group)
    return communicator.all_reduce(packed.contiguous(), axis, "max" if math.isinf(p) else "sum")()


def finish_norm(packed: Tensor, p: float) -> Tensor:
    """The global norms, [norms], from the reduced shares and flags; not finite wherever any rank's gradient is not."""
    total, flag = packed[0], packed[1]
    if math.isinf(p):
        total = total.masked_fill(flag > 0, math.inf)
        return total.masked_fill(flag >= 2, math.nan)
    norm = total.pow(1.0 / p)
    return norm.masked_fill((flag > 0) & ~_not_finite(norm), math.nan)


def _not_finite(x: Tensor) -> Tensor:
    """``~x.isfinite()`` in two operators instead of five."""
    return x - x != 0


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients are multiplied by: ``max_norm / (norm + 1e-6)``, at most 1, as torch does."""
    limit = torch.scalar_tensor(max_norm, dtype=norm.dtype, device="cpu")  # a Python number is one kernel more
    return (limit / (norm + 1e-6)).clamp(max=1.0)
