"""Turns experts that work on sorted or on copied weights into linear layers of which every row picks its own.

A dropless mixture of experts sorts its tokens by expert, multiplies each group by its expert's weights, and puts the
tokens back.  Where a token stands in that order depends on all tokens of the batch, so that none of it could be
sharded over them.  But everything between the sort and its inverse treats rows alone: the pass follows the sorted rows
and computes the same on rows in their old order (``grouped.grouped_linear`` sorts inside, on each rank its own).
Copies of an expert's weights for every token (``weight[experts]`` in a batched product) become the same operator.

Before:
    argsort = aten.argsort(experts);  index = aten.index(x, [argsort]);  histc = aten.histc(experts, 4, 0, 3)
    cumsum = aten.cumsum(histc, 0);  grouped_mm = aten._grouped_mm(index, weight, cumsum)
    relu = aten.relu(grouped_mm);  argsort_1 = aten.argsort(argsort);  index_1 = aten.index(relu, [argsort_1])
After:
    grouped_linear = grouped.grouped_linear(x, weight, experts);  relu = aten.relu(grouped_linear)

What is not recognised stays as it was: right, but replicated, and named by ``plan.unruled``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from autoparallel import operators
from autoparallel.operators.experts import grouped_linear
from autoparallel.passes.emitter import Emitter
from autoparallel.rules import rule_for
from autoparallel.rules.calls import (
    CASTS,
    arguments,
    casts_of,
    is_tensor,
    map_tensor_operands,
    shape_of,
    tensor_operands,
)

aten = torch.ops.aten

_GROUPED = ("aten::_grouped_mm", "transformers::grouped_mm_fallback")
_MOVES = (
    *CASTS, aten.reshape.default, aten.flatten.using_ints, aten.expand.default, aten.unsqueeze.default,
    aten.squeeze.dim, aten.squeeze.dims, aten.transpose.int, aten.permute.default, aten.select.int, aten.slice.Tensor,
)  # fmt: skip
_LOOK_UPS = (aten.index.Tensor, aten.index_select.default, aten.gather.default)
_SORTS = (aten.argsort.default, aten.argsort.stable)
_POSITIONS = (operators.topk_indices, aten.argmax.default, *_SORTS)


@dataclass(frozen=True)
class _Positions:
    """The unsorted form of the sorting permutation: 0, 1, 2, ...; with ``copies``, each so many times."""

    copies: int = 1


_Unsorted = fx.Node | _Positions


def ungroup_experts(module: fx.GraphModule) -> bool:
    """Rewrites the graph of ``module`` in place; whether it changed (the nodes left behind are dead)."""
    changed = False
    for node in list(module.graph.nodes):
        if node.target is aten.bmm.default:
            changed |= _ungather(node)
    for node in list(module.graph.nodes):
        if node.target in _SORTS and _is_sort_of_experts(node):
            changed |= _Unsort(module.graph, node).changed
    return changed


def _is_position(node: Any) -> bool:
    """Whether integers are surely not negative: they come out of a choice among experts."""
    while isinstance(node, fx.Node) and node.target in (*_MOVES, *_LOOK_UPS):
        node = node.args[0]
    if not isinstance(node, fx.Node):
        return False
    if node.target is aten.clamp.default:
        low = arguments(node)["min"]
        return isinstance(low, int) and low >= 0
    return node.target in _POSITIONS


def _ungather(node: fx.Node) -> bool:
    """``bmm(weight[experts], x.unsqueeze(-1))`` and ``bmm(x.unsqueeze(1), weight[experts])``."""
    emit = Emitter(node)
    left, right = node.args
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    if (experts := _gathered_by(left)) is not None and shape_of(right)[2] == 1:
        weight = emit(aten.transpose.int, left.args[0], 1, 2)
        row = emit(grouped_linear, emit(aten.squeeze.dim, right, 2), weight, experts)
        node.replace_all_uses_with(emit(aten.unsqueeze.default, row, 2))
        return True
    if (experts := _gathered_by(right)) is not None and shape_of(left)[1] == 1:
        row = emit(grouped_linear, emit(aten.squeeze.dim, left, 1), right.args[0], experts)
        node.replace_all_uses_with(emit(aten.unsqueeze.default, row, 1))
        return True
    return False


def _gathered_by(node: fx.Node) -> fx.Node | None:
    """The experts, where a node is ``weight[experts]`` of stacked matrices."""
    if node.target is not aten.index.Tensor or len(shape_of(node)) != 3:
        return None
    indices = list(arguments(node)["indices"])
    if len(indices) != 1 or len(shape_of(indices[0])) != 1 or not _is_position(indices[0]):
        return None
    return indices[0]


def _is_sort_of_experts(node: fx.Node) -> bool:
    experts = node.args[0]
    return (
        isinstance(experts, fx.Node)
        and len(shape_of(experts)) == 1
        and not arguments(node)["descending"]
        and _is_position(experts)
        and experts.target not in _SORTS  # the inverse of another sort
    )


class _Unsort:
    """Follows what is sorted by one permutation."""

    def __init__(self, graph: fx.Graph, order: fx.Node) -> None:
        self.order, self.experts, self.changed = order, cast(fx.Node, order.args[0]), False
        self.rows = shape_of(order)[0]
        self.unsorted: dict[fx.Node, _Unsorted] = {order: _Positions()}
        self.inverses: set[fx.Node] = set()
        after = False
        for node in list(graph.nodes):
            if after and node.op == "call_function" and is_tensor(node):
                self._visit(node, Emitter(node))
            after = after or node is order

    def _visit(self, node: fx.Node, emit: Emitter) -> None:
        if self._is_inverse(node):
            self.inverses.add(node)
            return
        replaced = self._put_back(node, emit)
        if replaced is not None:
            node.replace_all_uses_with(replaced)
            self.changed = True
            return
        unsorted = self._looked_up(node, emit) or self._multiply(node, emit) or self._by_rows(node, emit)
        if unsorted is not None:
            self.unsorted[node] = unsorted

    def _index_of(self, node: fx.Node) -> tuple[Any, Any] | None:
        """``(x, i)`` where a node is ``x[i]`` along dim 0, with a vector of indices."""
        v = arguments(node)
        if node.target is aten.index.Tensor and len(v["indices"]) == 1 and v["indices"][0] is not None:
            index = v["indices"][0]
        elif (node.target is aten.index_select.default and v["dim"] == 0) or (
            node.target is aten.gather.default and len(shape_of(node)) == 1
        ):
            index = v["index"]
        else:
            return None
        return (v["self"], index) if len(shape_of(index)) == 1 else None

    def _is_inverse(self, node: fx.Node) -> bool:
        """The inverse permutation, sorted or written into a new tensor."""
        v = arguments(node)
        if node.target in _SORTS:
            return v["self"] is self.order and not v["descending"]
        if node.target is aten.index_put.default:
            place = len(v["indices"]) == 1 and v["indices"][0] is self.order and not v["accumulate"]
            values = v["values"]
        elif node.target is aten.scatter.src:
            place, values = v["index"] is self.order, v["src"]
        else:
            return False
        start = values.target is aten.arange.default or (
            values.target in (aten.arange.start, aten.arange.start_step) and arguments(values)["start"] == 0
        )
        return place and start and shape_of(values) == (self.rows,) == shape_of(node)

    def _put_back(self, node: fx.Node, emit: Emitter) -> fx.Node | None:
        """The unsorted rows, where a node puts sorted ones back into their order."""
        look_up = self._index_of(node)
        if look_up is not None and look_up[1] in self.inverses and isinstance(look_up[0], fx.Node):
            rows = self.unsorted.get(look_up[0])
            return rows if isinstance(rows, fx.Node) else None
        if node.target is aten.index_add.default:
            v = arguments(node)
            rows, where = self.unsorted.get(v["source"]), self.unsorted.get(v["index"])
            if v["dim"] == 0 and v["alpha"] == 1 and isinstance(rows, fx.Node) and isinstance(where, _Positions):
                total = self._sum_copies(rows, where.copies, v["self"], emit)
                return emit(aten.add.Tensor, v["self"], total) if total is not None else None
        return None

    def _sum_copies(self, rows: fx.Node, copies: int, like: fx.Node, emit: Emitter) -> fx.Node | None:
        """The sums of every ``copies`` rows."""
        if shape_of(like)[0] * copies != self.rows:
            return None
        sizes = emit.sizes(like)
        return emit(aten.sum.dim_IntList, emit(aten.reshape.default, rows, [sizes[0], copies, *sizes[1:]]), [1])

    def _looked_up(self, node: fx.Node, emit: Emitter) -> _Unsorted | None:
        """Rows fetched in the sorted order; the permutation divided by the number of copies of a token."""
        v = arguments(node)
        divided = node.target is aten.floor_divide.default or (
            node.target is aten.div.Tensor_mode and v["rounding_mode"] == "floor"
        )
        if divided:
            before = self.unsorted.get(v["self"]) if isinstance(v["self"], fx.Node) else None
            if isinstance(before, _Positions) and isinstance(v["other"], int):
                return _Positions(before.copies * v["other"])
            return None
        look_up = self._index_of(node)
        if look_up is None or look_up[0] in self.unsorted:
            return None
        x, where = look_up[0], self.unsorted.get(look_up[1])
        if isinstance(where, fx.Node):
            return emit(aten.index.Tensor, x, [where])
        if where is None or shape_of(x)[0] * where.copies != self.rows:
            return None
        if where.copies == 1:
            return cast(fx.Node, x)
        sizes = emit.sizes(x)
        copied = emit(aten.expand.default, emit(aten.unsqueeze.default, x, 1), [sizes[0], where.copies, *sizes[1:]])
        return emit(aten.reshape.default, copied, [emit.size(self.experts, 0), *sizes[1:]])

    def _multiply(self, node: fx.Node, emit: Emitter) -> _Unsorted | None:
        """A grouped product of sorted rows."""
        if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.name not in _GROUPED:
            return None
        x, weight = cast(tuple[fx.Node, fx.Node], node.args[:2])
        rows, ends = self.unsorted.get(x), arguments(node)["offs"]
        plain = arguments(node).get("bias") is None and arguments(node).get("out_dtype") is None
        if not isinstance(rows, fx.Node) or not plain or len(shape_of(weight)) != 3:
            return None
        if not self._are_ends(ends, shape_of(weight)[0]):
            return None
        return emit(grouped_linear, rows, weight, self.experts)

    def _are_ends(self, node: Any, count: int) -> bool:
        """Whether a node is where each expert's rows end: the running sum of how many rows each has."""
        node = _uncast(node)
        if not isinstance(node, fx.Node) or node.target is not aten.cumsum.default:
            return False
        node = _uncast(node.args[0])
        if node.target is aten.histc.default:
            v = arguments(node)
            plain = v["bins"] == count and v["min"] == 0 and v["max"] in (count - 1, count)
            return plain and self._are_experts(v["self"])
        if node.target is aten.sum.dim_IntList:
            ones, v = _uncast(node.args[0]), arguments(node)
            counts = ones.target is aten.one_hot.default and arguments(ones)["num_classes"] == count
            return counts and list(v["dim"]) in ([0], [-2]) and not v["keepdim"] and self._are_experts(ones.args[0])
        if node.target is aten.scatter_add.default:
            v = arguments(node)
            ones = _uncast(v["src"])
            ones_per_row = ones.target in (aten.ones_like.default, aten.ones.default) and shape_of(node) == (count,)
            zeros = _uncast(v["self"]).target in (aten.zeros.default, aten.zeros_like.default, aten.full.default)
            return ones_per_row and zeros and self._are_experts(v["index"])
        return False

    def _are_experts(self, node: Any) -> bool:
        node = _uncast(node)
        return node is self.experts or self.unsorted.get(node) is self.experts

    def _by_rows(self, node: fx.Node, emit: Emitter) -> _Unsorted | None:
        """An operator that treats every sorted row alone, on the rows as they were."""
        operands = tensor_operands(node)
        if not any(x in self.unsorted for x in operands):
            return None
        rule = rule_for(node)
        if rule is None or not rule.result or len(rule.result[0]) != 1 or rule.result[0][0] in rule.blocked:
            return None
        factor = rule.result[0][0]
        for x, factors in zip(operands, rule.operands, strict=True):
            if x in self.unsorted:
                if not isinstance(self.unsorted[x], fx.Node) or not factors or factors[0] != (factor,):
                    return None
            elif any(factor in dim for dim in factors):
                return None
        args, kwargs = map_tensor_operands(node, lambda i, x: cast(fx.Node, self.unsorted.get(x, x)))
        return emit(node.target, *args, **kwargs)


def _uncast(node: Any) -> Any:
    return casts_of(node)[-1] if isinstance(node, fx.Node) else node
