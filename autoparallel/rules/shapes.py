"""Operators that only move elements: views, permutations, joins and cuts."""

from __future__ import annotations

import math
from typing import Any

import sympy
import torch
from torch import fx

from autoparallel import operators
from autoparallel.rules.calls import Shape, arguments, dims_of, operand_shapes, shape_of
from autoparallel.rules.core import Rule, dim_names, dimwise
from autoparallel.rules.localize import LocalCall, Localize, divide_counts
from autoparallel.rules.reductions import along


def expression(size: Any) -> sympy.Expr:
    """A dim's size as a sympy expression."""
    return sympy.Integer(size) if isinstance(size, int) else size.node.expr


def hint(size: Any) -> int:
    """A dim's size in the traced example."""
    return size if isinstance(size, int) else int(size.node.hint)


def _common(a: Any, b: Any) -> Any:
    """The largest outer factor that the sizes of two dims share."""
    if isinstance(a, int) and isinstance(b, int):
        return math.gcd(a, b)
    common = sympy.gcd(expression(a), expression(b))
    for size in (a, b):
        if expression(size) == common:
            return size
    return int(common) if common.is_Integer else 1


def _takes_part(size: Any) -> bool:
    return not (isinstance(size, int) and size == 1)


def runs_of_equal_product(source: Shape, target: Shape) -> list[tuple[list[int], list[int]]]:
    """The dims of two shapes (without those of size one) in the shortest runs of equal product.

    Products are compared as expressions: two sizes that agree in the traced example only do not end a run, because
    the same program serves other batches.
    """
    left = [d for d, s in enumerate(source) if _takes_part(s)]
    right = [d for d, s in enumerate(target) if _takes_part(s)]
    runs = []
    i = j = 0
    while i < len(left) and j < len(right):
        first_i, first_j = i, j
        product_i, product_j = source[left[i]], target[right[j]]
        i, j = i + 1, j + 1
        while expression(product_i) != expression(product_j) and (i < len(left) or j < len(right)):
            if j == len(right) or (i < len(left) and hint(product_i) <= hint(product_j)):
                product_i, i = product_i * source[left[i]], i + 1
            else:
                product_j, j = product_j * target[right[j]], j + 1
        runs.append((left[first_i:i], right[first_j:j]))
    if runs:  # what is left over belongs to sizes whose equality sympy cannot see
        runs[-1][0].extend(left[i:])
        runs[-1][1].extend(right[j:])
    return runs


def reshape(node: fx.Node, localize: Localize | None = None) -> Rule | None:
    """The rule of a reshape: dims are grouped into the shortest runs of equal product; in each run the outermost dims
    share their greatest common factor, everything inside it is never cut."""
    (source,), target = operand_shapes(node), shape_of(node)
    if any(isinstance(s, int) and s == 0 for s in source):
        return None
    left, right = ["1"] * len(source), ["1"] * len(target)
    sizes: dict[str, Any] = {}
    for dims_in, dims_out in runs_of_equal_product(source, target):
        factor = f"f{dims_in[0]}"
        sizes[factor] = _common(source[dims_in[0]], target[dims_out[0]])
        for side, prefix, shape, dims in ((left, "xi", source, dims_in), (right, "xo", target, dims_out)):
            for k in dims:
                rest = f"{prefix}{k}"
                sizes[rest] = shape[k]
                alone = expression(shape[k]) == expression(sizes[factor])
                side[k] = rest if k != dims[0] else factor if alone else f"({factor} {rest})"
    return dimwise(node, [left], right, sizes=sizes, linear=[(0,)], localize=localize)


def _localize_squeeze(call: LocalCall) -> None:
    """Names the dims whose global size is one: a rank's part of another dim may have size one, too."""
    source, values = operand_shapes(call.node)[0], arguments(call.node)
    dims = values.get("dim", range(len(source)))
    dims = [dims] if isinstance(dims, int) else dims
    gone = sorted({d % len(source) for d in dims if not _takes_part(source[d])}) if source else []
    call.target, call.args, call.kwargs = torch.ops.aten.squeeze.dims, (call.args[0], gone), {}


def squeeze(node: fx.Node) -> Rule | None:
    """The rule of an operator that drops dims of size one."""
    return reshape(node, _localize_squeeze)


def join_pairs(call: LocalCall) -> None:
    """Makes a rank's pairs complex numbers, whatever strides a redistribution has left them."""
    call.target = operators.pairs_as_complex


def order_of(node: fx.Node) -> list[int]:
    """The order in which a call puts dims: the reverse one, where it does not say."""
    values, rank = arguments(node), len(shape_of(node))
    order = [*range(rank)]
    if "dim0" in values and rank:
        a, b = values["dim0"] % rank, values["dim1"] % rank
        order[a], order[b] = b, a
        return order
    return dims_of(node) if "dims" in values else order[::-1]


def permutation(node: fx.Node) -> Rule:
    """The rule of an operator that puts dims into another order."""
    names = dim_names(len(shape_of(node)))
    return dimwise(node, [names], [names[i] for i in order_of(node)], linear=[(0,)])


def select(node: fx.Node) -> Rule:
    """The rule of an operator that takes one index of a dim."""
    names = dim_names(len(operand_shapes(node)[0]), dims_of(node))
    return dimwise(node, [names], [n for n in names if n.startswith("d")], linear=[(0,)])


def diagonal(node: fx.Node) -> Rule:
    """The rule of the diagonal of two dims, which becomes the last one."""
    names, of_diagonal = _names_of_diagonal(node)
    return dimwise(node, [names], of_diagonal, linear=[(0,)])


def diagonal_scatter(node: fx.Node) -> Rule:
    """The rule of a tensor of which the diagonal of two dims is replaced."""
    names, of_diagonal = _names_of_diagonal(node)
    return dimwise(node, [names, of_diagonal], names, linear=[(0, 1)])


def _names_of_diagonal(node: fx.Node) -> tuple[list[str], list[str]]:
    """The dims of a tensor, and of the diagonal of two of them."""
    values, rank = arguments(node), len(operand_shapes(node)[0])
    names = dim_names(rank, {values["dim1"] % rank, values["dim2"] % rank})
    return names, [*(n for n in names if n.startswith("d")), "xo"]


def pad(node: fx.Node) -> Rule:
    """The rule of a padding of the last dims."""
    values, rank = arguments(node), len(shape_of(node))
    constant = values.get("mode", "constant") == "constant"
    amounts = values["pad"]
    dims = {rank - 1 - i // 2 for i in range(0, len(amounts), 2) if not constant or amounts[i] or amounts[i + 1]}
    return along(node, dims, linear=not constant or values["value"] in (None, 0))


def slice_scatter(node: fx.Node) -> Rule:
    """The rule of a tensor of which a slice is replaced."""
    rank, dims = len(shape_of(node)), dims_of(node)
    into = dim_names(rank, dims)
    return dimwise(node, [into, dim_names(rank, dims, "xp")], into, linear=[(0, 1)])


def select_scatter(node: fx.Node) -> Rule:
    """The rule of a tensor of which one index of a dim is replaced."""
    into = dim_names(len(shape_of(node)), dims_of(node))
    return dimwise(node, [into, [n for n in into if n.startswith("d")]], into, linear=[(0, 1)])


def unfold(node: fx.Node) -> Rule:
    """The rule of windows along a dim, which become the last dim."""
    values, rank = arguments(node), len(operand_shapes(node)[0])
    dim = values["dimension"] % max(rank, 1)
    return dimwise(node, [dim_names(rank, {dim})], [*dim_names(rank, {dim}, "xo"), "xw"], linear=[(0,)])


def diagonal_matrices(node: fx.Node) -> Rule | None:
    """The rule of matrices with the last dim on a diagonal."""
    values, rank = arguments(node), len(shape_of(node))
    rows = sorted((values["dim1"] % rank, values["dim2"] % rank))
    if rows != [rank - 2, rank - 1]:
        return None
    names = dim_names(rank - 2)
    return dimwise(node, [[*names, "x"]], [*names, "xr", "xc"], linear=[(0,)])


def cat(node: fx.Node) -> Rule | None:
    """The rule of tensors that are joined along a dim."""
    shapes, dims = operand_shapes(node), dims_of(node)
    rank = len(shape_of(node))
    if any(len(shape) != rank for shape in shapes):
        return None  # torch lets empty vectors be joined to anything
    parts = [dim_names(rank, dims, f"x{k}_") for k in range(len(shapes))]
    return dimwise(node, parts, dim_names(rank, dims), linear=[range(len(shapes))])


def stack(node: fx.Node) -> Rule:
    """The rule of tensors that are joined along a dim of their own."""
    count, rank = len(operand_shapes(node)), len(shape_of(node))
    dim, names = arguments(node)["dim"] % rank, dim_names(rank - 1)
    return dimwise(node, [names] * count, [*names[:dim], "x", *names[dim:]], linear=[range(count)])


def piece(node: fx.Node) -> Rule:
    """The rule of a piece of an interleaved dim: a rank has some of the blocks, and in them its part of the piece."""
    v, source = arguments(node), operand_shapes(node)[0]
    dim, blocks = v["dim"], v["blocks"]
    left, right = dim_names(len(source)), dim_names(len(source))
    left[dim], right[dim] = "(o xi)", "(o xo)"
    return dimwise(
        node,
        [left],
        right,
        sizes={"o": blocks, "xi": source[dim] // blocks, "xo": (v["end"] - v["start"]) // blocks},
        linear=[(0,)],
        blocked=["o"] if blocks == 1 else [],
        localize=divide_counts("start", "end", "blocks", factor="o"),
    )
