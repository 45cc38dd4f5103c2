"""Which block of a tensor a rank has."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from autoparallel.placements.placement import Layout, chunk


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


def whole_region(shape: Sequence[int]) -> Region:
    """All of a tensor."""
    return Region((0,) * len(shape), tuple(shape))


def own_region(shape: Sequence[int], layout: Layout, mesh: DeviceMesh) -> Region | None:
    """This rank's part; None where the rank is not part of the mesh."""
    coordinate = mesh.get_coordinate()
    return None if coordinate is None else region_at(shape, layout, tuple(mesh.shape), coordinate)


def region_at(shape: Sequence[int], layout: Layout, axis_sizes: Sequence[int], coordinate: Sequence[int]) -> Region:
    """The part of the rank at a place of the mesh."""
    start, size = [0] * len(shape), list(shape)
    for axis, placement in enumerate(layout):
        if placement.kind == "S":
            begin, size[placement.dim] = chunk(size[placement.dim], axis_sizes[axis], coordinate[axis])
            start[placement.dim] += begin
    return Region(tuple(start), tuple(size))
