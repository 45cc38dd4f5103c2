"""The cheapest way from one layout of a tensor to another, as steps along single mesh axes.

A step changes the placement on one axis (a sum may be completed over several axes at once).  Only the innermost of
the axes that shard a dim may change (see [Note: order of axes] in ``placements``), so some redistributions take
several steps; which ones is a shortest path, priced forward and backward.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autoparallel.placements import (
    COLLECTIVES,
    Invariant,
    Layout,
    Partial,
    Placement,
    Replicate,
    Shard,
    action,
    divides,
    dual,
    dual_layout,
    largest_piece,
    reaches_all,
    shards_of,
)

StepSeconds = Callable[[str, tuple[int, ...], int], float]
"""The predicted time of an action: its kind, the mesh axes (by index), the bytes of the whole tensor in the group."""


@dataclass(frozen=True, slots=True)
class Uneven:
    """A tensor whose shards differ in size (see [Note: uneven shards]): what each rank has follows from this.

    Attributes:
        shape: of the whole tensor.
        layout: how it lies.
    """

    shape: tuple[int, ...]
    layout: Layout


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a redistribution: ``src -> dst`` on ``axes`` (several only for a reduction to the whole).

    ``before`` is what the step starts from, where its shards, or those of its result, differ in size; else None.
    """

    axes: tuple[int, ...]
    src: Placement
    dst: Placement
    before: Uneven | None = None

    def apply(self, layout: Layout) -> Layout:
        """The layout after the step."""
        return tuple(self.dst if i in self.axes else p for i, p in enumerate(layout))

    def transposed(self) -> Step:
        """What the step does to the gradient."""
        before = self.before
        if before is not None:
            before = Uneven(before.shape, dual_layout(self.apply(before.layout)))
        return Step(self.axes, dual(self.dst), dual(self.src), before)

    def on(self, shape: Sequence[int], layout: Layout, axis_sizes: Sequence[int]) -> Step:
        """The step of a tensor of this global shape that lies as ``layout``: with ``before``, where that is uneven."""
        even = divides(shape, layout, axis_sizes) and divides(shape, self.apply(layout), axis_sizes)
        return Step(self.axes, self.src, self.dst, None if even else Uneven(tuple(shape), layout))


def local_numel(shape: Sequence[int], layout: Layout, axis_sizes: Sequence[int]) -> int:
    """How many elements a rank holds of a tensor of a global shape; the most that any holds, where they differ."""
    return math.prod(largest_piece(shape, layout, axis_sizes))


def step_bytes(step: Step, before: Layout, shape: Sequence[int], itemsize: int, axis_sizes: Sequence[int]) -> int:
    """The bytes of the whole tensor as the step's group sees it (see ``placements.sent_bytes``), padding included."""
    ranks = math.prod(axis_sizes[axis] for axis in step.axes)
    sent = list(largest_piece(shape, before, axis_sizes))
    if step.dst.kind == "S":
        sent[step.dst.dim] = ranks * largest_piece(shape, step.apply(before), axis_sizes)[step.dst.dim]
    full = math.prod(sent) * itemsize
    # gathered, moved or padded: the group's tensor is its ranks' slices together
    return full * ranks if step.src.kind == "S" else full


@dataclass(frozen=True)
class LayoutTable:
    """All layouts of one kind of tensor, and the price of going from each to each."""

    layouts: tuple[Layout, ...]
    index: dict[Layout, int]
    seconds: np.ndarray
    next_hop: np.ndarray


class Redistributor:
    """Prices and finds redistributions on one mesh; tables are kept by shape."""

    def __init__(self, axis_sizes: Sequence[int], step_seconds: StepSeconds) -> None:
        self.axis_sizes = tuple(axis_sizes)
        self.step_seconds = step_seconds
        self._tables: dict[tuple[tuple[int, ...], int, bool, bool, bool], LayoutTable] = {}

    def table(
        self, shape: Sequence[int], itemsize: int, differentiable: bool, backward: bool, uneven: bool = False
    ) -> LayoutTable:
        """The prices of redistributing tensors of a (global, actual) shape.

        Args:
            differentiable: whether Replicate is a placement of its own.
            backward: whether the transposed steps are paid for, too.
            uneven: whether shards may differ in size, as those of parameters at rest may.
        """
        key = (tuple(shape), itemsize, differentiable, backward, uneven)
        if key not in self._tables:
            self._tables[key] = self._build(*key)
        return self._tables[key]

    def path(
        self,
        src: Layout,
        dst: Layout,
        shape: Sequence[int],
        itemsize: int,
        differentiable: bool,
        backward: bool,
        uneven: bool = False,
    ) -> list[Step]:
        """The cheapest steps from ``src`` to ``dst``; empty when they are equal.  Arguments as in :meth:`table`."""
        table = self.table(shape, itemsize, differentiable, backward, uneven)
        try:
            here, goal = table.index[src], table.index[dst]
        except KeyError as error:
            raise ValueError(f"a tensor of shape {tuple(shape)} cannot have the layout {error.args[0]}") from None
        steps: list[Step] = []
        while here != goal:
            nxt = int(table.next_hop[here, goal])
            if nxt < 0:
                raise ValueError(f"no redistribution from {src} to {dst}")
            layout = table.layouts[here]
            steps.append(_step_between(layout, table.layouts[nxt]).on(shape, layout, self.axis_sizes))
            here = nxt
        return steps

    def _build(
        self, shape: tuple[int, ...], itemsize: int, differentiable: bool, backward: bool, uneven: bool
    ) -> LayoutTable:
        layouts = list(self._layouts(shape, differentiable, uneven))
        index = {layout: i for i, layout in enumerate(layouts)}
        count = len(layouts)
        cost = np.full((count, count), np.inf)
        np.fill_diagonal(cost, 0.0)
        hop = np.full((count, count), -1, dtype=np.int32)
        hop[np.arange(count), np.arange(count)] = np.arange(count)
        for i, layout in enumerate(layouts):
            for step in self._steps(layout):
                j = index.get(step.apply(layout))
                if j is None:
                    continue
                seconds = self.seconds(step, layout, shape, itemsize)
                if backward:
                    seconds += self.seconds(step.transposed(), step.apply(layout), shape, itemsize)
                if seconds < cost[i, j]:
                    cost[i, j], hop[i, j] = seconds, j
        for k in range(count):  # Floyd-Warshall
            through = cost[:, k, None] + cost[None, k, :]
            better = through < cost - 1e-15
            cost = np.where(better, through, cost)
            hop = np.where(better, hop[:, k, None], hop)
        return LayoutTable(tuple(layouts), index, cost, hop)

    def seconds(self, step: Step, before: Layout, shape: Sequence[int], itemsize: int) -> float:
        """The predicted time of one step; never zero, so that shorter paths win ties."""
        kind = action(step.src, step.dst)
        full = step_bytes(step, before, shape, itemsize, self.axis_sizes)
        return self.step_seconds(kind, step.axes, full)

    def _layouts(self, shape: tuple[int, ...], differentiable: bool, uneven: bool) -> list[Layout]:
        whole = [Invariant, Replicate, Partial] if differentiable else [Invariant, Partial]
        options = [*whole, *(Shard(d) for d in range(len(shape)))]
        layouts = itertools.product(options, repeat=len(self.axis_sizes))
        fits = reaches_all if uneven else divides
        return [layout for layout in layouts if fits(shape, layout, self.axis_sizes)]

    def _steps(self, layout: Layout) -> list[Step]:
        steps = []
        for axis, src in enumerate(layout):
            if src.kind == "S" and shards_of(layout, src.dim)[-1] != axis:
                continue
            for dst in self._targets(layout, axis):
                if dst != src:
                    steps.append(Step((axis,), src, dst))
        partial = [i for i, p in enumerate(layout) if p.kind == "P"]
        for count in range(2, len(partial) + 1):
            for axes in itertools.combinations(partial, count):
                steps += [Step(axes, Partial, Invariant), Step(axes, Partial, Replicate)]
        whole = [i for i, p in enumerate(layout) if p.kind in ("I", "R")]
        for count in range(2, len(whole) + 1):
            for axes in itertools.combinations(whole, count):
                kinds = {layout[i].kind for i in axes}
                if kinds == {"I"}:  # its transpose is one all-reduce over these axes
                    steps.append(Step(axes, Invariant, Replicate))
        return steps

    def _targets(self, layout: Layout, axis: int) -> list[Placement]:
        targets = [Invariant, Replicate, Partial]
        for dim in range(8):
            axes = shards_of(layout, dim)
            if not axes or axes[-1] <= axis:
                targets.append(Shard(dim))
        return targets


def _step_between(before: Layout, after: Layout) -> Step:
    axes = tuple(i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b)
    return Step(axes, before[axes[0]], after[axes[0]])


def communicates(step: Step) -> bool:
    """Whether the step is a collective."""
    return action(step.src, step.dst) in COLLECTIVES
