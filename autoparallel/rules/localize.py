"""The local call of a sharded operator, where its arguments speak of global sizes or positions."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from autoparallel.placements import Layout, count_pieces
from autoparallel.placements.modes import Mode
from autoparallel.rules.calls import arguments, with_argument


@dataclass
class LocalCall:
    """The call that a rank makes for one operator; ``localize`` functions change it in place.

    Attributes:
        graph: the graph of the local program; new nodes are inserted before the call.
        node: the operator's node in the global graph: its meta holds the global shapes.
        target, args, kwargs: the local call so far, its operands already redistributed.
        modes: how the operator runs on each mesh axis.
        operand_layouts, result_layout: the layouts of the operands and of the result.
        axis_sizes: the sizes of the mesh axes.
        groups: the names of the mesh axes, as programs name them.
        divisor: what the result is to be divided by: a mean over a sharded factor is this rank's summand times the
            number of shards.
    """

    graph: fx.Graph
    node: fx.Node
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    modes: Sequence[Mode]
    operand_layouts: Sequence[Layout]
    result_layout: Layout
    axis_sizes: Sequence[int]
    groups: Sequence[str]
    divisor: int = 1

    def axes_of(self, factor: str) -> list[int]:
        """The mesh axes that shard ``factor``, outermost first."""
        return [i for i, m in enumerate(self.modes) if m.kind == "shard" and m.factor == factor]

    def pieces(self, factor: str) -> int:
        """Into how many pieces ``factor`` is cut."""
        return math.prod(self.axis_sizes[i] for i in self.axes_of(factor))

    def joint_group(self, factor: str) -> str:
        """The name of the one group over all axes that shard ``factor``; empty when none does."""
        axes = self.axes_of(factor)
        if not axes:
            return ""
        prefix = self.groups[axes[0]].rpartition("/")[0]
        return f"{prefix}/{'+'.join(self.groups[i].rpartition('/')[2] for i in axes)}"

    def shards(self, dim: int) -> int:
        """Into how many pieces the result's ``dim`` is cut."""
        return count_pieces(self.result_layout, dim, self.axis_sizes)

    def dim_groups(self) -> tuple[str, ...]:
        """For each dim of the result, the axes that shard it, joined by commas."""
        rank = len(self.node.meta["val"].shape)
        cut: list[list[str]] = [[] for _ in range(rank)]
        for group, placement in zip(self.groups, self.result_layout, strict=True):
            if placement.kind == "S":
                cut[placement.dim].append(group)
        return tuple(",".join(names) for names in cut)

    def set_argument(self, name: str, value: Any) -> None:
        """Replaces one argument of the local call."""
        self.args, self.kwargs = with_argument(self.args, self.kwargs, self.node, name, value)

    def divide(self, size: int | fx.Node, pieces: int) -> int | fx.Node:
        """One piece of a size, which a node computes where it follows from the batch."""
        if not isinstance(size, fx.Node):
            return size // pieces
        local = self.graph.call_function(operator.floordiv, (size, pieces))
        local.meta["val"] = size.meta["val"] // pieces
        return local


Localize = Callable[[LocalCall], None]


def divide_sizes(name: str) -> Localize:
    """Localises an argument that lists the result's sizes (view, expand, full): each sharded dim is divided."""

    def localize(call: LocalCall) -> None:
        sizes = list(arguments(call.node)[name])
        rank = len(call.node.meta["val"].shape)
        if len(sizes) != rank:
            raise AssertionError(f"{call.node} lists {len(sizes)} sizes for a result of rank {rank}")
        for dim, size in enumerate(sizes):
            count = call.shards(dim)
            if count == 1 or size == -1:
                continue
            sizes[dim] = call.divide(size, count)
        call.set_argument(name, sizes)

    return localize


def divide_counts(*names: str, factor: str) -> Localize:
    """Localises arguments that count what ``factor`` runs over, such as groups: each is divided by its pieces."""

    def localize(call: LocalCall) -> None:
        pieces = call.pieces(factor)
        for name in names if pieces > 1 else ():
            call.set_argument(name, call.divide(arguments(call.node)[name], pieces))

    return localize
