"""Process groups by name.

A rewritten program is the same text on every rank: what depends on a rank (its group, its coordinate) is asked for at
run time, by the name of a mesh axis.  This module keeps that table, and tells which communicator a name stands for: a
test can run all ranks of a mesh as threads of one process (see ``simulate``).

An axis is named ``"dp"``; several axes at once (one group over all of them) are named ``"dp+tp"``.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoparallel import _torch
from autoparallel.comm.communicator import Communicator, Group, MeshGroups
from autoparallel.comm.current import Current

CONTROL = "autoparallel control"
"""The description of the groups over which ranks agree; what they say there is not training traffic."""

_BOUND: dict[str, MeshGroups] = {}
"""By prefix; the mesh that was bound last is the last."""

COMMUNICATOR: Current[Communicator | None] = Current(None)
"""What this thread's operators talk to instead of the bound meshes (in simulations and dry runs)."""


def bind(mesh: DeviceMesh, whole: DeviceMesh | None = None) -> str:
    """Registers ``mesh`` and returns the prefix under which its axes are known, the same on every rank.

    It is made of meshes alone: ranks may have bound others before, such as one of a teacher on some of them.
    The groups over several axes are made here, all at once, because making one is itself a collective.

    Args:
        whole: of which it is one of the slices, such as a stage's, which have one prefix.
    """
    names = mesh.mesh_dim_names or ()
    _forget_closed()
    ranks = (mesh if whole is None else whole).mesh.tolist()
    first = f"mesh{zlib.crc32(repr((mesh.device_type, names, ranks)).encode()):08x}"
    key = next(name for name in (first + "x" * i for i in itertools.count()) if name not in _BOUND)
    for prefix, bound in _BOUND.items():
        if bound.mesh == mesh and prefix.rstrip("x") == first:
            _BOUND[prefix] = _BOUND.pop(prefix)
            return prefix
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError("this rank is not part of the mesh")
    groups = {name: Group(mesh.get_group(i), mesh.size(i), coordinate[i]) for i, name in enumerate(names)}
    for count in range(2, len(names) + 1):
        for axes in itertools.combinations(range(len(names)), count):
            groups["+".join(names[i] for i in axes)] = _joint_group(mesh, axes)
    _BOUND[key] = MeshGroups(mesh, groups, _torch.distributed.is_gloo(dist.group.WORLD, mesh.device_type))
    return key


def _forget_closed() -> None:
    """Forgets meshes whose process groups have been destroyed: one that is made later may be equal to them."""
    for key, bound in list(_BOUND.items()):
        if not bound.is_open:
            del _BOUND[key]
    for mesh, (_, groups) in list(_EXPANDED.items()):
        if not all(map(_torch.distributed.is_open, groups)):
            del _EXPANDED[mesh]


def active_axes(axis: str, size: Callable[[str], int]) -> str:
    """The name of a group without the axes of one rank: over axes of sizes 2 and 1, "dp" and "dp+tp" are one group."""
    return "+".join(name for name in axis.split("+") if size(name) > 1) or axis


def _joint_group(mesh: DeviceMesh, axes: Sequence[int]) -> Group:
    """One process group over several axes, the first axis outermost."""
    rest = [i for i in range(mesh.ndim) if i not in axes]
    rows = mesh.mesh.permute(*rest, *axes).reshape(-1, math.prod(mesh.size(i) for i in axes)).tolist()
    rank = dist.get_rank()
    row_here = next(row for row in rows if rank in row)
    if len(row_here) == dist.get_world_size():
        assert dist.group.WORLD is not None
        return Group.of(dist.group.WORLD, row_here, rank)
    part = mesh.mesh.numel() < dist.get_world_size()  # then the other ranks take no part in making groups
    timeout = _torch.distributed.timeout_of(dist.group.WORLD, mesh.device_type)
    groups = [
        dist.new_group(row, timeout=timeout, use_local_synchronization=part)
        for row in rows
        if row is row_here or not part
    ]
    return Group.of(groups[0 if part else rows.index(row_here)], row_here, rank)


_EXPANDED: dict[DeviceMesh, tuple[DeviceMesh, list[dist.ProcessGroup]]] = {}
"""With their groups, which a mesh itself knows by names that groups made later may have, too."""


def with_data_axis(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh itself, or, where it has one axis only, with an axis "dp" of one rank behind it.

    Raises:
        ValueError: where other ranks would have to take part in making it.
    """
    if mesh.ndim > 1:
        return mesh
    _forget_closed()
    if mesh not in _EXPANDED:
        names = tuple(mesh.mesh_dim_names or ())
        if mesh.mesh.numel() != dist.get_world_size():
            raise ValueError(f"a mesh of some ranks with the one axis {names[0]!r}: give it an axis 'dp' of size 1")
        expanded = DeviceMesh(mesh.device_type, mesh.mesh.unsqueeze(-1), mesh_dim_names=(*names, "dp"))
        _EXPANDED[mesh] = expanded, expanded.get_all_groups()
    return _EXPANDED[mesh][0]


def inner_mesh(mesh: DeviceMesh, axis: str) -> DeviceMesh:
    """The mesh of all axes but one, through this rank."""
    return mesh[tuple(name for name in mesh.mesh_dim_names or () if name != axis)]


def other_slices(mesh: DeviceMesh, axis: str, slice_here: DeviceMesh) -> list[DeviceMesh]:
    """For each place on an axis, the mesh of the other axes there; this rank's is ``slice_here``."""
    names = list(mesh.mesh_dim_names or ())
    rest = tuple(name for name in names if name != axis)
    here = mesh.get_local_rank(axis)
    return [
        slice_here
        if i == here
        else _torch.dtensor.mesh_without_groups(mesh.device_type, mesh.mesh.select(names.index(axis), i), rest)
        for i in range(mesh.size(names.index(axis)))
    ]


def whole_group_name(key: str) -> str:
    """How programs name the group of all ranks of a bound mesh."""
    return f"{key}/{'+'.join(_BOUND[key].mesh.mesh_dim_names or ())}"


def whole_group(key: str) -> dist.ProcessGroup:
    """The process group of all ranks of a bound mesh."""
    return _BOUND[key].groups["+".join(_BOUND[key].mesh.mesh_dim_names or ())].group


def before_next_collective(key: str, check: Callable[[], None]) -> None:
    """Has ``check`` called before the next of our collectives on a bound mesh is entered, or when ``settle`` is."""
    bound = _BOUND[key]
    bound.settle()
    bound.first = check


def settle(key: str) -> None:
    """Does what must be done before the next collective on a mesh, if anything."""
    communicator_of(f"{key}/")[0].settle()


def _axes_of(bound: MeshGroups) -> dict[str, str]:
    """The mesh axes that process groups stand for, by the groups' names."""
    return {one.group.group_name: active_axes(name, bound.size) for name, one in bound.groups.items()}


def axis_of_group(group_name: str) -> str | None:
    """The mesh axis that a process group stands for, if it is one of ours; that of the mesh that was bound last, where
    several share it."""
    _forget_closed()  # groups that are made later get the names of destroyed ones
    return next((axes[group_name] for axes in map(_axes_of, reversed(_BOUND.values())) if group_name in axes), None)


def names_of_groups(mesh: DeviceMesh) -> dict[str, str]:
    """Group name to mesh axis; with the groups over several axes, where the mesh is bound."""
    _forget_closed()
    for bound in _BOUND.values():
        if bound.mesh == mesh:
            return _axes_of(bound)
    return {mesh.get_group(i).group_name: name for i, name in enumerate(mesh.mesh_dim_names or ())}


def communicator_of(group: str) -> tuple[Communicator, str]:
    """The communicator and axis that a group name such as ``mesh0/dp`` stands for on this rank."""
    key, _, axis = group.rpartition("/")
    if COMMUNICATOR.value is not None:
        return COMMUNICATOR.value, axis
    try:
        return _BOUND[key], axis
    except KeyError:
        raise RuntimeError(f"the program names the process group {group!r}, but its mesh is not bound") from None


def axis_index(group: str) -> int:
    """This rank's coordinate on the axis."""
    communicator, axis = communicator_of(group)
    return communicator.index(axis)


def axis_size(group: str) -> int:
    """The number of ranks along the axis."""
    communicator, axis = communicator_of(group)
    return communicator.size(axis)


def group_name(prefix: str, names: Sequence[str], axes: Sequence[int]) -> str:
    """How programs name the group over some mesh axes."""
    return f"{prefix}/{'+'.join(names[i] for i in axes)}"
