"""The ranks there are, and a mesh over them."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoparallel import _torch

PIPELINE_AXIS = "pp"
"""The mesh axis that splits the model into stages."""

Axes = tuple[tuple[str, int], ...]
"""Mesh axes by name and size."""

MeshShape = int | Sequence[int] | Mapping[str, int]
"""A mesh as a user writes it: its axes by name and size, or sizes alone."""

AXIS_NAMES = {1: ("dp",), 2: ("dp", "tp"), 3: ("pod", "dp", "tp")}
"""The names of axes that nobody has named, by how many there are: of sizes alone, and of a mesh that was searched."""


def axes_of(mesh: MeshShape) -> Axes:
    """The axes of a mesh by name and size.

    Raises:
        ValueError: for a mesh that cannot be.
    """
    if isinstance(mesh, Mapping):
        axes = tuple((str(name), operator.index(size)) for name, size in mesh.items())
    else:
        sizes = [mesh] if isinstance(mesh, int) else [operator.index(size) for size in mesh]
        axes = tuple(zip(AXIS_NAMES.get(len(sizes), ()), sizes, strict=False))
    if not axes or len(dict(axes).keys() - {PIPELINE_AXIS}) > 3 or any(size < 1 for _, size in axes):
        raise ValueError(f"a mesh has one to three axes of at least one rank each, and 'pp', got {mesh!r}")
    return axes


def mesh_size(mesh: Sequence[tuple[str, int]]) -> int:
    """The number of ranks of a mesh."""
    return math.prod(size for _, size in mesh)


def mesh_text(mesh: Sequence[tuple[str, int]]) -> str:
    """A mesh as reports and messages write it: ``(dp=2, tp=4)``."""
    return "(" + ", ".join(f"{name}={size}" for name, size in mesh) + ")"


def usable_mesh(mesh: DeviceMesh | None, model: nn.Module, is_open: bool = False) -> DeviceMesh:
    """The mesh to train on; None means all ranks, and so does an open one. Raises ValueError for one that cannot be
    used."""
    if mesh is None:
        world, device = count_ranks(), device_of(model)
        mesh = init_device_mesh(device, (world,), mesh_dim_names=("dp",))
    elif is_open:
        mesh = init_device_mesh(mesh.device_type, (mesh.size(),), mesh_dim_names=("dp",))
    names = mesh.mesh_dim_names
    if not names:
        raise ValueError(
            "the mesh has no axis names: pass mesh_dim_names to init_device_mesh, for example ('dp', 'tp'). One axis "
            "of all ranks may go without a name where plan='auto' decides on the axes"
        )
    if len(set(names) - {PIPELINE_AXIS}) > 3:
        raise ValueError(f"a mesh has one to three axes beside 'pp', this one has {mesh.ndim}: {names}")
    if mesh.mesh.numel() > dist.get_world_size():
        raise ValueError(f"the mesh has {mesh.mesh.numel()} ranks, the world has {dist.get_world_size()}")
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is not part of the mesh; call compile() on the mesh's ranks only")
    for i, name in enumerate(names):
        if bool((mesh.mesh.diff(dim=i) < 0).any()):  # torch reads a DTensor's parts in the order of the process group
            raise ValueError(
                f"the ranks along the mesh axis {name!r} do not increase: {mesh.mesh.tolist()}\nWhat to change: give "
                "DeviceMesh ranks that increase along every axis, as init_device_mesh does. Axes may take turns, as in "
                "[[0, 2], [1, 3]]"
            )
    return mesh


def count_ranks() -> int:
    """The number of ranks; without a launcher, a world of one is made."""
    if not dist.is_initialized() and "RANK" not in os.environ:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    return dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])


def device_of(model: nn.Module) -> str:
    """The kind of device that a model is on; the cpu for one on the meta device."""
    return next((p.device.type for p in _torch.tensors.parameters_of(model) if p.device.type != "meta"), "cpu")


def elsewhere(tensor: torch.Tensor, mesh: DeviceMesh, moved: str = "it") -> str | None:
    """What to do where a tensor is not on the device that this process computes on; None where it is.

    Args:
        moved: what is moved with it.
    """
    kind, index = tensor.device.type, tensor.device.index
    if kind != mesh.device_type:
        return (
            f"is on {tensor.device}, the mesh is on {mesh.device_type!r}: move {moved} there "
            f"(.to({mesh.device_type!r})), or make a mesh on {kind!r}"
        )
    if index is None or index == (here := torch.get_device_module(kind).current_device()):
        return None
    return (
        f"is on {tensor.device}, this process computes on {kind}:{here}: call torch.{kind}.set_device({index}) before "
        f"init_process_group, or move {moved} there"
    )


def from_host(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """A tensor in the host's memory on the device that this process computes on, as DDP and ``fully_shard`` move those
    that a model is given; any other as it is."""
    return tensor.to(mesh.device_type) if tensor.is_cpu and mesh.device_type != "cpu" else tensor


def make_mesh(device: str, axes: Axes) -> DeviceMesh:
    """A mesh of these axes over all ranks."""
    return init_device_mesh(device, tuple(n for _, n in axes), mesh_dim_names=tuple(name for name, _ in axes))
