"""A rank's part of a whole tensor, and tensors that lie as another does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from autoparallel import _torch
from autoparallel._torch.dtensor import DTensorSpec
from autoparallel.placements import Layout, from_dtensor_placements
from autoparallel.placements.regions import own_region, whole_region


def local_slice(whole: torch.Tensor, layout: Layout, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's part of a whole tensor that every rank has; nothing where it is not part of the mesh."""
    part = local_view(whole, layout, mesh)
    return part.contiguous().clone() if part is not whole else part


def local_view(whole: torch.Tensor, layout: Layout, mesh: DeviceMesh) -> torch.Tensor:
    """The slice as a view of the whole tensor; the tensor itself where this rank has all of it."""
    region = own_region(whole.shape, layout, mesh)
    if region is None:
        return whole.new_empty(0)
    return whole[region.within(whole_region(whole.shape))] if any(p.kind == "S" for p in layout) else whole


def part_like(whole: torch.Tensor, tensor: DTensor) -> torch.Tensor:
    """This rank's part of a whole tensor that is cut as a ``DTensor`` is, as a view."""
    return local_view(whole, from_dtensor_placements(tensor.placements), tensor.device_mesh)


def share_of(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
    """What this rank has of a whole tensor that lies on a mesh as placements say; of a sum over ranks, the first of
    them has all of it, and the others zeros."""
    layout = from_dtensor_placements(tuple(Replicate() if p.is_partial() else p for p in placements))
    part = local_view(whole, layout, mesh)
    coordinate = mesh.get_coordinate() or ()
    is_first = not any(at and p.is_partial() for at, p in zip(coordinate, placements, strict=False))
    return part if is_first else torch.zeros_like(part)


def gradient_as(grad: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """This rank's share of a gradient, as a description says that it lies: a collective where the user has replaced it
    by one that lies otherwise.

    Raises:
        RuntimeError: for a plain tensor.
    """
    if not isinstance(grad, DTensor):
        raise RuntimeError(
            f"the gradient of a parameter of shape {list(grad.shape)} was replaced by a plain tensor, where a DTensor "
            "is expected\nWhat to change: p.grad = distribute_tensor(grad, p.device_mesh, p.placements)."
        )
    present = _torch.dtensor.spec_of(grad)
    if present is spec or (present.placements == spec.placements and present.mesh == spec.mesh):
        return _torch.dtensor.local_of(grad)
    return share_of(_torch.dtensor.gather(grad), spec.mesh, spec.placements).contiguous().clone()


def place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where a tensor lies in memory, its storage first: equal of tensors that share all of theirs."""
    local = _torch.dtensor.local_of(tensor)
    return _torch.tensors.storage_mark(local), local.storage_offset(), local.shape, local.stride()


def lies_elsewhere(tensor: torch.Tensor) -> bool:
    """Whether a tensor is another pipeline stage's, so that this rank has nothing of it."""
    return isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None


def lies_whole(tensor: DTensor) -> bool:
    """Whether this rank has all of a tensor."""
    mesh = tensor.device_mesh
    cut = any(not p.is_replicate() and mesh.size(i) > 1 for i, p in enumerate(tensor.placements))
    return not cut and not lies_elsewhere(tensor)


def is_summed(tensor: DTensor) -> bool:
    """Whether what ranks have of a tensor must be added up, or combined otherwise, to have it."""
    return any(p.is_partial() for p in tensor.placements)


def as_parameter(local: torch.Tensor, parameter: torch.Tensor) -> DTensor:
    """A ``DTensor`` that lies as a parameter at rest does, around this rank's part."""
    spec = _torch.dtensor.spec_of(parameter)  # type: ignore[arg-type]
    if local.dtype != parameter.dtype:
        return _torch.dtensor.from_part(local, spec.mesh, spec.placements, parameter.shape)
    return _torch.dtensor.wrap_local(local, spec)


def lay_like(value: torch.Tensor, parameter: DTensor) -> torch.Tensor:
    """A value to load that lies as a parameter does: a whole one without communication, another ``DTensor`` by
    redistributing it, or gathering it from another mesh; one of another shape as it is."""
    mesh, placements = parameter.device_mesh, tuple(parameter.placements)
    if isinstance(value, DTensor):
        if value.device_mesh == mesh and value.placements == placements:
            return value
        is_whole = lies_whole(value)
        if value.device_mesh == mesh and not is_whole:
            return value.redistribute(mesh, placements)
        # The mesh of one that was read from a file may be that of another rank, and says so.
        value = _torch.dtensor.local_of(value) if is_whole else value.full_tensor()
    else:
        value = value.to(parameter.device)
    if value.shape != parameter.shape:
        return value
    return as_parameter(local_slice(value, from_dtensor_placements(placements), mesh), parameter)
