"""Sums, means and other reductions; softmax, scans and normalisations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from autoparallel import operators
from autoparallel.rules.calls import arguments, shape_of, tensor_operands
from autoparallel.rules.core import Rule, make_rule, rule
from autoparallel.rules.elementwise import keeps_sums
from autoparallel.rules.localize import LocalCall

aten = torch.ops.aten


def _reduction(node: fx.Node, dims: Sequence[int] | None, keepdim: bool, kind: str | None) -> Rule:
    source = shape_of(tensor_operands(node)[0])
    rank = len(source)
    gone = {d % rank for d in dims} if dims else set(range(rank))
    names = [f"d{i}" for i in range(rank)]
    kept = [("1" if i in gone else n) for i, n in enumerate(names) if keepdim or i not in gone]
    reduced = [names[i] for i in sorted(gone)]
    return make_rule(
        f"{' '.join(names)} -> {' '.join(kept)}",
        [source],
        shape_of(node),
        reductions={n: kind for n in reduced} if kind else {},
        linear=[(0,)] if kind and keeps_sums(node) else [],
        blocked=[] if kind else reduced,
    )


@rule(aten.sum.default, aten.mean.default)
def _reduce_all(node: fx.Node) -> Rule:
    return _reduction(node, None, False, "sum" if node.target is aten.sum.default else "mean")


@rule(aten.sum.dim_IntList, aten.mean.dim)
def _reduce_dims(node: fx.Node) -> Rule:
    values = arguments(node)
    return _reduction(node, values["dim"], values["keepdim"], "sum" if node.target is aten.sum.dim_IntList else "mean")


@rule(
    aten.amax.default, aten.amin.default, aten.argmax.default, aten.argmin.default, aten.any.dim, aten.all.dim,
    aten.logsumexp.default, aten.var.correction, aten.std.correction, aten.prod.dim_int, aten.var.dim, aten.std.dim,
    aten.linalg_vector_norm.default, aten.count_nonzero.dim_IntList,
)  # fmt: skip
def _reduce_whole_dims(node: fx.Node) -> Rule:
    values = arguments(node)
    dims = values["dim"]
    return _reduction(node, [dims] if isinstance(dims, int) else dims, bool(values.get("keepdim")), None)


@rule(aten.cosine_similarity.default)
def _cosine_similarity(node: fx.Node) -> Rule | None:
    shapes = [shape_of(o) for o in tensor_operands(node)]
    if shapes[0] != shapes[1]:
        return None
    names = [f"d{i}" for i in range(len(shapes[0]))]
    dim = arguments(node)["dim"] % len(names)
    text = " ".join(names)
    return make_rule(
        f"{text}, {text} -> {' '.join(n for i, n in enumerate(names) if i != dim)}",
        shapes,
        shape_of(node),
        blocked=[names[dim]],
    )


@rule(
    aten._softmax.default, aten.softmax.int, aten._log_softmax.default, aten.log_softmax.int,
    aten._safe_softmax.default, aten.cumprod.default, aten.logcumsumexp.default, aten.argsort.default,
    aten.argsort.stable,
)  # fmt: skip
def _along_one_dim(node: fx.Node) -> Rule:
    shape = shape_of(node)
    names = [f"d{i}" for i in range(len(shape))]
    text = " ".join(names)
    return make_rule(f"{text} -> {text}", [shape], shape, blocked=[names[arguments(node)["dim"]]] if names else [])


@rule(operators.topk_indices)
def _topk_indices(node: fx.Node) -> Rule:
    source = shape_of(tensor_operands(node)[0])
    dim = arguments(node)["dim"] % len(source)
    left = ["x" if d == dim else f"d{d}" for d in range(len(source))]
    right = ["k" if d == dim else f"d{d}" for d in range(len(source))]
    return make_rule(f"{' '.join(left)} -> {' '.join(right)}", [source], shape_of(node), blocked=["x", "k"])


@rule(aten.histc.default)
def _histc(node: fx.Node) -> Rule | None:
    values = arguments(node)
    if values["min"] == values["max"]:
        return None  # torch takes the range from all the values there are
    source = shape_of(tensor_operands(node)[0])
    names = [f"d{i}" for i in range(len(source))]
    return make_rule(
        f"{' '.join(names)} -> c", [source], shape_of(node), reductions={n: "sum" for n in names}, blocked=["c"]
    )


@rule(aten.layer_norm.default, aten.rms_norm.default)
def _layer_norm(node: fx.Node) -> Rule:
    operands, values = tensor_operands(node), arguments(node)
    normalized = [f"n{i}" for i in range(len(values["normalized_shape"]))]
    inner = " ".join(normalized)
    weighted, biased = values["weight"] is not None, values.get("bias") is not None
    return make_rule(
        f"{', '.join([f'... {inner}', *[inner] * (len(operands) - 1)])} -> ... {inner}",
        [shape_of(o) for o in operands],
        shape_of(node),
        linear=[(1,)] if weighted else [],
        additive=[len(operands) - 1] if weighted and biased else [],
        blocked=normalized,
    )


def _localize_num_groups(call: LocalCall) -> None:
    pieces = 1
    for axis in call.axes_of("g"):
        pieces *= call.axis_sizes[axis]
    if pieces > 1:
        call.set_argument("num_groups", arguments(call.node)["num_groups"] // pieces)


@rule(aten.group_norm.default)
def _group_norm(node: fx.Node) -> Rule:
    operands = tensor_operands(node)
    shape, groups = shape_of(node), arguments(node)["num_groups"]
    places = [f"x{i}" for i in range(len(shape) - 2)]
    sample = " ".join(["n", "(g c)", *places])
    return make_rule(
        f"{', '.join([sample, *['(g c)'] * (len(operands) - 1)])} -> {sample}",
        [shape_of(o) for o in operands],
        shape,
        sizes={"g": groups, "c": shape[1] // groups},
        blocked=["c", *places],
        localize=_localize_num_groups,
    )


@rule(aten.instance_norm.default)
def _instance_norm(node: fx.Node) -> Rule | None:
    values = arguments(node)
    if values["running_mean"] is not None or values["running_var"] is not None:
        return None  # its running statistics are means over the batch
    operands = tensor_operands(node)
    shape = shape_of(node)
    places = [f"x{i}" for i in range(len(shape) - 2)]
    sample = " ".join(["n", "c", *places])
    return make_rule(
        f"{', '.join([sample, *['c'] * (len(operands) - 1)])} -> {sample}",
        [shape_of(o) for o in operands],
        shape,
        blocked=places,
    )
