"""Follows the rows of the batch through a graph, to tell whether microbatches compute what the whole batch does.

They do where each call makes of some rows those rows of its result, or a sum over rows of which nothing is made but a
loss.  What a sharding rule allows for a dim that is cut is what may be done to a dim that comes in parts, as long as no
communication stands behind it.  Rewrites nothing.

For (x is the batch):
    linear = aten.linear(x, w)         rows
    mean = aten.mean(linear, [0])      a summand of each microbatch
    sub = aten.sub(linear, mean)       of the whole batch only: microbatches would make something else
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from autoparallel import operators
from autoparallel.placements import Invariant, Partial, Placement, Replicate, Shard
from autoparallel.rules import rule_for
from autoparallel.rules.calls import arguments, is_tensor, shape_of, tensor_operands
from autoparallel.rules.ways import call_modes

aten = torch.ops.aten

_SCALED = (
    aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.pow.Tensor_Tensor, aten.rsub.Tensor,
)  # fmt: skip
_SUMS = (aten.sum.default, aten.sum.dim_IntList, operators.cross_entropy_sum)
_ALIKE = (aten.expand.default, aten.full.default, aten.zeros.default, aten.ones.default)
_VIEWS = (aten.unsqueeze.default, aten.expand.default, aten.reshape.default, aten._to_copy.default)


def mixes_rows(graph: fx.Graph, batched: Collection[str], results: Collection[fx.Node]) -> str:
    """The key of the first call that makes of the batch what microbatches do not make of theirs; empty where none does.

    Args:
        batched: the placeholders whose first dim is the batch.
        results: the loss, and what it weighs: sums over the batch, or quotients of such sums.
    """
    walk = _Walk(results)
    for node in graph.nodes:
        if node.op == "placeholder":
            walk.placements[node] = Shard(0) if node.name in batched else Invariant
        elif node.op == "call_function":
            placement = walk.follow(node) if is_tensor(node) else Invariant
            if placement is None:
                return str(node.meta["key"])
            walk.placements[node] = placement
    return next((str(node.meta["key"]) for node in results if walk.placements[node] != Partial), "")


class _Walk:
    """One walk through a graph.

    Attributes:
        placements: of each value, the dim of its rows, whether it is a summand of each microbatch, or the same for all.
        numbers: the values that count rows: microbatches may look up their rows with them, and nothing else.
    """

    def __init__(self, results: Collection[fx.Node]) -> None:
        self.results = results
        self.placements: dict[fx.Node, Placement] = {}
        self.numbers: set[fx.Node] = set()

    def follow(self, node: fx.Node) -> Placement | None:
        """How a call's result lies; None where it is of the whole batch only."""
        operands = [self.placements[x] for x in tensor_operands(node)]
        if node.target is operator.getitem:
            return operands[0] if operands else Invariant
        if node.target is operators.weighted_mean or self._is_quotient(node):
            return Partial if operands[0] == Partial and operands[1] in (Partial, Invariant) else None
        if node.target in _SCALED and any(not is_tensor(x) for x in node.all_input_nodes):  # by the size of the batch
            sums = node in self.results and operands == [Partial] and node.all_input_nodes[0].target in _SUMS
            return Partial if sums else None
        if any(x in self.numbers for x in node.all_input_nodes) or node.target in (aten.arange.default,):
            return self._count(node, operands)
        if all(x == Invariant for x in operands):
            rows = _open_dim(node)
            return Invariant if rows is None else Shard(rows) if node.target in _ALIKE else None
        return _along_rule(node, operands) or _along_dim(node, operands)

    def _is_quotient(self, node: fx.Node) -> bool:
        return node in self.results and node.target is aten.div.Tensor and len(tensor_operands(node)) == 2

    def _count(self, node: fx.Node, operands: list[Placement]) -> Placement | None:
        """The placement of a call that counts rows, or uses their numbers."""
        rows = _open_dim(node)
        if rows is None:
            return Invariant if not operands else None
        if node.target in _VIEWS or not operands:
            self.numbers.add(node)
            return Shard(rows)
        if node.target is not aten.index.Tensor:
            return None
        x, indices = node.args[:2]
        assert isinstance(x, fx.Node) and isinstance(indices, list | tuple)
        placements = [self.placements[i] for i in indices if isinstance(i, fx.Node)]
        by_rows = self.placements[x] == Shard(0) and indices[0] in self.numbers and x not in self.numbers
        return Shard(rows) if by_rows and Partial not in placements else None


def _open_dim(node: fx.Node) -> int | None:
    """The dim of a result whose size depends on the batch's."""
    return next((dim for dim, size in enumerate(shape_of(node)) if not isinstance(size, int)), None)


def _along_rule(node: fx.Node, operands: list[Placement]) -> Placement | None:
    """How a result lies by the rule of the call, where that sends nothing."""
    rule = rule_for(node)
    for way in call_modes(node):
        if way.mode.kind == "shard" and rule is not None and rule.reductions.get(way.mode.factor) == "composite":
            continue
        pairs = zip(operands, way.operands, strict=True)
        if all(b in (Invariant, Replicate) if a == Invariant else a == b for a, b in pairs):
            return way.result
    return None


def _along_dim(node: fx.Node, operands: list[Placement]) -> Placement | None:
    """How the result of a call without a rule lies that works along one dim, which it is told, and leaves others."""
    values: dict[str, Any] = arguments(node) if isinstance(node.target, torch._ops.OpOverload) else {}
    rows = {x.dim for x in operands if x.kind == "S"}
    if rule_for(node) is not None or len(rows) != 1 or Partial in operands or not isinstance(values.get("dim"), int):
        return None
    (dim,) = rows
    cut = [x for x, p in zip(tensor_operands(node), operands, strict=True) if p.kind == "S"]
    alike = all(shape_of(x)[dim] == shape_of(node)[dim] for x in cut)
    return Shard(dim) if alike and values["dim"] % len(shape_of(node)) != dim else None
