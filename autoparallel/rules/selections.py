"""The rule of what is made of as many rows as values select: which dims of its operands may be cut.

Experts under masks, and most else that a model does with selected rows, treat every row alone: they look rows up, make
something of each, and put it back or add it up.  A rank that has some of the rows does so with those.  The rule is
proved by following one cut through the call's graphs: from a dim of a mask on, by the rules of the calls in them, and
back to what else has to be cut with it.

For (the mask is cut along its dim; then x and out must be):
    nonzero = aten.nonzero(mask);  select = aten.select(nonzero, 1, 0)      places, counted from a rank's first row
    index = aten.index(x, [select]);  linear = aten.linear(index, weight)   the rows that this mask selects
    index_add = aten.index_add(out, 0, select, linear)                      cut as out is
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autoparallel.operators import DRAWS
from autoparallel.operators.control_flow import require_sizes
from autoparallel.placements import Partial, Shard
from autoparallel.placements.modes import Mode
from autoparallel.rules.calls import CASTS, MASKS, arguments, dims_of, shape_of, tensor_operands
from autoparallel.rules.core import Rule, RuleError, dim_names, dimwise
from autoparallel.rules.flat_calls import INTO_ALONG, FlatCall, MixedRows, either
from autoparallel.rules.localize import LocalCall
from autoparallel.rules.shapes import expression
from autoparallel.rules.table import TRANSFORMS

aten = torch.ops.aten

RuleOf = Callable[[fx.Node], Rule | None]

_SIZED = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default)
_MOVES = (*CASTS, *_SIZED, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.flatten.using_ints)
"""What gives the values of its operand."""
_OF_COLUMNS = (*_MOVES, aten.select.int, aten.sym_size.int)
"""What reads the places of a mask's truths in all its dims."""
_CREATORS = (
    aten.zeros.default, aten.ones.default, aten.full.default, aten.empty.memory_format, aten.new_zeros.default,
    aten.new_ones.default, aten.new_full.default, aten.new_empty.default,
)  # fmt: skip
_ALONG = (aten.index_select.default, aten.gather.default)
_NEED_ROWS = (*TRANSFORMS, aten.stft.default, aten.pixel_shuffle.default, aten.pixel_unshuffle.default)
"""What torch cannot do, or not differentiate, for no rows, which a rank may have of those that are selected."""


def selection(node: fx.Node, rule_of: RuleOf) -> Rule | None:
    """The rule of a call that makes one tensor of as many rows as values select, or goes one way or the other.

    Args:
        rule_of: gives the rule of a call in its graphs.
    """
    try:
        cuts = list(_cuts(FlatCall(node), rule_of))
    except MixedRows:
        return None
    operands = tensor_operands(node)
    *names, result = (
        dim_names(len(shape_of(x)), range(len(shape_of(x))), f"x{i}_") for i, x in enumerate([*operands, node])
    )
    for i, (dims, end) in enumerate(cuts):
        for x, of_operand in zip(operands, names, strict=True):
            if x in dims:
                of_operand[dims[x]] = f"rows{i}"
        if end is not None:
            result[end] = f"rows{i}"
    return dimwise(node, names, result) if cuts else None


@dataclass(frozen=True)
class _Cut:
    """A tensor of which a rank has some rows.

    Attributes:
        dim: that of the rows.
        rows: which rows, in which order; empty for those of the operands, cut into equal pieces.
        places: where the tensor holds places of rows among those of the operands, counted from the rank's first: the
            size of the dim in which they are; None where it holds something else.
        column: where a row has the places of a truth in all dims of a mask: which of them is such a place.
    """

    dim: int
    rows: Hashable = ""
    places: Any = None
    column: int | None = None

    def is_as(self, other: _Value) -> bool:
        """Whether another tensor is cut alike."""
        return isinstance(other, _Cut) and (self.dim, self.rows) == (other.dim, other.rows)


@dataclass(frozen=True)
class _Count:
    """How many rows a rank has of some, or so many times as many.

    Attributes:
        rows: which, as those of a cut.
    """

    rows: Hashable


_WHOLE, _UNDECIDED, _SUM = "whole", "undecided", "sum"
_Value = _Cut | _Count | str


def _cuts(flat: FlatCall, rule_of: RuleOf) -> Iterator[tuple[dict[fx.Node, int], int | None]]:
    """The cuts that leave rows alone: of which operands which dim is cut, and of the result; None for the latter where
    it is a sum over rows.  No two of them cut the same dim, and at most one adds up."""
    cut_dims: set[tuple[fx.Node | None, int | None]] = set()
    for mask in dict.fromkeys(flat.masks()):
        for dim in range(len(shape_of(mask))):
            try:
                dims, end = _follow(flat, rule_of, mask, dim)
            except MixedRows:
                continue
            cut = {*dims.items(), (None, end)}
            if not cut & cut_dims:
                cut_dims |= cut
                yield dims, end


def _follow(flat: FlatCall, rule_of: RuleOf, mask: fx.Node, dim: int) -> tuple[dict[fx.Node, int], int | None]:
    """The cut that one of a mask leads to.

    Raises:
        MixedRows: where rows are not left alone.
    """
    decided: dict[fx.Node, _Value] = {}
    follower = _Follower(flat, rule_of, decided)
    key = flat.key(mask)
    for alike in (x for x in flat.masks() if flat.key(x) == key):
        follower.require(alike, _Cut(dim))
    count = 0
    while count < len(decided):
        count = len(decided)
        _Follower(flat, rule_of, decided)
    end = _Follower(flat, rule_of, dict.fromkeys(flat.operands, _WHOLE) | decided).values[flat.result]
    if not (end == _SUM or isinstance(end, _Cut) and not end.rows and end.places is None):
        raise MixedRows
    dims = {flat.operands[x]: value.dim for x, value in decided.items() if isinstance(value, _Cut)}
    cut = [*dims.items(), *([(flat.result, end.dim)] if isinstance(end, _Cut) else [])]
    if len({expression(shape_of(x)[dim]) for x, dim in cut}) > 1:
        raise MixedRows  # one factor is of one size
    return dims, end.dim if isinstance(end, _Cut) else None


class _Follower:
    """What a rank has of each value of a flat graph, where it has this of the operands.

    Attributes:
        decided: of the operands; what a call needs of others is added.
        values: of all.

    Raises:
        MixedRows: where a call needs more rows than a rank has.
    """

    def __init__(self, flat: FlatCall, rule_of: RuleOf, decided: dict[fx.Node, _Value]) -> None:
        self.flat, self.rule_of, self.decided = flat, rule_of, decided
        self.values: dict[fx.Node, _Value] = {}
        for node in flat.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = decided.get(node, _UNDECIDED)
            elif node.op == "call_function":
                self.values[node] = self._value_of(node)

    def require(self, node: Any, value: _Value) -> None:
        """Has a value be whole, or cut in some way."""
        if not isinstance(node, fx.Node):
            return
        now = self.values[node]
        if now == _UNDECIDED:
            if isinstance(value, _Cut) and value.rows:
                raise MixedRows
            if node.op == "placeholder":
                self.decided[node] = value
            else:
                self._require_of_call(node, value)
            self.values[node] = value
        elif not (now == value or isinstance(value, _Cut) and value.is_as(now)):
            raise MixedRows

    def _require_of_call(self, node: fx.Node, value: _Value) -> None:
        """Has what a call reads be so that its result is."""
        if not isinstance(value, _Cut):
            for x in node.all_input_nodes:
                self.require(x, _WHOLE)
        elif node.target is either:
            for result in node.args[1:]:
                self.require(result, value)
        elif node.target in (*INTO_ALONG, aten.index_put.default):
            self.require(node.args[0], value)
        else:
            rule = self._rule(node)
            self._require_factor(node, rule, _factor(rule, rule.result, value.dim))

    def _require_factor(self, node: fx.Node, rule: Rule, factor: str, rows: Hashable = "") -> None:
        """Has the operands of a call be cut where they bear a factor, and whole where they do not."""
        for x, factors in zip(tensor_operands(node), rule.operands, strict=True):
            dim = rule.dim_of(factors, factor)
            self.require(x, _WHOLE if dim is None else _Cut(dim, rows))

    def _rule(self, node: fx.Node) -> Rule:
        is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) or node.target in DRAWS
        try:
            rule = None if is_random or node.target in _NEED_ROWS else self.rule_of(node)
        except RuleError:  # sizes that are equal for some values alone, each with some number here
            rule = None
        if rule is None:
            raise MixedRows
        return rule

    def _value_of(self, node: fx.Node) -> _Value:
        read = [self.values[x] for x in node.all_input_nodes]
        if all(x in (_WHOLE, _UNDECIDED) for x in read):
            return _UNDECIDED if _UNDECIDED in read else _WHOLE
        if _SUM in read:
            return self._follow_sum(node, read)
        if any(isinstance(x, _Cut) and x.column is not None for x in read) and node.target not in _OF_COLUMNS:
            raise MixedRows
        if (follow := _FOLLOW.get(node.target)) is not None:
            return follow(self, node)
        if node.target in (*_ALONG, *INTO_ALONG):
            return self._follow_places(node)
        is_for_rows = node.target is aten.expand.default and self._cut(node.args[0]) is None
        return self._follow_creation(node) if is_for_rows or node.target in _CREATORS else self._by_rule(node)

    def _follow_sum(self, node: fx.Node, read: list[_Value]) -> _Value:
        """What only hands sums over rows on: they are added up over ranks behind it."""
        before, after = (x.meta["val"].dtype for x in (tensor_operands(node)[0], node))
        is_cast = node.target in CASTS and after in (before, torch.float64)  # others round before they are added up
        is_packed = node.target is aten.stack.default and all(x == _SUM for x in read)
        is_of_sizes = node.target is require_sizes and read[1:] == [_WHOLE] * len(read[1:])
        if is_cast or is_packed or is_of_sizes:
            return _SUM
        raise MixedRows

    def _cut(self, node: Any) -> _Cut | None:
        """How a tensor is cut; None for one that is not."""
        value = self.values[node] if isinstance(node, fx.Node) else None
        return value if isinstance(value, _Cut) else None

    def _either(self, node: fx.Node) -> _Value:
        predicate, *results = node.args
        self.require(predicate, _WHOLE)
        cut = next(filter(None, map(self._cut, results)), None)
        for x in results:
            self.require(x, _WHOLE if cut is None else cut)
        self._require_no_places(*results)
        return _WHOLE if cut is None else cut

    def _size(self, node: fx.Node) -> _Value:
        x, dim = node.args
        cut = self._cut(x)
        return _Count(cut.rows) if cut is not None and dim == cut.dim else _WHOLE

    def _multiple(self, node: fx.Node) -> _Value:
        counts = [self.values[x] for x in node.args if isinstance(x, fx.Node)]
        if len(counts) > 1:
            raise MixedRows
        return counts[0]

    def _follow_creation(self, node: fx.Node) -> _Value:
        """What is created for some rows, or is the same for each of them."""
        if node.target is aten.expand.default:
            self.require(node.args[0], _WHOLE)
        sizes = arguments(node)["size"]
        counts = {dim: self.values[x] for dim, x in enumerate(sizes) if isinstance(x, fx.Node)}
        cut = [(dim, count.rows) for dim, count in counts.items() if isinstance(count, _Count)]
        if len(cut) > 1:
            raise MixedRows
        return _Cut(*cut[0]) if cut else _WHOLE

    def _nonzero(self, node: fx.Node) -> _Value:
        mask: Any = node.args[0]
        cut = self._cut(mask)
        if cut is None or cut.rows:
            raise MixedRows
        return _Cut(0, self.flat.key(mask), shape_of(mask)[cut.dim], cut.dim)

    def _select(self, node: fx.Node) -> _Value:
        x, dim, at = node.args
        cut = self._cut(x)
        if cut is None or cut.column is None:
            return self._by_rule(node)
        if dim % len(shape_of(x)) != 1 or not isinstance(at, int):  # type: ignore[operator, arg-type]
            raise MixedRows
        at %= shape_of(x)[1]  # type: ignore[arg-type]
        return replace(cut, column=None, places=cut.places if at == cut.column else None)

    def _index(self, node: fx.Node) -> _Value:
        x, indices = node.args[0], _indices(node)
        if (mask := _mask_in(indices)) is not None:
            dim, by = self._by_mask(x, indices, mask)
        elif (place := self._place_in(indices)) is not None:
            self._require_places(x, *place)
            dim, by = self._dim_of_places(indices, place), place[1]
        else:
            return self._by_rule(node)
        cut = self.values[x]  # type: ignore[index]
        return replace(cut, dim=dim, rows=by.rows)  # type: ignore[type-var]

    def _index_put(self, node: fx.Node) -> _Value:
        into, values, indices = node.args[0], node.args[2], _indices(node)
        rank = len(shape_of(into))  # type: ignore[arg-type]
        if (mask := _mask_in(indices)) is not None:
            dim, by = self._by_mask(into, indices, mask)
            rank += 1 - len(shape_of(mask))
        elif (place := self._place_in(indices)) is not None:
            self._require_places(into, *place)
            by, dim = place[1], self._dim_of_places(indices, place)
            rank += max(len(shape_of(x)) for x in indices if x is not None) - sum(x is not None for x in indices)
        else:
            return self._by_rule(node)
        self._require_rows(values, dim - rank, by)
        self._require_no_places(into, values)
        return self.values[into]  # type: ignore[index]

    def _require_rows(self, x: Any, dim: int, by: _Cut) -> None:
        """Has a tensor be that of some rows, in a dim that is counted from the end, or the same for all."""
        shape = shape_of(x)
        broadcasts = -dim > len(shape) or isinstance(shape[dim], int) and shape[dim] == 1
        self.require(x, _WHOLE if broadcasts else _Cut(len(shape) + dim, by.rows))

    def _by_mask(self, x: Any, indices: list[Any], mask: fx.Node) -> tuple[int, _Cut]:
        """The dim of the rows that a mask selects of a tensor, and which these are."""
        if sum(index is not None for index in indices) > 1:
            raise MixedRows
        dim = indices.index(mask)
        if (cut := self._cut(x)) is not None and self.values[mask] == _UNDECIDED:
            self.require(mask, _Cut(cut.dim - dim) if 0 <= cut.dim - dim < len(shape_of(mask)) else _WHOLE)
        by = self._cut(mask)
        if by is None or by.places is not None:
            raise MixedRows
        self.require(x, _Cut(dim + by.dim, by.rows))
        key = self.flat.key(mask)
        return dim, replace(by, rows=(key, by.rows) if by.rows else key)

    def _place_in(self, indices: list[Any]) -> tuple[int, _Cut] | None:
        """Which of the indices has places of rows, and how it is cut; None where none has."""
        cuts = {dim: cut for dim, x in enumerate(indices) if (cut := self._cut(x)) is not None}
        places = [(dim, cut) for dim, cut in cuts.items() if cut.places is not None]
        if not places:
            return None
        if len(places) > 1:
            raise MixedRows
        ((dim, by),) = places
        at = by.dim - len(shape_of(indices[dim]))
        for i, x in enumerate(indices):
            if x is not None and i != dim:
                self._require_rows(x, at, by)
        return dim, by

    def _dim_of_places(self, indices: list[Any], place: tuple[int, _Cut]) -> int:
        """The dim of the rows that indices name in what they name."""
        dim, by = place
        at = [i for i, x in enumerate(indices) if x is not None]
        before = at[0] if at == [*range(at[0], at[-1] + 1)] else 0
        ranks = [len(shape_of(indices[i])) for i in at]
        return before + max(ranks) - len(shape_of(indices[dim])) + by.dim

    def _require_no_places(self, *tensors: Any) -> None:
        if any((cut := self._cut(x)) is not None and cut.places is not None for x in tensors):
            raise MixedRows

    def _require_places(self, x: Any, dim: int, by: _Cut) -> None:
        """Has a tensor be cut where places are looked up in it."""
        if expression(shape_of(x)[dim]) != expression(by.places):
            raise MixedRows
        self.require(x, _Cut(dim))

    def _masked_select(self, node: fx.Node) -> _Value:
        x, mask = node.args
        if shape_of(x) != shape_of(mask):  # type: ignore[arg-type]
            raise MixedRows
        dim, by = self._by_mask(x, [mask], mask)  # type: ignore[arg-type]
        return replace(self.values[x], dim=dim, rows=by.rows)  # type: ignore[index, type-var]

    def _follow_places(self, node: fx.Node) -> _Value:
        """What looks rows up along a dim, or writes them there."""
        v = arguments(node)
        x, index = v["self"], v["index"]
        by = self._cut(index)
        if by is None or by.places is None:
            return self._by_rule(node)
        dim = v["dim"] % len(shape_of(x))
        if by.dim != (dim if len(shape_of(index)) > 1 else 0):
            raise MixedRows
        self._require_places(x, dim, by)
        if node.target in _ALONG:
            return replace(self.values[x], dim=dim, rows=by.rows)  # type: ignore[type-var]
        source = v.get("source", v.get("src"))
        self.require(source, _Cut(dim, by.rows))
        self._require_no_places(x, source)
        return self.values[x]

    def _by_rule(self, node: fx.Node) -> _Value:
        """What a call makes of rows by its rule."""
        operands = tensor_operands(node)
        cuts = [(i, cut) for i, x in enumerate(operands) if (cut := self._cut(x)) is not None]
        rule = self._rule(node)
        if not cuts:
            raise MixedRows
        at, cut = cuts[0]
        factor = _factor(rule, rule.operands[at], cut.dim)
        self._require_factor(node, rule, factor, cut.rows)
        end = rule.dim_of(rule.result, factor)
        self._require_local(node, rule, factor, end)
        if any(other.places is not None for _, other in cuts) and node.target not in _MOVES:
            raise MixedRows
        if cut.column is not None and node.target not in CASTS and shape_of(operands[0])[1] != 1:
            raise MixedRows
        if end is None and rule.reductions.get(factor) == "sum" and not rule.additive:
            return _SUM
        if end is None or end == -1:
            raise MixedRows
        return replace(cut, dim=end, column=cut.column if node.target in CASTS else None)

    def _require_local(self, node: fx.Node, rule: Rule, factor: str, end: int | None) -> None:
        """Has the call be on a rank what it is in the graph."""
        counts = [x for x in node.all_input_nodes if isinstance(self.values[x], _Count)]
        if node.target in _SIZED:
            sizes = arguments(node)["size" if "size" in arguments(node) else "shape"]
            is_expand = node.target is aten.expand.default
            for dim, size in enumerate(sizes):
                if dim != end and (size in counts or not is_expand and isinstance(size, int) and size == -1):
                    raise MixedRows  # torch takes no -1 for what has no elements
                if dim == end and not (size in counts or isinstance(size, int) and size == -1):
                    raise MixedRows
            return
        if counts:
            raise MixedRows
        if node.target in (aten.squeeze.dim, aten.squeeze.dims):
            if rule.dim_of(rule.operands[0], factor) in dims_of(node):
                raise MixedRows  # of as many rows as there are, which may be one on a rank
        elif rule.localize is not None:
            result = (Partial if end is None else Shard(end),)
            modes = [Mode("shard", factor=factor)]
            call = LocalCall(node.graph, node, node.target, node.args, node.kwargs, modes, (), result, [2], ["axis"])
            rule.localize(call)
            if (call.target, call.args, call.kwargs) != (node.target, node.args, node.kwargs):
                raise MixedRows


def _factor(rule: Rule, factors: Any, dim: int) -> str:
    """The factor that is sharded where a dim is cut."""
    if not factors[dim] or factors[dim][0] in rule.blocked:
        raise MixedRows
    factor: str = factors[dim][0]
    if any(rule.dim_of(x, factor) == -1 for x in (*rule.operands, rule.result)):
        raise MixedRows
    return factor


def _indices(node: fx.Node) -> list[Any]:
    return list(arguments(node)["indices"])


def _mask_in(indices: list[Any]) -> fx.Node | None:
    """The first mask among indices."""
    return next((x for x in indices if x is not None and x.meta["val"].dtype in MASKS), None)


_FOLLOW: dict[Any, Callable[[_Follower, fx.Node], _Value]] = {
    either: _Follower._either,
    aten.sym_size.int: _Follower._size,
    operator.mul: _Follower._multiple,
    aten.nonzero.default: _Follower._nonzero,
    aten.select.int: _Follower._select,
    aten.index.Tensor: _Follower._index,
    aten.index_put.default: _Follower._index_put,
    aten.masked_select.default: _Follower._masked_select,
}
