"""The ways to run one operator on a whole mesh, all at once as arrays, and their prices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import fx

from autoparallel import operators
from autoparallel.graph.sizes import Sizes
from autoparallel.hardware import Profile
from autoparallel.placements import Layout, Placement
from autoparallel.placements.modes import Mode
from autoparallel.predict.cost import operator_seconds
from autoparallel.rules import Rule, rule_for
from autoparallel.rules.calls import tensor_operands
from autoparallel.rules.typing import Typed
from autoparallel.rules.ways import call_modes, operand_fits

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run an operator on the whole mesh, or to keep a parameter.

    Attributes:
        modes: how the operator runs on each mesh axis; empty for a parameter or an input.
        needs: the layouts that it reads its operands in.
        result: the layout of what it makes.
        seconds: of one rank, forward and backward.
        saved_bytes: what stays in memory.
        again: seconds that running it again in the backward takes.
        kept_bytes: what stays in memory nevertheless, where all but the products of its layer runs again.
        left_bytes: the same, where the whole layer does.
        gather: for a parameter, when it is gathered.
    """

    modes: tuple[Mode, ...]
    needs: tuple[Layout, ...]
    result: Layout
    seconds: float
    saved_bytes: float = 0.0
    again: float = 0.0
    kept_bytes: float = 0.0
    left_bytes: float = 0.0
    gather: str = ""

    @property
    def passes(self) -> tuple[float, float]:
        """Seconds forward and backward."""
        return (self.again, self.seconds - self.again) if self.again else (self.seconds, 0.0)


@dataclass(slots=True)
class Variable:
    """The choice of one node, and its number in a factor graph."""

    node: fx.Node
    options: list[Option]
    number: int


Reader = tuple[Variable, int]
"""A consumer of a tensor, and which of its operands it is."""


def operator_options(
    node: fx.Node,
    axis_sizes: Sequence[int],
    profile: Profile,
    sizes: Sizes,
    allowed: Callable[[fx.Node, Rule | None, Sequence[Typed], Typed, int], bool],
    parts: tuple[float, float, float],
) -> list[Option]:
    """Every way to run a call; of those that read and make the same layouts, the fastest.

    Args:
        allowed: whether a call with a rule and some ways to run may run in one of them on one mesh axis.
        parts: bytes that the backward finds for each byte of the result, and where all but the products of the layer
            runs again in it, or the whole layer.
    """
    ways, rule = call_modes(node), rule_for(node)
    operands = tensor_operands(node)
    shapes = [sizes.shape(x) for x in operands]
    result_shape = sizes.shape(node)
    axes = range(len(axis_sizes))
    permitted = [[w for w, way in enumerate(ways) if allowed(node, rule, ways, way, axis)] for axis in axes]
    combinations = np.array(list(itertools.product(*permitted)), dtype=np.int64).reshape(-1, len(axis_sizes))
    fits, result_pieces = _pieces([w.result for w in ways], combinations, axis_sizes, result_shape)
    read_pieces = []
    for i, shape in enumerate(shapes):
        even, pieces = _pieces([w.operands[i] for w in ways], combinations, axis_sizes, shape)
        read_pieces.append(pieces)
        if node.target is operators.pad_rows:  # reads shards that differ in size
            layouts = [tuple(ways[w].operands[i] for w in row) for row in combinations.tolist()]
            even = np.array([operand_fits(node, shape, result_shape, x, axis_sizes) for x in layouts], dtype=bool)
        fits &= even
    for factor in outer_factors(rule) if rule is not None else ():  # a shard has whole groups, blocks, heads
        size = rule.sizes[factor]  # type: ignore[union-attr]
        shards = np.array([way.mode.kind == "shard" and way.mode.factor == factor for way in ways])[combinations]
        count = np.where(shards, np.array(axis_sizes, dtype=np.int64), 1).prod(axis=1)
        fits &= (count == 1) | (size % count == 0)
    possible = np.flatnonzero(fits)
    pricer = _Pricer(node, rule, ways, axis_sizes, profile, sizes)
    itemsizes = [x.meta["val"].element_size() for x in operands]
    moved = result_pieces * node.meta["val"].element_size()
    saved = moved
    for pieces, itemsize in zip(read_pieces, itemsizes, strict=True):
        moved = moved + pieces * itemsize
    best: dict[tuple[tuple[Layout, ...], Layout], Option] = {}
    portions = parts if node.meta["backward"] else (0.0, 0.0, 0.0)
    for row, i in zip(combinations[possible].tolist(), possible.tolist(), strict=True):
        chosen = [ways[w] for w in row]
        needs = tuple([tuple([t.operands[k] for t in chosen]) for k in range(len(operands))])
        result = tuple([t.result for t in chosen])
        seconds, again = pricer.seconds(row, int(moved[i]))
        fastest = best.get((needs, result))
        if fastest is None or seconds < fastest.seconds:
            modes = tuple([t.mode for t in chosen])
            size = float(saved[i])
            saves, keeps, leaves = [portion * size for portion in portions]
            best[needs, result] = Option(modes, needs, result, seconds, saves, again, keeps, leaves)
    if node.target is operators.interleave:  # paid where the blocks are dealt out: see ``planner.space.interleaving``
        return [Option(option.modes, option.needs, option.result, 0.0) for option in best.values()]
    return list(best.values())


def outer_factors(rule: Rule) -> list[str]:
    """The factors of known sizes that begin a dim which has others inside, so that the dim's size does not tell whether
    they divide."""
    dims = {dim for tensor in (*rule.operands, rule.result) for dim in tensor if len(dim) > 1}
    return sorted({dim[0] for dim in dims if isinstance(rule.sizes[dim[0]], int)})


def _pieces(
    ways: Sequence[Placement], combinations: Ints, axis_sizes: Sequence[int], shape: tuple[int, ...]
) -> tuple[npt.NDArray[np.bool_], Ints]:
    """For each combination of ways, whether all ranks have equal parts of a tensor, none empty; and how large."""
    dims = np.array([p.dim if p.kind == "S" else -1 for p in ways], dtype=np.int64)[combinations]
    fits = np.ones(len(combinations), dtype=bool)
    cuts = np.ones(len(combinations), dtype=np.int64)
    for dim, size in enumerate(shape):
        count = np.where(dims == dim, np.array(axis_sizes, dtype=np.int64), 1).prod(axis=1)
        fits &= (count == 1) | (size > 0) & (size % count == 0)
        cuts *= count
    return fits, math.prod(shape) // cuts


class _Pricer:
    """Asks the cost model once for all combinations that cut an operator into the same pieces."""

    def __init__(
        self,
        node: fx.Node,
        rule: Rule | None,
        ways: Sequence[Typed],
        axis_sizes: Sequence[int],
        profile: Profile,
        sizes: Sizes,
    ) -> None:
        self.rule, self.ways, self.axis_sizes, self.profile, self.sizes = rule, ways, axis_sizes, profile, sizes
        self.dtype = node.meta["val"].dtype
        self.backward = bool(node.meta["backward"])
        # What communicates inside the operator costs differently on each axis; the rest counts pieces only.
        self.by_axis = rule is not None and (bool(rule.exchange) or "composite" in rule.reductions.values())
        self.seconds_of: dict[Hashable, tuple[float, float]] = {}

    def seconds(self, row: Sequence[int], moved: int) -> tuple[float, float]:
        """The time of the call and, where gradients flow, of its backward; and that of the call in the backward."""
        key: Hashable = (moved, tuple(row) if self.by_axis else tuple(sorted(zip(row, self.axis_sizes, strict=True))))
        if key not in self.seconds_of:
            modes = [self.ways[w].mode for w in row]
            forward, backward = operator_seconds(
                self.profile, self.rule, modes, self.axis_sizes, self.sizes, moved, self.dtype
            )
            self.seconds_of[key] = (forward + backward, forward) if self.backward else (forward, 0.0)
        return self.seconds_of[key]
