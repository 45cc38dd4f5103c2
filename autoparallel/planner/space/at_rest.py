"""The layouts that a parameter may have between steps."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from autoparallel.placements import Invariant, Layout, Shard, divides, reaches_all
from autoparallel.placements.redistribution import local_numel
from autoparallel.planner.request.presets import Constraints


def every_layout(shape: tuple[int, ...], axis_sizes: Sequence[int]) -> list[Layout]:
    """All layouts that give every rank a part."""
    choices = [Invariant, *(Shard(d) for d in range(len(shape)))]
    layouts = itertools.product(choices, repeat=len(axis_sizes))
    return [layout for layout in layouts if reaches_all(shape, layout, axis_sizes)]


def without_needless_padding(
    shape: tuple[int, ...], layouts: Sequence[Layout], axis_sizes: Sequence[int], tensor: Collection[int] = ()
) -> list[Layout]:
    """The even layouts; and of the uneven ones over the same axes the smallest, where no even one is over these axes.

    Only ``pad_rows`` reads an uneven layout; else all that one is good for is what it does not keep.

    Args:
        tensor: the axes along which a shard at rest is to be one in use, and so even: of layouts that keep as much, one
            that is.
    """

    def order(layout: Layout) -> tuple[int, int]:
        cut = [(layout[axis], axis_sizes[axis]) for axis in tensor]
        uneven = sum(p.kind == "S" and shape[p.dim] % size != 0 for p, size in cut)
        return local_numel(shape, layout, axis_sizes), uneven

    best: dict[tuple[bool, ...], Layout] = {}
    for layout in sorted(layouts, key=order):
        best.setdefault(tuple(p.kind == "S" for p in layout), layout)
    return [layout for layout in layouts if divides(shape, layout, axis_sizes) or layout in best.values()]


def permitted(layouts: Sequence[Layout], constraints: Constraints, experts: int | None = None) -> list[Layout]:
    """The layouts, of some, that a preset permits.

    Args:
        experts: the dim of the experts, where the parameter stacks them.
    """
    left = list(layouts)
    data = constraints.data
    if experts is not None:
        left = [x for x in left if all(x[a] == Shard(experts) for a in constraints.expert)]
        data = data - constraints.expert
    if data:
        rest = constraints.sharded_at_rest & data
        left = [x for x in left if all(x[a].kind == "I" for a in data - rest)]
        if rest:
            most = max(sum(x[a].kind == "S" for a in rest) for x in left)
            left = [x for x in left if sum(x[a].kind == "S" for a in rest) == most]
    return left
