"""A rank's part of a whole tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from autoparallel.placements import Layout, chunk


def local_slice(whole: torch.Tensor, layout: Layout, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's part of a whole tensor that every rank has; nothing where it is not part of the mesh."""
    part = local_view(whole, layout, mesh)
    return part.contiguous().clone() if part is not whole else part


def local_view(whole: torch.Tensor, layout: Layout, mesh: DeviceMesh) -> torch.Tensor:
    """The same as a view of the whole tensor; the tensor itself where this rank has all of it."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return whole.new_empty(0)
    part = whole
    for axis, placement in enumerate(layout):
        if placement.kind == "S":
            dim = placement.dim
            part = part.narrow(dim, *chunk(part.shape[dim], mesh.size(axis), coordinate[axis]))
    return part


def local_shape(shape: Sequence[int], layout: Layout, mesh: DeviceMesh) -> tuple[int, ...]:
    """The shape of this rank's part of a tensor."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    local = list(shape)
    for axis, placement in enumerate(layout):
        if placement.kind == "S":
            local[placement.dim] = chunk(local[placement.dim], mesh.size(axis), coordinate[axis])[1]
    return tuple(local)


__all__ = ["local_shape", "local_slice", "local_view"]
