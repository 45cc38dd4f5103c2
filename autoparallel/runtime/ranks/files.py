"""What pickle, and with it ``torch.save``, writes of a ``DTensor``: what one rank has of it.

A file for each rank, read by the same rank of as many, gives back what was saved.  The file that ``if rank == 0:
torch.save(model.state_dict(), path)`` writes lacks what lies on other ranks, and torch gives all its readers the first
rank's part as if it were their own.  So the file says whose part it is: saving warns, and another rank raises.
"""

from __future__ import annotations

import copyreg
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autoparallel.runtime.parameters.slices import lies_whole

_INSTEAD = (
    "What to change: model.save(path, optimizer=optimizer), which every rank calls and any mesh loads; or whole "
    "tensors: every rank makes state = {n: t.cpu() for n, t in model.full_parameters()}, and one saves it."
)


def watch_files() -> None:
    """Has files say which rank's part of a tensor they hold."""
    copyreg.pickle(DTensor, write_part)


def write_part(tensor: DTensor) -> tuple[Any, ...]:
    """How pickle writes a ``DTensor``; a warning, where this rank has a part of it."""
    rebuild, arguments = tensor.__reduce_ex__(2)
    if lies_whole(tensor):
        return rebuild, arguments
    place = _place()
    warnings.warn(
        f"rank {place[0]} of {place[1]} writes its own parts of tensors to a file, and nothing of the others'\n"
        f"{_INSTEAD}",
        stacklevel=2,
    )
    return read_part, (place, tuple(tensor.shape), rebuild, arguments)


def read_part(
    place: Sequence[int], shape: Sequence[int], rebuild: Callable[..., DTensor], arguments: Sequence[Any]
) -> DTensor:
    """What pickle reads of a ``DTensor`` of which a rank had a part; files name it by its module.

    Args:
        place: the number of that rank, and of how many.
        shape: the whole tensor's.

    Raises:
        RuntimeError: on another rank.
    """
    if tuple(place) != _place():
        raise RuntimeError(
            f"the file holds the part that rank {place[0]} of {place[1]} had of a tensor of shape {list(shape)}, and "
            f"rank {_place()[0]} of {_place()[1]} reads it: torch.save of DTensors, as model.state_dict() and "
            f"optimizer.state_dict() have, writes what one rank has\n{_INSTEAD}"
        )
    return rebuild(*arguments)


def _place() -> tuple[int, int]:
    """The number of this rank, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


torch.serialization.add_safe_globals([read_part])  # for torch.load before anything is compiled
