"""Lets one linear whose results are split (q, k and v; gate and up) be sharded as if it were several.

A shard of such a linear's output dim would be a stretch of the joined pieces: with two ranks, all of q and half of k on
the first.  So the rows of the weight are dealt out in blocks: each block has its part of every piece, ``q0 k0 v0 q1 k1
v1`` for two blocks.  An ordinary shard then has whole blocks, that is, its part of each piece, and every rank cuts its
own pieces out of its own result.  Nothing else changes: the product stays one, every tensor is still described by its
global value, and the parameter, its gradient and what is saved of it keep their order; between the parameter and the
blocks lies a redistribution like any other, which is chosen and priced as such.

There are as many blocks as any sharding could need; ``settle_interleaving`` leaves as many as the plan does need, and
none of all this where it shards the output dim nowhere.

Before (w is [12, 4], for two ranks):
    linear = aten.linear(x, w)
    slice_1 = aten.slice(linear, 1, 0, 8);  slice_2 = aten.slice(linear, 1, 8, 12)
After:
    interleave = operators.interleave(w, 0, [0, 8, 12], 2)
    linear = aten.linear(x, interleave)
    piece = operators.piece(linear, 1, 0, 8, 2);  piece_1 = operators.piece(linear, 1, 8, 12, 2)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoparallel import operators
from autoparallel.passes.emitter import Emitter, replace_node
from autoparallel.rules.calls import COPIES, arguments, shape_of
from autoparallel.rules.shapes import order_of, runs_of_equal_product

aten = torch.ops.aten

_COPIES = (*COPIES, aten.contiguous.default)


@dataclass(frozen=True)
class _Product:
    """One product with a parameter: which dims of its tensors are the one that is cut into pieces.

    Attributes:
        node: the call.
        weight, bias: the operands that bear the dim; no bias where there is none.
        weight_dim, dim: the dim in the weight, and in the result.
    """

    node: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    weight_dim: int
    dim: int


@dataclass(frozen=True)
class _Piece:
    """A reader that takes one piece.

    Attributes:
        reader: a slice, or a select out of the pieces as a dim of their own, or a gated linear unit (two pieces).
        source, dim: what it takes the piece of, as the product made it, and the dim.
        start, end: of the piece in that dim.
        path: the calls from ``source`` to ``reader``, where the pieces became a dim of their own: first the reshape.
    """

    reader: fx.Node
    source: fx.Node
    dim: int
    start: int
    end: int
    path: tuple[fx.Node, ...] = ()


class _OtherReader(Exception):
    """Something reads a result not piece by piece."""


def interleave_projections(module: fx.GraphModule, parameters: Collection[str], ranks: int) -> None:
    """Rewrites the graph of ``module`` in place.

    Args:
        parameters: the placeholders that are parameters.
        ranks: of the mesh; no dim is cut into more pieces.
    """
    changed = False
    for node in list(module.graph.nodes) if ranks > 1 else ():
        product = _product(node, parameters)
        if product is None:
            continue
        try:
            carried = {node: product.dim}
            pieces = list(_pieces(node, product.dim, carried))
        except _OtherReader:
            continue
        bounds = _bounds(pieces, shape_of(node)[product.dim])
        if len(bounds) <= 2:
            continue
        blocks = math.gcd(*bounds, ranks)
        node.meta["pieces"] = tuple(end - start for start, end in itertools.pairwise(bounds))
        if blocks > 1:
            _rewrite(product, pieces, carried, bounds, blocks)
            changed = True
    if changed:
        module.graph.eliminate_dead_code()


def _product(node: fx.Node, parameters: Collection[str]) -> _Product | None:
    """The product that a call is, where its right side is a parameter; its bias may be anything."""
    if node.op != "call_function" or len(node.args) < 2:
        return None
    bias = None
    if node.target is aten.linear.default:
        weight, weight_dim = node.args[1], 0
        bias = arguments(node)["bias"]
    elif node.target in (aten.mm.default, aten.matmul.default):
        weight, weight_dim = node.args[1], 1
    elif node.target is aten.addmm.default and not {"alpha", "beta"} & node.kwargs.keys():
        bias, _, weight = node.args[:3]
        weight_dim = 1
    else:
        return None
    if not isinstance(weight, fx.Node) or weight.op != "placeholder" or weight.name not in parameters:
        return None
    dim, shape = len(shape_of(node)) - 1, shape_of(weight)
    if len(shape) != 2 or not isinstance(shape[weight_dim], int) or shape[weight_dim] == 1:
        return None
    if bias is not None and (not isinstance(bias, fx.Node) or shape_of(bias) != (shape[weight_dim],)):
        return None
    return _Product(node, weight, bias, weight_dim, dim)


# ------------------------------------------------------------------------------------------------------ who reads what


def _pieces(node: fx.Node, dim: int, carried: dict[fx.Node, int]) -> Iterator[_Piece]:
    """The pieces that all readers of a result take of one dim; ``carried`` gets every call that hands the dim on.

    Raises:
        _OtherReader: where something reads it in another way.
    """
    total = shape_of(node)[dim]
    for user in node.users:
        if user.op != "call_function":
            raise _OtherReader
        if user.target is aten.slice.Tensor and _same_dim(user, dim):
            yield _Piece(user, node, dim, *_extent(user, total))
        elif user.target is aten.glu.default and _same_dim(user, dim):
            yield _Piece(user, node, dim, 0, total // 2)
            yield _Piece(user, node, dim, total // 2, total)
        elif user.target in _COPIES:
            carried[user] = dim
            yield from _pieces(user, dim, carried)
        elif user.target is aten.reshape.default:
            left, right = next(run for run in runs_of_equal_product(shape_of(node), shape_of(user)) if dim in run[0])
            if len(left) > 1:
                raise _OtherReader
            if len(right) == 1:
                carried[user] = right[0]
                yield from _pieces(user, right[0], carried)
            else:
                count = shape_of(user)[right[0]]
                if not isinstance(count, int):
                    raise _OtherReader
                rows = total // count
                for reader, index, path in _find_selects(user, right[0], (user,)):
                    yield _Piece(reader, node, dim, index * rows, (index + 1) * rows, path)
        else:
            raise _OtherReader


def _same_dim(node: fx.Node, dim: int) -> bool:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return bool(arguments(node)["dim"] % len(shape_of(source)) == dim)


def _extent(node: fx.Node, total: int) -> tuple[int, int]:
    """Where a slice of a dim of ``total`` begins and ends."""
    values = arguments(node)
    start, end = values["start"] or 0, total if values["end"] is None else values["end"]
    if values["step"] != 1 or not isinstance(start, int) or not isinstance(end, int):
        raise _OtherReader
    start, end, _ = slice(start, end).indices(total)
    if end <= start:
        raise _OtherReader
    return start, end


def _find_selects(
    node: fx.Node, dim: int, path: tuple[fx.Node, ...]
) -> Iterator[tuple[fx.Node, int, tuple[fx.Node, ...]]]:
    """The selects of single entries of a dim, with the entry, and the calls on the way that leave the dim alone."""
    for user in node.users:
        if user.target is aten.select.int and _same_dim(user, dim):
            index = arguments(user)["index"]
            yield user, index % shape_of(node)[dim], path
        elif user.target in _MOVES and (after := _MOVES[user.target](user, dim)) is not None:
            yield from _find_selects(user, after[0], (*path, user))
        else:
            raise _OtherReader


_Call = tuple[Any, tuple[Any, ...]]


def _permute(node: fx.Node, dim: int) -> tuple[int, _Call]:
    order = order_of(node)
    rest = [d - (d > dim) for d in order if d != dim]
    return order.index(dim), (aten.permute.default, (rest,))


def _unsqueeze(node: fx.Node, dim: int) -> tuple[int, _Call]:
    new = arguments(node)["dim"] % len(shape_of(node))
    after = dim + (new <= dim)
    return after, (aten.unsqueeze.default, (new - (after < new),))


def _squeeze(node: fx.Node, dim: int) -> tuple[int, _Call] | None:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    gone = arguments(node)["dim"] % len(shape_of(source))
    if gone == dim or len(shape_of(node)) == len(shape_of(source)):
        return None
    return dim - (gone < dim), (aten.squeeze.dim, (gone - (dim < gone),))


def _keep_dim(node: fx.Node, dim: int) -> tuple[int, _Call]:
    return dim, (node.target, tuple(node.args[1:]))


_MOVES: dict[Any, Callable[[fx.Node, int], tuple[int, _Call] | None]] = {
    aten.permute.default: _permute,
    aten.transpose.int: _permute,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.dim: _squeeze,
    **dict.fromkeys(_COPIES, _keep_dim),
}
"""What a call does to the place of a dim, and the same call on a tensor without that dim."""


def _bounds(pieces: Collection[_Piece], total: int) -> list[int]:
    """Where the pieces, and what nobody reads between them, begin and end; empty where two overlap."""
    spans = sorted({(piece.start, piece.end) for piece in pieces})
    if any(a[1] > b[0] for a, b in itertools.pairwise(spans)):
        return []
    return sorted({0, total, *(bound for span in spans for bound in span)})


# ---------------------------------------------------------------------------------------------------------- rewriting


def _rewrite(
    product: _Product, pieces: list[_Piece], carried: dict[fx.Node, int], bounds: list[int], blocks: int
) -> None:
    emit = Emitter(product.node)
    for operand, dim in ((product.weight, product.weight_dim), (product.bias, 0)):
        if operand is not None:
            product.node.replace_input_with(operand, emit(operators.interleave, operand, dim, bounds, blocks))
    for node, dim in carried.items():
        node.meta["interleaved"] = dim
    cut: dict[fx.Node, list[fx.Node]] = {}
    for piece in pieces:
        emit = Emitter(piece.reader)
        part = emit(operators.piece, piece.source, piece.dim, piece.start, piece.end, blocks)
        cut.setdefault(piece.reader, []).append(_drop_dim(emit, piece, part) if piece.path else part)
    for reader, parts in cut.items():
        if reader.target is aten.glu.default:
            emit = Emitter(reader)
            parts = [emit(aten.mul.Tensor, parts[0], emit(aten.sigmoid.default, parts[1]))]
        replace_node(reader, parts[0])


def _drop_dim(emit: Emitter, piece: _Piece, part: fx.Node) -> fx.Node:
    """The way of a piece that was one entry of a dim, without that dim."""
    reshape, *moves = piece.path
    dim = next(
        right[0]
        for left, right in runs_of_equal_product(shape_of(piece.source), shape_of(reshape))
        if piece.dim in left
    )
    sizes = list(reshape.args[1])  # type: ignore[arg-type]
    part = emit(aten.reshape.default, part, sizes[:dim] + sizes[dim + 1 :])
    for move in moves:
        after = _MOVES[move.target](move, dim)
        assert after is not None
        dim, (target, rest) = after
        part = emit(target, part, *rest, **move.kwargs)
    return part
