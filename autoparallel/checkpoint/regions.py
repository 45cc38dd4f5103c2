"""Which part of a tensor a rank has, and which of the ranks that have it writes it."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoparallel.placements import Invariant, Layout, chunk, from_dtensor_placements


@dataclass(frozen=True)
class Region:
    """A block of a tensor.

    Attributes:
        start: its first index in each dim.
        shape: its size in each dim.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def overlap(self, other: Region) -> Region | None:
        """What both have; None where that is nothing."""
        start = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        ends = zip(self.start, self.shape, other.start, other.shape, strict=True)
        shape = tuple(min(a + n, b + m) - s for s, (a, n, b, m) in zip(start, ends, strict=True))
        return None if any(n <= 0 for n in shape) else Region(start, shape)

    def within(self, outer: Region) -> tuple[slice, ...]:
        """Where it lies in a tensor that holds ``outer``."""
        return tuple(slice(s - o, s - o + n) for s, o, n in zip(self.start, outer.start, self.shape, strict=True))

    def blocks(self, rows: int) -> Iterator[Region]:
        """Pieces of at most so many rows; one, where it has no dims."""
        if not self.shape:
            yield self
            return
        for begin in range(0, self.shape[0], rows):
            count = min(rows, self.shape[0] - begin)
            yield Region((self.start[0] + begin, *self.start[1:]), (count, *self.shape[1:]))


def layout_of(tensor: Tensor, mesh: DeviceMesh) -> tuple[Layout, DeviceMesh]:
    """How a tensor lies, and on which mesh; a plain one is whole on all ranks of ``mesh``."""
    if isinstance(tensor, DTensor):
        return from_dtensor_placements(tuple(tensor.placements)), tensor.device_mesh
    return (Invariant,) * mesh.ndim, mesh


def own_region(shape: Sequence[int], layout: Layout, mesh: DeviceMesh) -> Region | None:
    """This rank's part; None where the rank is not part of the mesh."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    start, size = [0] * len(shape), list(shape)
    for axis, placement in enumerate(layout):
        if placement.kind == "S":
            begin, size[placement.dim] = chunk(size[placement.dim], mesh.size(axis), coordinate[axis])
            start[placement.dim] += begin
    return Region(tuple(start), tuple(size))


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


__all__ = ["Region", "is_writer", "layout_of", "own_region"]
