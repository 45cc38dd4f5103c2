"""How a tensor lies, and which of the ranks that have the same part of it writes it."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoparallel import _torch
from autoparallel.placements import Invariant, Layout, from_dtensor_placements


def layout_of(tensor: Tensor, mesh: DeviceMesh) -> tuple[Layout, DeviceMesh]:
    """How a tensor lies, and on which mesh; a plain one is whole on all ranks of ``mesh``."""
    if isinstance(tensor, DTensor):
        return from_dtensor_placements(tensor.placements), tensor.device_mesh
    return (Invariant,) * mesh.ndim, mesh


def as_saved(tensor: Tensor) -> Tensor:
    """A tensor that is cut, or lies whole: sums, norms and maxima over ranks, as optimizers keep them, are combined."""
    if not isinstance(tensor, DTensor) or _torch.dtensor.lies_in_parts(tensor):
        return tensor
    if tensor.device_mesh.get_coordinate() is None:
        return torch.empty(0, dtype=tensor.dtype)
    return _torch.dtensor.replicated(_torch.dtensor.gather(tensor), tensor.device_mesh)


def is_writer(name: str, layout: Layout, mesh: DeviceMesh) -> bool:
    """Whether this rank is the one of those with the same part that writes it; tensors are dealt out by name."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return False
    replica, replicas = 0, 1
    for axis, placement in enumerate(layout):
        if placement.kind != "S":
            replica = replica * mesh.size(axis) + coordinate[axis]
            replicas *= mesh.size(axis)
    return replica == zlib.crc32(name.encode()) % replicas
