"""Bound meshes, and process groups that are destroyed and made anew."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh

from autoparallel import _torch
from autoparallel.comm.groups import axis_of_group, bind, communicator_of, with_data_axis
from tests.distributed import open_pool, run_in


def _start() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


def _restarted() -> dict[str, bool]:
    dist.destroy_process_group()
    _start()
    old = init_device_mesh("cpu", (1,), mesh_dim_names=("pp",))
    expanded = with_data_axis(old)
    prefix = bind(expanded)
    name = expanded.get_group(0).group_name
    found = {"named": axis_of_group(name) is not None}
    dist.destroy_process_group()
    found["forgotten"] = axis_of_group(name) is None
    _start()
    new = init_device_mesh("cpu", (1,), mesh_dim_names=("pp",))
    found["equal"] = new == old
    found["no stale name"] = axis_of_group(new.get_group(0).group_name) is None
    again = with_data_axis(new)
    found["open"] = all(map(_torch.is_open, again.get_all_groups()))
    communicator, axis = communicator_of(f"{bind(again)}/pp+dp")
    found["bound anew"] = communicator.is_open and prefix == bind(again)  # type: ignore[attr-defined]
    found["talks"] = communicator.size(axis) == 1
    return found


def test_a_new_start_does_not_meet_destroyed_groups() -> None:
    pool = open_pool(1)  # of its own, as it leaves its process group
    try:
        (found,) = run_in(pool, _restarted)
    finally:
        pool.close()
    assert all(found.values()), found
