"""The cheapest way from one layout of a tensor to another, as steps along single mesh axes.

A step changes the placement on one axis (a sum may be completed over several axes at once).  Only the innermost of
the axes that shard a dim may change (see [Note: order of axes] in ``placements``), so some redistributions take
several steps; which ones is a shortest path, priced forward and backward.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

import numpy as np

from autoparallel.placements.placement import (
    ACTIONS,
    COLLECTIVES,
    Invariant,
    Layout,
    Partial,
    Placement,
    Replicate,
    Shard,
    action,
    cut_along,
    divides,
    dual,
    dual_layout,
    largest_piece,
)

PARTIAL = -1
"""What stands for Partial in ``LayoutTable.codes``."""

BUCKET_BYTES = 4 << 20
"""The size at which a bucket of parameters is closed (see ``passes.bucket_collectives``)."""

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

    @property
    def action(self) -> str:
        """What a rank does: a collective of ``COLLECTIVES``, or a local action."""
        return action(self.src, self.dst)

    @property
    def form(self) -> tuple[tuple[int, ...], str, str]:
        """What steps share that one collective can take, of tensors with whatever dims."""
        return self.axes, self.src.kind, self.dst.kind

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
    padded = list(largest_piece(shape, before, axis_sizes))
    if step.dst.kind == "S":
        padded[step.dst.dim] = ranks * largest_piece(shape, step.apply(before), axis_sizes)[step.dst.dim]
    full = math.prod(padded) * itemsize
    # gathered, moved or padded: the group's tensor is its ranks' slices together
    return full * ranks if step.src.kind == "S" else full


@dataclass(frozen=True)
class LayoutTable:
    """All layouts of one kind of tensor, and the price of going from each to each.

    Attributes:
        layouts: every layout that such a tensor may have.
        index: where a layout stands in ``layouts``.
        codes: of each layout the placements as numbers: the dim of a shard, ``PARTIAL``, and below it what
            is whole.
        seconds: the price of the cheapest way from each to each.
        direct: the price where one step is enough; else infinite.
        hops: the first layout of each way that was asked for, by both its ends.
    """

    layouts: tuple[Layout, ...]
    index: dict[Layout, int]
    codes: np.ndarray
    seconds: np.ndarray
    direct: np.ndarray
    hops: dict[tuple[int, int], int] = field(default_factory=dict, repr=False)

    def places(self, layouts: Iterable[Layout]) -> np.ndarray:
        """Where some layouts stand."""
        return np.array([self.index[layout] for layout in layouts], dtype=np.intp)

    @cached_property
    def gathered(self) -> np.ndarray:
        """Whether nothing but gathers brings a tensor from each layout into each."""
        src, dst = self.codes[:, None], self.codes[None]
        steps = (src == dst) | (src >= 0) & (dst < PARTIAL)
        return steps.all(axis=-1) & (src != dst).any(axis=-1)

    def next_hop(self, here: int, goal: int) -> int:
        """The first layout on the cheapest way, the cheapest step first; negative where there is no way."""
        if (here, goal) not in self.hops:
            self.hops[here, goal] = self._find_hop(here, goal)
        return self.hops[here, goal]

    def _find_hop(self, here: int, goal: int) -> int:
        through = self.direct[here] + self.seconds[:, goal]
        least = float(through.min())
        if not np.isfinite(least):
            return -1
        return int(np.where(through <= least * (1 + _TIE), self.direct[here], np.inf).argmin())


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
            uneven: whether it is a parameter at rest: its shards may differ in size, and it travels in a bucket with
                others.
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
            nxt = table.next_hop(here, goal)
            if nxt < 0:
                raise ValueError(f"no redistribution from {src} to {dst}")
            layout = table.layouts[here]
            steps.append(step_between(layout, table.layouts[nxt]).on(shape, layout, self.axis_sizes))
            here = nxt
        return steps

    def _build(
        self, shape: tuple[int, ...], itemsize: int, differentiable: bool, backward: bool, uneven: bool
    ) -> LayoutTable:
        steps = _all_steps(len(shape), self.axis_sizes)
        rows, even = steps.largest_pieces(shape)
        fits = (even | steps.reaches_all(shape)) if uneven else even
        if not differentiable:
            fits &= ~(steps.codes == _R).any(axis=1)
        prices = self._prices(steps, rows, itemsize, backward, bucketed=uneven)
        position = np.cumsum(fits) - 1
        allowed = fits[steps.before] & fits[steps.after]
        direct = np.full((int(fits.sum()),) * 2, np.inf)
        direct[position[steps.before[allowed]], position[steps.after[allowed]]] = prices[allowed]
        seconds = _shortest(direct)
        layouts = tuple(itertools.compress(steps.layouts, fits))
        index = {layout: i for i, layout in enumerate(layouts)}
        return LayoutTable(layouts, index, steps.codes[fits] - _S, seconds, direct)

    def _prices(self, steps: _Steps, rows: np.ndarray, itemsize: int, backward: bool, bucketed: bool) -> np.ndarray:
        """The predicted time of every step; each price is asked for once.  Never zero, so that short ways win ties.

        Args:
            bucketed: whether one collective serves many such tensors, as parameters' do: a small one then pays for its
                share of the latency alone.
        """
        priced: dict[tuple[int, int, int], float] = {}

        def price(kinds: np.ndarray, sizes: np.ndarray) -> np.ndarray:
            keys = np.stack([kinds, steps.group, sizes], axis=1)
            unique, inverse = np.unique(keys, axis=0, return_inverse=True)
            for kind, group, size in unique.tolist():
                if (kind, group, size) not in priced:
                    what, axes = _KINDS[kind], steps.groups[group]
                    seconds = self.step_seconds(what, axes, size)
                    if bucketed and what in COLLECTIVES and size < BUCKET_BYTES:
                        share = max(size, 1) / BUCKET_BYTES  # also where there are no elements: no price is zero
                        seconds -= (1 - share) * self.step_seconds(what, axes, 0)
                    priced[kind, group, size] = seconds
            return np.array([priced[key] for key in map(tuple, unique.tolist())])[inverse.reshape(-1)]

        prices = price(steps.kind, steps.full_numel(rows, steps.before, steps.after, steps.src, steps.dst) * itemsize)
        if backward:
            src, dst = _DUAL[steps.dst], _DUAL[steps.src]
            sizes = steps.full_numel(rows, steps.after, steps.before, src, dst) * itemsize
            prices = prices + price(steps.back_kind, sizes)
        return prices


def _shortest(direct: np.ndarray) -> np.ndarray:
    """The length of the shortest way from each to each, after Floyd and Warshall; scipy's takes long to import."""
    lengths = direct.copy()
    np.fill_diagonal(lengths, 0.0)
    for k in range(len(lengths)):
        np.minimum(lengths, lengths[:, k, None] + lengths[k], out=lengths)
    return lengths


# Placements as numbers, for arrays of layouts: a shard of dim d is _S + d.
_I, _R, _P, _S = range(4)
_LETTERS = "IRPS"
_TIE = 1e-12  # relative difference of prices below which they count as equal
_DUAL = np.array([_I, _P, _R, *range(_S, 64)])
_KINDS = ("nothing", *dict.fromkeys(k for k in ACTIONS.values() if k != "nothing"))
_KIND_OF = np.array(
    [[_KINDS.index(ACTIONS.get((a, b), "nothing")) for b in _LETTERS] for a in _LETTERS]
)  # a shard to a shard of another dim


@dataclass(frozen=True, eq=False)
class _Steps:
    """All layouts of tensors of one rank on one mesh, and all steps between them, as arrays.

    Attributes:
        layouts: every layout, also those that a shape may not allow.
        codes: the layouts' placements as numbers, one row each.
        before, after: of each step, the layouts it leads from and to.
        src, dst: of each step, the placements.
        group: of each step, which of ``groups`` it changes.
        kind, back_kind: what a step does forward and backward (an index into ``_KINDS``).
        groups: sets of mesh axes.
    """

    layouts: list[Layout]
    codes: np.ndarray
    before: np.ndarray
    after: np.ndarray
    src: np.ndarray
    dst: np.ndarray
    group: np.ndarray
    kind: np.ndarray
    back_kind: np.ndarray
    groups: list[tuple[int, ...]]
    axis_sizes: tuple[int, ...]

    def largest_pieces(self, shape: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """For each layout the local shape where it is largest, and whether all ranks have the same."""
        rows = np.tile(np.array(shape, dtype=np.int64), (len(self.codes), 1))
        even = np.ones(len(self.codes), dtype=bool)
        for axis, n in enumerate(self.axis_sizes):
            for dim in range(len(shape)):
                cut = self.codes[:, axis] == _S + dim
                even &= ~cut | (rows[:, dim] % n == 0)
                rows[cut, dim] = -(-rows[cut, dim] // n)
        return rows, even

    def reaches_all(self, shape: Sequence[int]) -> np.ndarray:
        """The layouts of which every dim that is sharded has at least as many rows as ranks that shard it."""
        fits = np.ones(len(self.codes), dtype=bool)
        for dim, size in enumerate(shape):
            count = np.where(self.codes == _S + dim, np.array(self.axis_sizes), 1).prod(axis=1)
            fits &= (count == 1) | (size >= count)
        return fits

    def full_numel(
        self, rows: np.ndarray, before: np.ndarray, after: np.ndarray, src: np.ndarray, dst: np.ndarray
    ) -> np.ndarray:
        """The elements of the whole tensor as each step's group sees it (as ``step_bytes``)."""
        ranks = np.array([math.prod(self.axis_sizes[a] for a in axes) for axes in self.groups], dtype=np.int64)
        ranks = ranks[self.group]
        padded = rows[before].copy()
        cut = np.flatnonzero(dst >= _S)
        dims = dst[cut] - _S
        padded[cut, dims] = ranks[cut] * rows[after[cut], dims]
        return padded.prod(axis=1) * np.where(src >= _S, ranks, 1)


@cache
def _all_steps(rank: int, axis_sizes: tuple[int, ...]) -> _Steps:
    """Every step between layouts: on one axis, or completing (or spreading) a whole on several axes at once.

    Only the innermost of the axes that shard a dim may change (see [Note: order of axes] in ``placements``).
    """
    axes = range(len(axis_sizes))
    kinds = [Invariant, Replicate, Partial, *(Shard(d) for d in range(rank))]
    codes = np.array(list(itertools.product(range(len(kinds)), repeat=len(axes))), dtype=np.int64)
    weights = np.array([len(kinds) ** (len(axes) - 1 - a) for a in axes], dtype=np.int64)
    groups = [axes_ for count in range(1, len(axes) + 1) for axes_ in itertools.combinations(axes, count)]
    edges: list[tuple[np.ndarray, np.ndarray, int, int, int]] = []  # before, after, src, dst, group
    for g, changed in enumerate(groups):
        pairs = itertools.permutations(range(len(kinds)), 2) if len(changed) == 1 else ((_P, _I), (_P, _R), (_I, _R))
        for one, other in pairs:
            rows = (codes[:, list(changed)] == one).all(axis=1)
            for inner in axes[changed[0] + 1 :] if len(changed) == 1 else ():
                for code in (one, other):
                    if code >= _S:
                        rows &= codes[:, inner] != code
            before = np.flatnonzero(rows)
            edges.append((before, before + (other - one) * int(weights[list(changed)].sum()), one, other, g))
    sizes = [len(f[0]) for f in edges]
    src, dst, group = (np.repeat(np.array([f[i] for f in edges], dtype=np.int64), sizes) for i in (2, 3, 4))

    def does(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return _KIND_OF[np.minimum(a, _S), np.minimum(b, _S)]

    return _Steps(
        [tuple(kinds[c] for c in row) for row in codes.tolist()],
        codes,
        np.concatenate([f[0] for f in edges]),
        np.concatenate([f[1] for f in edges]),
        src,
        dst,
        group,
        does(src, dst),
        does(_DUAL[dst], _DUAL[src]),
        groups,
        axis_sizes,
    )


def steps_by_axis(src: Layout, dst: Layout) -> list[Step]:
    """A way that needs no prices: steps that each change one axis, for tensors of a rank's own.

    Shards are left from the last axis on and entered from the first, since only the innermost may change.  So what is
    sharded alike in both, but within other shards, is left as summands, too, and entered again.
    """
    changed = [axis for axis in range(len(src)) if cut_along(src, axis) != cut_along(dst, axis)]
    leaves = [axis for axis in reversed(changed) if src[axis].kind == "S"]
    steps = [Step((axis,), src[axis], Partial if dst[axis].kind == "S" else dst[axis]) for axis in leaves]
    between = functools.reduce(lambda layout, step: step.apply(layout), steps, src)
    return steps + [Step((a,), between[a], dst[a]) for a in changed if between[a] != dst[a]]


def step_between(before: Layout, after: Layout) -> Step:
    """The one step from a layout to another."""
    axes = tuple(i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b)
    return Step(axes, before[axes[0]], after[axes[0]])
