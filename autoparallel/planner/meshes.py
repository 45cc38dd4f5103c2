"""Into which mesh axes a number of devices may be factored, and what became of each factorisation.

[Note: factored meshes] A mesh that the user leaves open has at most three axes.  Ranks fill the nodes in order, so the
last axis must lie inside a node; meshes that differ only in the order of axes whose groups lie over as many nodes are
one.  All that have one or two axes are searched, then those that split an axis of the best of two, and pipelines: a
number of stages after the other, until more of them cost more.  How many searches that may be is bounded
(``TWO_AXES``, ``THREE_AXES``, ``PIPELINES``), and what was not tried is listed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from autoparallel.comm.world import PIPELINE_AXIS, Axes
from autoparallel.hardware import Profile

Shape = tuple[int, ...]

NAMES = {1: ("dp",), 2: ("dp", "tp"), 3: ("pod", "dp", "tp")}
"""How the axes of a factored mesh are called, by their number; the search may do on each what it likes."""

TWO_AXES, THREE_AXES, PIPELINES = 6, 2, 8
"""How many meshes of two and of three axes, and how many pipelines, are searched at most."""


# ------------------------------------------------------------------------------------------------------- enumeration


def named(shape: Shape) -> Axes:
    """The axes of a mesh of these sizes."""
    return tuple(zip(NAMES[len(shape)], shape, strict=True))


def factored(devices: int, axes: int) -> list[Shape]:
    """All ordered factorisations into so many axes of at least two ranks, the first axis large first; one device is
    one axis."""
    if axes == 1:
        return [(devices,)]
    found = []
    for first in (d for d in range(devices // 2, 1, -1) if devices % d == 0):
        found += [(first, *rest) for rest in factored(devices // first, axes - 1) if min(rest) > 1]
    return found


def distinct(shapes: Iterable[Shape], profile: Profile) -> list[Shape]:
    """Of meshes that are alike but for the order of their axes, the first."""
    known: dict[Any, Shape] = {}
    for shape in shapes:
        known.setdefault(_lying(shape, profile), shape)
    return list(known.values())


def _lying(shape: Shape, profile: Profile) -> Any:
    """How the groups over all sets of axes lie over nodes, whatever the axes' order."""

    def seen(order: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        sizes = tuple(shape[axis] for axis in order)
        groups = (axes for n in range(1, len(order) + 1) for axes in itertools.combinations(order, n))
        return sizes, tuple(profile.nodes_of(shape, axes) for axes in groups)

    return min(seen(order) for order in itertools.permutations(range(len(shape))))


def inside(shape: Shape, profile: Profile) -> bool:
    """Whether the last axis lies inside a node."""
    return len(shape) == 1 or profile.nodes_of(shape, (len(shape) - 1,)) == 1


def splits(shape: Shape, profile: Profile) -> list[Shape]:
    """The meshes of one more axis that split one of a mesh's, those along nodes first, then the most even."""
    found = [
        (*shape[:axis], *parts, *shape[axis + 1 :]) for axis, size in enumerate(shape) for parts in factored(size, 2)
    ]

    def order(split: Shape) -> tuple[bool, int, Shape]:
        along = profile.node == 0 or profile.node in itertools.accumulate(reversed(split), lambda a, b: a * b)
        return not along, max(split), split

    return sorted((s for s in distinct(found, profile) if inside(s, profile)), key=order)


def stage_counts(devices: int) -> Iterator[int]:
    """The sizes that an axis for a pipeline may have, the smallest first."""
    return (ranks for ranks in range(2, devices + 1) if devices % ranks == 0)


def stage_meshes(devices: int, ranks: int, inner: int, profile: Profile) -> list[Axes]:
    """The meshes of a pipeline over so many ranks: one axis beside it, and two, of which the last has ``inner``."""
    rest = devices // ranks
    shapes: list[Shape] = [(rest,)]
    if 1 < inner < rest and rest % inner == 0:
        shapes.append((rest // inner, inner))
    return [((PIPELINE_AXIS, ranks), *named(shape)) for shape in shapes]


__all__ = ["distinct", "factored", "inside", "named", "splits", "stage_counts"]
