"""Look-ups: embedding, gather, scatter, indexing. What is looked up in stays whole, but an embedding's table."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from autoparallel import operators
from autoparallel.rules.calls import Shape, arguments, dims_of, operand_shapes, shape_of
from autoparallel.rules.core import Rule, dim_names, dimwise, make_rule
from autoparallel.rules.localize import LocalCall, divide_counts


def _localize_embedding(call: LocalCall) -> None:
    group = call.joint_group("v")
    if group:
        weight, indices = call.args[:2]
        values = arguments(call.node)
        call.target = operators.embedding_sharded
        call.args, call.kwargs = (weight, indices, values["padding_idx"], group, values.get("rows")), {}


def padding(node: fx.Node) -> Rule:
    """The rule of rows that are added to a table: a rank fills up its own piece, since the pieces of ``torch.chunk``
    begin where those of the padded whole do."""
    localize = divide_counts("rows", factor="v")
    return make_rule(node, "v ... -> v ...", shapes=[shape_of(node)], linear=[(0,)], localize=localize)


def embedding(node: fx.Node) -> Rule:
    """The rule of a look-up in a table, whose rows may be sharded: each rank looks up those that it has."""
    rows = [f"i{k}" for k in range(len(operand_shapes(node)[1]))]
    # A gradient divided by how often each row was looked up needs all look-ups at once: only columns may be cut.
    counts = bool(arguments(node).get("scale_grad_by_freq"))
    return dimwise(
        node,
        [["v", "d"], rows],
        [*rows, "d"],
        linear=[(0,)],
        blocked=["v", *rows] if counts else [],
        localize=_localize_embedding,
    )


def _shared_factors(dim: int, shapes: Sequence[Shape]) -> list[list[str]]:
    """The factors of tensors that correspond in every dim but ``dim``, as far as their sizes agree."""
    agree = [all(size == sizes[0] for size in sizes) for sizes in zip(*shapes, strict=False)]
    return [
        [f"d{d}" if d != dim and agree[d] else f"x{k}_{d}" for d in range(len(shape))] for k, shape in enumerate(shapes)
    ]


def gather(node: fx.Node) -> Rule | None:
    """The rule of a look-up along a dim; the result has the shape of the index."""
    source, index = operand_shapes(node)
    dims = dims_of(node)
    if len(dims) != 1 or len(source) != len(index) or shape_of(node) != index:
        return None  # take_along_dim looks up in the flat source, or broadcasts
    left, right = _shared_factors(dims[0], [source, index])
    right[dims[0]] = "j"  # the looked-up dim of the result is the index's own, which may be cut
    return dimwise(node, [left, right], right, linear=[(0,)])


def index_select(node: fx.Node) -> Rule | None:
    """The rule of a look-up along a dim, the same for all others."""
    source, index = operand_shapes(node)
    if not source or not index:
        return None
    names = dim_names(len(source), dims_of(node))
    return dimwise(node, [names, ["j"]], ["j" if n.startswith("x") else n for n in names], linear=[(0,)])


def scatter_add(node: fx.Node) -> Rule:
    """The rule of what is added along a dim, each rank its part where the index and the source are cut alike."""
    shapes = operand_shapes(node)
    dim = arguments(node)["dim"] % max(len(shapes[0]), 1)
    into, index, source = _shared_factors(dim, shapes)
    summed = bool(shapes[0]) and shapes[1][dim] == shapes[2][dim]
    if summed:
        index[dim] = source[dim] = "j"
    return dimwise(node, [into, index, source], into, linear=[(0, 2)], additive=[0] if summed else [])


def scatter(node: fx.Node) -> Rule:
    """The rule of what is replaced along a dim, by a tensor or a number, or reduced there."""
    shapes, values = operand_shapes(node), arguments(node)
    parts = _shared_factors(values["dim"] % max(len(shapes[0]), 1), shapes)
    linear = len(shapes) == 3 and values.get("reduce") in (None, "sum", "add") and values.get("include_self", True)
    return dimwise(node, parts, parts[0], linear=[(0, 2)] if linear else [])


def index_copy(node: fx.Node) -> Rule | None:
    """The rule of what is replaced along a dim, the same for all others, by a tensor or a number."""
    into, index, *source = operand_shapes(node)
    if not into or not index or source and len(source[0]) != len(into):
        return None
    (dim,) = dims_of(node)
    left, *right = _shared_factors(dim, [into, *source])
    return dimwise(node, [left, ["xj"], *right], left, linear=[(0, 2)] if source else [])


def index_add(node: fx.Node) -> Rule | None:
    """The rule of what is added along a dim, the same for all others."""
    into, index, source = operand_shapes(node)
    if len(into) != len(source) or not into or not index:
        return None
    (dim,) = dims_of(node)
    left, right = _shared_factors(dim, [into, source])
    right[dim] = "j"
    return dimwise(node, [left, ["j"], right], left, linear=[(0, 2)], additive=[0])


def _indexed_dims(node: fx.Node) -> tuple[list[str], list[list[str]], list[str]] | None:
    """The dims of an indexed tensor, of its indices and of the part they name; None for masks."""
    values = arguments(node)
    rank, indices = len(shape_of(values["self"])), values["indices"]
    indexed = [d for d, index in enumerate(indices) if index is not None]
    if any(indices[d].meta["val"].dtype in (torch.bool, torch.uint8) for d in indexed) or not indexed:
        return None
    counts = [len(shape_of(indices[d])) for d in indexed]
    broadcast = [f"j{k}" for k in range(max(counts))]
    names = dim_names(rank, indexed)
    rest = [n for n in names if n.startswith("d")]
    adjacent = indexed == [*range(indexed[0], indexed[-1] + 1)]  # then the part's indexed dims stand where they stood
    before = indexed[0] if adjacent else 0
    return names, [broadcast[len(broadcast) - n :] for n in counts], [*rest[:before], *broadcast, *rest[before:]]


def index(node: fx.Node) -> Rule | None:
    """The rule of a look-up by indices of one or more dims."""
    if (dims := _indexed_dims(node)) is None:
        return None
    names, indices, part = dims
    return dimwise(node, [names, *indices], part, linear=[(0,)])


def index_put(node: fx.Node) -> Rule | None:
    """The rule of what is replaced, or added, by indices of one or more dims."""
    if (dims := _indexed_dims(node)) is None:
        return None
    names, indices, part = dims
    rank = len(operand_shapes(node)[-1])
    operands = [names, *indices, part[len(part) - rank :]]
    blocked = [factor for dims in indices for factor in dims]
    return dimwise(node, operands, names, linear=[(0, len(operands) - 1)], blocked=blocked)


def search(node: fx.Node) -> Rule:
    """The rule of the places of values in a sorted vector, or of rows of values in sorted rows."""
    rows, *others = operand_shapes(node)
    row, values = (["...", "x"], ["...", "y"]) if len(rows) > 1 else (["x"], ["..."])
    return make_rule(node, ([row, values, *(row for _ in others[1:])], values), blocked=["x"])


def membership(node: fx.Node) -> Rule:
    """The rule of whether elements are among those of another tensor, which stays whole."""
    elements, among = map(len, operand_shapes(node))
    names = dim_names(elements)
    return dimwise(node, [names, dim_names(among, range(among))], names)
