"""What is added to gradients that are still to be summed over the ranks, as they are under ``no_sync()``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from autoparallel import _torch
from autoparallel.placements import from_dtensor_placements
from autoparallel.runtime.parameters.slices import local_view, part_like

_ATEN = torch.ops.aten


@cache
def watch_summands() -> None:
    """Has autograd add the gradient of a term beside the model (``0.01 * p.square().sum()``), which lies as ``p``, to
    what is still a summand: from the first one on that is kept."""
    _torch.dtensor.handle_first([_ATEN.add.Tensor, _ATEN.add_.Tensor], add_to_summand)


def add_to_summand(earlier: Any, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A sum of ``DTensor``s, of which one may be a sum over the ranks and the other no part of one; torch has no way
    from the latter to the former."""
    first, *rest = args
    if rest and isinstance(first, DTensor) and isinstance(rest[0], DTensor):
        args = (first, _as_summand(rest[0], first), *rest[1:])
    return _torch.dtensor.carry_out(earlier, operator, args, kwargs)


def _as_summand(value: DTensor, summand: DTensor) -> DTensor:
    """A ``DTensor`` as another lies, where that is a sum over ranks and this one is not; else as it is."""
    mesh = value.device_mesh
    if mesh != summand.device_mesh:
        return value
    pairs = [*zip(value.placements, summand.placements, strict=True)]
    fits = all(q.is_partial() or p.is_replicate() or p == q for p, q in pairs)
    if not fits or not any(p.is_shard() and q.is_partial() for p, q in pairs):
        return value
    whole = _torch.dtensor.local_of(value).new_zeros(value.shape)
    coordinate = mesh.get_coordinate()
    if coordinate is not None and not any(
        at and p.is_replicate() and q.is_partial() for at, (p, q) in zip(coordinate, pairs, strict=True)
    ):
        part_like(whole, value).copy_(_torch.dtensor.local_of(value))
    layout = from_dtensor_placements(tuple(Replicate() if q.is_partial() else q for _, q in pairs))
    part = local_view(whole, layout, mesh)
    return _torch.dtensor.from_part(part.contiguous(), mesh, tuple(summand.placements), value.shape)
