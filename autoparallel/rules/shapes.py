"""Operators that only move elements: views, permutations, joins and cuts."""

from __future__ import annotations

import math
from typing import Any

import sympy
import torch
from torch import fx

from autoparallel import operators
from autoparallel.rules.calls import Shape, arguments, shape_of, tensor_operands
from autoparallel.rules.core import Rule, make_rule, rule
from autoparallel.rules.localize import LocalCall, divide_sizes

aten = torch.ops.aten


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


def reshape_rule(node: fx.Node, source: Shape, target: Shape, localize: Any) -> Rule | None:
    """The rule of a reshape: dims are grouped into the shortest runs of equal product; in each run the outermost dims
    share their greatest common factor, everything inside it is never cut."""
    if any(isinstance(s, int) and s == 0 for s in source):
        return None
    left, right = ["1"] * len(source), ["1"] * len(target)
    sizes: dict[str, Any] = {}
    blocked: list[str] = []
    for dims_in, dims_out in runs_of_equal_product(source, target):
        factor = f"f{dims_in[0]}"
        sizes[factor] = _common(source[dims_in[0]], target[dims_out[0]])
        for side, letter, shape, dims in ((left, "i", source, dims_in), (right, "o", target, dims_out)):
            for k in dims:
                rest = f"{letter}{k}"
                sizes[rest] = shape[k]
                blocked.append(rest)
                alone = expression(shape[k]) == expression(sizes[factor])
                side[k] = rest if k != dims[0] else factor if alone else f"({factor} {rest})"
    return make_rule(
        f"{' '.join(left)} -> {' '.join(right)}",
        [source],
        target,
        sizes=sizes,
        linear=[(0,)],
        blocked=blocked,
        localize=localize,
    )


@rule(aten.view.default, aten._unsafe_view.default)
def _view(node: fx.Node) -> Rule | None:
    return reshape_rule(node, shape_of(tensor_operands(node)[0]), shape_of(node), divide_sizes("size"))


@rule(aten.reshape.default)
def _reshape(node: fx.Node) -> Rule | None:
    return reshape_rule(node, shape_of(tensor_operands(node)[0]), shape_of(node), divide_sizes("shape"))


@rule(aten.flatten.using_ints, aten.unsqueeze.default)
def _regroup(node: fx.Node) -> Rule | None:
    return reshape_rule(node, shape_of(tensor_operands(node)[0]), shape_of(node), None)


def _localize_squeeze(call: LocalCall) -> None:
    """Names the dims whose global size is one: a rank's part of another dim may have size one, too."""
    source, values = shape_of(tensor_operands(call.node)[0]), arguments(call.node)
    dims = values.get("dim", range(len(source)))
    dims = [dims] if isinstance(dims, int) else dims
    gone = sorted({d % len(source) for d in dims if not _takes_part(source[d])}) if source else []
    call.target, call.args, call.kwargs = aten.squeeze.dims, (call.args[0], gone), {}


@rule(aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)
def _squeeze(node: fx.Node) -> Rule | None:
    return reshape_rule(node, shape_of(tensor_operands(node)[0]), shape_of(node), _localize_squeeze)


@rule(aten.expand.default)
def _expand(node: fx.Node) -> Rule:
    shape = shape_of(node)
    return make_rule(
        "... -> ...", [shape_of(tensor_operands(node)[0])], shape, linear=[(0,)], localize=divide_sizes("size")
    )


def _permuted(node: fx.Node, order: list[int]) -> Rule:
    source = shape_of(tensor_operands(node)[0])
    names = [f"d{i}" for i in range(len(source))]
    return make_rule(
        f"{' '.join(names)} -> {' '.join(names[i] for i in order)}", [source], shape_of(node), linear=[(0,)]
    )


@rule(aten.transpose.int)
def _transpose(node: fx.Node) -> Rule:
    values, rank = arguments(node), len(shape_of(node))
    a, b = values["dim0"] % rank, values["dim1"] % rank
    order = list(range(rank))
    order[a], order[b] = order[b], order[a]
    return _permuted(node, order)


@rule(aten.t.default, aten.numpy_T.default)
def _t(node: fx.Node) -> Rule:
    return _permuted(node, list(reversed(range(len(shape_of(node))))))


@rule(aten.permute.default)
def _permute(node: fx.Node) -> Rule:
    rank = len(shape_of(node))
    return _permuted(node, [d % rank for d in arguments(node)["dims"]])


@rule(aten.select.int)
def _select(node: fx.Node) -> Rule:
    source = shape_of(tensor_operands(node)[0])
    dim = arguments(node)["dim"] % len(source)
    names = [f"d{i}" for i in range(len(source))]
    kept = [n for i, n in enumerate(names) if i != dim]
    return make_rule(
        f"{' '.join(names)} -> {' '.join(kept)}", [source], shape_of(node), linear=[(0,)], blocked=[names[dim]]
    )


def _resized(node: fx.Node, dims: set[int], linear: bool = True) -> Rule:
    """The rule of an operator that works along some dims, which stay whole, and leaves the others alone."""
    source, target = shape_of(tensor_operands(node)[0]), shape_of(node)
    left = [f"i{d}" if d in dims else f"d{d}" for d in range(len(source))]
    right = [f"o{d}" if d in dims else f"d{d}" for d in range(len(source))]
    return make_rule(
        f"{' '.join(left)} -> {' '.join(right)}",
        [source],
        target,
        linear=[(0,)] if linear else [],
        blocked=[name for d in dims for name in (f"i{d}", f"o{d}")],
    )


@rule(aten.slice.Tensor, aten.flip.default, aten.roll.default, aten.cumsum.default, aten.narrow.default)
def _along_dims(node: fx.Node) -> Rule:
    values, rank = arguments(node), len(shape_of(node))
    dims = values["dims"] if "dims" in values else [values["dim"]]
    if not dims:
        dims = range(rank)
    return _resized(node, {d % rank for d in dims})


@rule(aten.pad.default, aten.constant_pad_nd.default)
def _pad(node: fx.Node) -> Rule:
    values, rank = arguments(node), len(shape_of(node))
    pad = values["pad"]
    constant = values.get("mode", "constant") == "constant"
    dims = {rank - 1 - i // 2 for i in range(0, len(pad), 2) if not constant or pad[i] or pad[i + 1]}
    return _resized(node, dims, linear=not constant or values["value"] in (None, 0))


@rule(aten.glu.default)
def _glu(node: fx.Node) -> Rule:
    return _resized(node, {arguments(node)["dim"] % len(shape_of(node))}, linear=False)


@rule(aten.tril.default, aten.triu.default)
def _triangle(node: fx.Node) -> Rule:
    rank = len(shape_of(node))
    return _resized(node, {rank - 2, rank - 1})


@rule(aten.slice_scatter.default)
def _slice_scatter(node: fx.Node) -> Rule:
    into, part = (shape_of(o) for o in tensor_operands(node))
    dim = arguments(node)["dim"] % len(into)
    left = [f"d{d}" if d != dim else "x" for d in range(len(into))]
    right = [f"d{d}" if d != dim else "y" for d in range(len(into))]
    text = " ".join(left)
    return make_rule(
        f"{text}, {' '.join(right)} -> {text}", [into, part], into, linear=[(0, 1)], blocked=["x", "y"]
    )


@rule(aten.diagonal.default)
def _diagonal(node: fx.Node) -> Rule:
    values, source = arguments(node), shape_of(tensor_operands(node)[0])
    gone = {values["dim1"] % len(source), values["dim2"] % len(source)}
    names = [f"x{d}" if d in gone else f"d{d}" for d in range(len(source))]
    result = [*(n for n in names if n.startswith("d")), "y"]
    return make_rule(
        f"{' '.join(names)} -> {' '.join(result)}",
        [source],
        shape_of(node),
        linear=[(0,)],
        blocked=["y", *(n for n in names if n.startswith("x"))],
    )


def _join_pairs(call: LocalCall) -> None:
    if call.target is aten.view_as_complex.default:
        call.target = operators.pairs_as_complex


@rule(aten.view_as_complex.default, aten.view_as_real.default)
def _complex(node: fx.Node) -> Rule:
    notation = "... c -> ..." if node.target is aten.view_as_complex.default else "... -> ... c"
    return make_rule(
        notation,
        [shape_of(tensor_operands(node)[0])],
        shape_of(node),
        linear=[(0,)],
        blocked=["c"],
        localize=_join_pairs,
    )


@rule(aten.cat.default)
def _cat(node: fx.Node) -> Rule | None:
    operands = tensor_operands(node)
    rank = len(shape_of(node))
    if any(len(shape_of(o)) != rank for o in operands):
        return None  # torch lets empty vectors be joined to anything
    dim = arguments(node)["dim"] % rank
    names = [f"d{i}" for i in range(rank)]
    parts = [[f"c{k}" if i == dim else n for i, n in enumerate(names)] for k in range(len(operands))]
    return make_rule(
        f"{', '.join(' '.join(p) for p in parts)} -> {' '.join('c' if i == dim else n for i, n in enumerate(names))}",
        [shape_of(o) for o in operands],
        shape_of(node),
        linear=[tuple(range(len(operands)))],
        blocked=["c", *(f"c{k}" for k in range(len(operands)))],
    )


@rule(aten.stack.default)
def _stack(node: fx.Node) -> Rule:
    operands = tensor_operands(node)
    rank = len(shape_of(node))
    dim = arguments(node)["dim"] % rank
    names = [f"d{i}" for i in range(rank - 1)]
    return make_rule(
        f"{', '.join(' '.join(names) for _ in operands)} -> {' '.join([*names[:dim], 'c', *names[dim:]])}",
        [shape_of(o) for o in operands],
        shape_of(node),
        linear=[tuple(range(len(operands)))],
        blocked=["c"],
    )


@rule(operators.interleave)
def _interleave(node: fx.Node) -> Rule:
    return _resized(node, {arguments(node)["dim"]})


def _localize_piece(call: LocalCall) -> None:
    """A rank has some of the blocks, and in them its part of the piece."""
    v = arguments(call.node)
    count = call.shards(v["dim"])
    call.args, call.kwargs = (call.args[0], v["dim"], *(v[name] // count for name in ("start", "end", "blocks"))), {}


@rule(operators.piece)
def _piece(node: fx.Node) -> Rule:
    v, source = arguments(node), shape_of(tensor_operands(node)[0])
    dim, blocks = v["dim"], v["blocks"]
    left = [f"d{i}" for i in range(len(source))]
    right = list(left)
    left[dim], right[dim] = "(o i)", "(o j)"
    return make_rule(
        f"{' '.join(left)} -> {' '.join(right)}",
        [source],
        shape_of(node),
        sizes={"o": blocks, "i": source[dim] // blocks, "j": (v["end"] - v["start"]) // blocks},
        linear=[(0,)],
        blocked=["i", "j", *(["o"] if blocks == 1 else [])],
        localize=_localize_piece,
    )
