"""Operators that only move elements: views, permutations, joins and cuts."""

from __future__ import annotations

import math
import operator
from typing import Any

import sympy
import torch
from torch import fx

from autoparallel.rules.calls import Shape, arguments, is_tensor, shape_of, tensor_operands
from autoparallel.rules.core import Rule, make_rule, rule
from autoparallel.rules.localize import divide_sizes

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


def reshape_rule(node: fx.Node, source: Shape, target: Shape, localize: Any) -> Rule:
    """The rule of a reshape: dims are grouped into the shortest runs of equal product; in each run the outermost dims
    share their greatest common factor, everything inside it is never cut."""
    left: list[str] = []
    right: list[str] = []
    sizes: dict[str, Any] = {}
    blocked: list[str] = []
    i = j = 0
    while i < len(source) or j < len(target):
        run_i, run_j = i, j
        product_i = product_j = 1
        while i < len(source) and hint(source[i]) == 1:
            left.append("1")
            i += 1
        while j < len(target) and hint(target[j]) == 1:
            right.append("1")
            j += 1
        run_i, run_j = i, j
        if i == len(source) and j == len(target):
            break
        product_i, product_j = hint(source[i]), hint(target[j])
        i, j = i + 1, j + 1
        while product_i != product_j:
            if product_i < product_j:
                product_i *= hint(source[i])
                i += 1
            else:
                product_j *= hint(target[j])
                j += 1
        factor = f"f{run_i}"
        sizes[factor] = _common(source[run_i], target[run_j])
        for side, dims, first, end in ((left, source, run_i, i), (right, target, run_j, j)):
            for k in range(first, end):
                rest = f"{'i' if side is left else 'o'}{k}"
                sizes[rest] = dims[k]
                blocked.append(rest)
                alone = expression(dims[k]) == expression(sizes[factor])
                side.append(rest if k > first else factor if alone else f"({factor} {rest})")
    rule_ = make_rule(
        f"{' '.join(left)} -> {' '.join(right)}",
        [source],
        target,
        sizes=sizes,
        linear=[(0,)],
        blocked=blocked,
        localize=localize,
    )
    return rule_


@rule(aten.view.default, aten._unsafe_view.default)
def _view(node: fx.Node) -> Rule:
    return reshape_rule(node, shape_of(tensor_operands(node)[0]), shape_of(node), divide_sizes("size"))


@rule(aten.reshape.default)
def _reshape(node: fx.Node) -> Rule:
    return reshape_rule(node, shape_of(tensor_operands(node)[0]), shape_of(node), divide_sizes("shape"))


@rule(aten.flatten.using_ints, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default, aten.unsqueeze.default)
def _regroup(node: fx.Node) -> Rule:
    return reshape_rule(node, shape_of(tensor_operands(node)[0]), shape_of(node), None)


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


def _resized(node: fx.Node, dims: set[int]) -> Rule:
    """The rule of an operator that changes the extent of some dims and leaves the others alone."""
    source, target = shape_of(tensor_operands(node)[0]), shape_of(node)
    left = [f"i{d}" if d in dims else f"d{d}" for d in range(len(source))]
    right = [f"o{d}" if d in dims else f"d{d}" for d in range(len(source))]
    return make_rule(
        f"{' '.join(left)} -> {' '.join(right)}",
        [source],
        target,
        linear=[(0,)],
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
    pad, rank = arguments(node)["pad"], len(shape_of(node))
    dims = {rank - 1 - i // 2 for i in range(0, len(pad), 2) if pad[i] or pad[i + 1]}
    return _resized(node, dims)


@rule(aten.cat.default)
def _cat(node: fx.Node) -> Rule:
    operands = tensor_operands(node)
    rank = len(shape_of(node))
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


@rule(operator.getitem)
def _getitem(node: fx.Node) -> Rule | None:
    return None if not is_tensor(node) else None
