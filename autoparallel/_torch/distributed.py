"""Process groups and what carries out their collectives."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group

# Renamed in 2.13; 2.11 has only the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def process_group(argument: Any) -> dist.ProcessGroup:
    """The process group that an operator was given: itself, boxed for TorchScript, or by name."""
    if isinstance(argument, str):
        return _resolve_process_group(argument)  # type: ignore[arg-type,unused-ignore]
    return argument if isinstance(argument, dist.ProcessGroup) else dist.ProcessGroup.unbox(argument)


def default_store() -> Any:
    """The key-value store that the processes' group was made with."""
    return dist.distributed_c10d._get_default_store()


def is_open(group: Any) -> bool:
    """Whether a process group has not been destroyed."""
    return group in dist.distributed_c10d._world.pg_map


def _backend_of(group: Any, device: str) -> Any:
    """What carries out a group's collectives on a kind of device; None where it has nothing for that."""
    try:
        return group._get_backend(torch.device(device))
    except RuntimeError:
        return None


def is_gloo(group: Any, device: str) -> bool:
    """Whether gloo carries out a group's collectives on a kind of device."""
    kind = getattr(dist, "ProcessGroupGloo", None)
    return kind is not None and isinstance(_backend_of(group, device), kind)


def timeout_of(group: Any, device: str) -> timedelta:
    """How long a process group waits for a rank."""
    for kind in (device, "cpu"):
        options = getattr(_backend_of(group, kind), "options", None)
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return dist.distributed_c10d.default_pg_timeout
