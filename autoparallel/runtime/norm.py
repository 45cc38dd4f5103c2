"""The arithmetic of the global gradient norm; ``passes/reduce_gradient_norm`` puts it together.

Local sums are taken in float32 or the gradient's dtype, whichever is wider, and in float64 where that would overflow
or vanish; what is added across tensors and ranks is float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from autoparallel.groups import axis_index, communicator_of

_SAFE = (1e-15, 1e15)
"""Norms of float32 tensors whose squares neither overflow nor vanish in float32."""


def _norms(grads: Sequence[Tensor], p: float) -> Tensor:
    """The p-norm of each tensor, as one float64 tensor [len(grads)]."""
    wide = torch.float64 if p not in (1.0, 2.0) else None
    if grads[0].is_cuda or grads[0].dtype == torch.float64:
        wide = torch.float64
    elif grads[0].dtype != torch.float32:
        wide = torch.float32 if grads[0].dtype == torch.bfloat16 and p in (1.0, 2.0) else torch.float64
    norms = torch.stack(torch._foreach_norm(list(grads), p, dtype=wide)).double()
    if wide is not torch.float64:  # on a CPU: looking at the values synchronises nothing
        unsafe = (norms > _SAFE[1]) | (norms < _SAFE[0])
        if bool(unsafe.any()):
            norms = torch.stack(torch._foreach_norm(list(grads), p, dtype=torch.float64))
    return norms


def local_sum(grads: Sequence[Tensor], p: float) -> Tensor:
    """The sum of |g|^p over a rank's elements of some gradients, or their largest |g| for p = inf; float64 scalar."""
    device = grads[0].device
    grads = [g for g in grads if g.numel()]
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    if math.isinf(p):
        return torch.stack([_largest(g) for g in grads]).double().amax()
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for g in grads:
        by_dtype.setdefault(g.dtype, []).append(g)
    return torch.stack([_norms(same, p).pow(p).sum() for same in by_dtype.values()]).sum()


def _largest(g: Tensor) -> Tensor:
    low, high = torch.aminmax(g.flatten())
    return torch.maximum(low.abs(), high.abs())


def count_once(total: Tensor, groups: Sequence[str]) -> Tensor:
    """Keeps a sum over replicas on the first of them: zero on a rank whose coordinate on any axis is not 0."""
    if all(axis_index(group) == 0 for group in groups):
        return total
    return torch.zeros_like(total)


def pack(totals: Sequence[Tensor], originals: Sequence[Tensor], p: float) -> Tensor:
    """What travels: the rank's share of the total, and a flag that is positive where any gradient is not finite.

    For p = inf the flag is 1 for an infinite and 2 for a NaN value, because a maximum may drop a NaN.
    """
    share = torch.stack(list(totals)).amax() if math.isinf(p) else torch.stack(list(totals)).sum()
    seen = torch.stack(list(originals))
    if math.isinf(p):
        flag = torch.maximum(seen.isnan().any().double() * 2, seen.isinf().any().double())
        share = share.nan_to_num(nan=0.0, posinf=math.inf)
    else:
        flag = (~seen.isfinite()).any().double()
    return torch.stack([share, flag])


def reduce_packed(packed: Tensor, p: float, group: str) -> Tensor:
    """One all-reduce over the whole mesh."""
    communicator, axis = communicator_of(group)
    return communicator.all_reduce(packed.contiguous(), axis, "max" if math.isinf(p) else "sum")()


def finish_norm(packed: Tensor, p: float) -> Tensor:
    """The global norm from the reduced share and flag; not finite wherever any rank's gradient is not."""
    total, flag = packed[0], packed[1]
    if math.isinf(p):
        total = torch.where(flag > 0, torch.full_like(total, math.inf), total)
        return torch.where(flag >= 2, torch.full_like(total, math.nan), total)
    norm = total.pow(1.0 / p)
    return torch.where((flag > 0) & norm.isfinite(), torch.full_like(norm, math.nan), norm)


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients are multiplied by: ``max_norm / (norm + 1e-6)``, at most 1, as torch does."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
