"""A rank's part of a whole tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from autoparallel.placements import Layout
from autoparallel.placements.regions import own_region, whole_region


def local_slice(whole: torch.Tensor, layout: Layout, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's part of a whole tensor that every rank has; nothing where it is not part of the mesh."""
    part = local_view(whole, layout, mesh)
    return part.contiguous().clone() if part is not whole else part


def local_view(whole: torch.Tensor, layout: Layout, mesh: DeviceMesh) -> torch.Tensor:
    """The same as a view of the whole tensor; the tensor itself where this rank has all of it."""
    region = own_region(whole.shape, layout, mesh)
    if region is None:
        return whole.new_empty(0)
    return whole[region.within(whole_region(whole.shape))] if any(p.kind == "S" for p in layout) else whole


def local_shape(shape: Sequence[int], layout: Layout, mesh: DeviceMesh) -> tuple[int, ...]:
    """The shape of this rank's part of a tensor."""
    region = own_region(shape, layout, mesh)
    assert region is not None
    return region.shape
