"""Sums, means, softmax, normalisations, pooling, losses and look-ups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autoparallel import ops
from autoparallel.rules.calls import arguments, shape_of, tensor_operands
from autoparallel.rules.core import Rule, make_rule, rule
from autoparallel.rules.elementwise import elementwise
from autoparallel.rules.localize import LocalCall

aten = torch.ops.aten


def _reduction(node: fx.Node, dims: Sequence[int] | None, keepdim: bool, kind: str | None) -> Rule:
    source = shape_of(tensor_operands(node)[0])
    rank = len(source)
    gone = {d % rank for d in dims} if dims else set(range(rank))
    names = [f"d{i}" for i in range(rank)]
    kept = [("1" if i in gone else n) for i, n in enumerate(names) if keepdim or i not in gone]
    reduced = [names[i] for i in sorted(gone) if not (isinstance(source[i], int) and source[i] == 1)]
    return make_rule(
        f"{' '.join(names)} -> {' '.join(kept)}",
        [source],
        shape_of(node),
        reductions={n: kind for n in reduced} if kind else {},
        linear=[(0,)] if kind else [],
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
    aten.logsumexp.default, aten.var.correction, aten.std.correction, aten.prod.dim_int,
)  # fmt: skip
def _reduce_whole_dims(node: fx.Node) -> Rule:
    dims = arguments(node)["dim"]
    return _reduction(node, [dims] if isinstance(dims, int) else dims, bool(arguments(node)["keepdim"]), None)


@rule(aten._softmax.default, aten.softmax.int, aten._log_softmax.default, aten.log_softmax.int, aten._safe_softmax.default)
def _softmax(node: fx.Node) -> Rule:
    shape = shape_of(node)
    names = [f"d{i}" for i in range(len(shape))]
    notation = f"{' '.join(names)} -> {' '.join(names)}"
    return make_rule(notation, [shape], shape, blocked=[names[arguments(node)["dim"] % len(shape)]])


@rule(aten.layer_norm.default, aten.rms_norm.default)
def _layer_norm(node: fx.Node) -> Rule:
    operands = tensor_operands(node)
    normalized = [f"n{i}" for i in range(len(arguments(node)["normalized_shape"]))]
    inner = " ".join(normalized)
    notation = ", ".join([f"... {inner}", *[inner] * (len(operands) - 1)])
    additive = (2,) if node.target is aten.layer_norm.default and len(operands) == 3 else ()
    return make_rule(
        f"{notation} -> ... {inner}",
        [shape_of(o) for o in operands],
        shape_of(node),
        linear=[(1,)] if len(operands) > 1 else [],
        additive=additive,
        blocked=normalized,
    )


@rule(aten.group_norm.default)
def _group_norm(node: fx.Node) -> Rule:
    operands = tensor_operands(node)
    rank = len(shape_of(node))
    inner = [f"x{i}" for i in range(1, rank)]
    notation = ", ".join([f"n {' '.join(inner)}", *["x1"] * (len(operands) - 1)])
    return make_rule(
        f"{notation} -> n {' '.join(inner)}", [shape_of(o) for o in operands], shape_of(node), blocked=inner
    )


@rule(
    aten.adaptive_avg_pool2d.default, aten._adaptive_avg_pool2d.default, aten.avg_pool2d.default,
    aten.max_pool2d.default, aten.adaptive_avg_pool1d.default, aten.avg_pool1d.default,
    aten.upsample_nearest2d.vec, aten.upsample_bilinear2d.vec,
)  # fmt: skip
def _pool(node: fx.Node) -> Rule:
    source, target = shape_of(tensor_operands(node)[0]), shape_of(node)
    spatial = 1 if "1d" in str(node.target) else 2
    places, out = [f"x{i}" for i in range(spatial)], [f"y{i}" for i in range(spatial)]
    linear = "max" not in str(node.target)
    return make_rule(
        f"... c {' '.join(places)} -> ... c {' '.join(out)}",
        [source],
        target,
        linear=[(0,)] if linear else [],
        blocked=[*places, *out],
    )


def _localize_embedding(call: LocalCall) -> None:
    group = call.joint_group("v")
    if not group:
        return
    values = arguments(call.node)
    weight, indices = call.args[:2]
    call.target = ops.embedding_sharded
    call.args, call.kwargs = (weight, indices, values["padding_idx"], group), {}


@rule(aten.embedding.default)
def _embedding(node: fx.Node) -> Rule:
    operands = tensor_operands(node)
    return make_rule(
        "v d, ... -> ... d",
        [shape_of(o) for o in operands],
        shape_of(node),
        reductions={"v": "sum"},
        linear=[(0,)],
        localize=_localize_embedding,
    )


@rule(aten.mse_loss.default, aten.l1_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default,
      aten.binary_cross_entropy_with_logits.default, aten.binary_cross_entropy.default)  # fmt: skip
def _elementwise_loss(node: fx.Node) -> Rule | None:
    operands = tensor_operands(node)
    reduction = arguments(node)["reduction"]
    if reduction == 0:
        return elementwise(node)
    shapes = [shape_of(o) for o in operands]
    if any(len(s) != len(shapes[0]) for s in shapes):
        return None
    names = [f"d{i}" for i in range(len(shapes[0]))]
    largest = [max((s[i] for s in shapes), key=lambda v: v if isinstance(v, int) else 2**62) for i in range(len(names))]
    if any(isinstance(s[i], int) and s[i] == 1 != largest[i] for s in shapes for i in range(len(names))):
        return None  # broadcasting inside a loss: replicated
    kind = "mean" if reduction == 1 else "sum"
    reduced = {n: kind for n, size in zip(names, largest, strict=True) if not (isinstance(size, int) and size == 1)}
    return make_rule(
        f"{', '.join(' '.join(names) for _ in shapes)} -> ", shapes, shape_of(node), reductions=reduced
    )


def _localize_cross_entropy(call: LocalCall) -> None:
    group = call.joint_group("c")
    if not group:
        return
    x, target = call.args[:2]
    call.target = ops.cross_entropy_sum_sharded
    call.args, call.kwargs = (x, target, arguments(call.node)["ignore_index"], group), {}


@rule(ops.cross_entropy_sum)
def _cross_entropy_sum(node: fx.Node) -> Rule:
    operands = tensor_operands(node)
    shapes = [shape_of(o) for o in operands]
    values: dict[str, Any] = arguments(node)
    rows = [f"n{i}" for i in range(len(shapes[0]) - 1)]
    x = " ".join(["n0", "c", *rows[1:]] if rows else ["c"])
    notation = ", ".join([x, " ".join(rows), *["c"] * (len(operands) - 2)])
    # Only the plain loss has a class-sharded form; class weights and smoothing keep the classes whole.
    plain = len(operands) == 2 and values["label_smoothing"] == 0
    return make_rule(
        f"{notation} -> ",
        shapes,
        (),
        reductions={**{r: "sum" for r in rows}, **({"c": "composite"} if plain else {})},
        blocked=[] if plain else ["c"],
        localize=_localize_cross_entropy,
    )


@rule(ops.cross_entropy_weight)
def _cross_entropy_weight(node: fx.Node) -> Rule:
    operands = tensor_operands(node)
    shapes = [shape_of(o) for o in operands]
    rows = [f"n{i}" for i in range(len(shapes[0]))]
    notation = ", ".join([" ".join(rows), *["c"] * (len(operands) - 1)])
    return make_rule(f"{notation} -> ", shapes, (), reductions={r: "sum" for r in rows}, blocked=["c"])
