"""Losses: elementwise ones with a reduction, and those over classes."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autoparallel import operators
from autoparallel.rules.calls import arguments, shape_of, tensor_operands
from autoparallel.rules.core import Rule, make_rule, rule
from autoparallel.rules.elementwise import elementwise
from autoparallel.rules.localize import LocalCall

aten = torch.ops.aten

_KINDS = {1: "mean", 2: "sum"}
"""Torch's numbers of the reductions of a loss; 0 is none."""


@rule(aten.mse_loss.default, aten.l1_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default,
      aten.binary_cross_entropy_with_logits.default, aten.binary_cross_entropy.default, aten.kl_div.default,
      aten.soft_margin_loss.default)  # fmt: skip
def _elementwise_loss(node: fx.Node) -> Rule | None:
    reduction = arguments(node)["reduction"]
    if reduction == 0:
        return elementwise(node)
    shapes = [shape_of(o) for o in tensor_operands(node)]
    if any(s != shapes[0] for s in shapes):
        return None  # broadcasting inside a loss: what it divides by cannot be told from the factors
    names = [f"d{i}" for i in range(len(shapes[0]))]
    return make_rule(
        f"{', '.join(' '.join(names) for _ in shapes)} -> ",
        shapes,
        shape_of(node),
        reductions={n: _KINDS[reduction] for n in names},
    )


def _rows_and_classes(x: tuple[Any, ...]) -> tuple[list[str], str]:
    """The factors of the rows of logits ``[N, C, ...]`` or ``[C]``, and the logits' dims."""
    rows = [f"n{i}" for i in range(len(x) - 1)]
    return rows, " ".join(["n0", "c", *rows[1:]] if rows else ["c"])


@rule(aten.nll_loss_nd.default, aten.cross_entropy_loss.default)
def _class_loss(node: fx.Node) -> Rule | None:
    """What canonicalize_operators leaves of these: no reduction, a sum, or targets that are probabilities."""
    values = arguments(node)
    operands = tensor_operands(node)
    shapes = [shape_of(o) for o in operands]
    rows, x = _rows_and_classes(shapes[0])
    soft = len(shapes[1]) == len(shapes[0])
    if values["reduction"] == 1 and not soft:
        return None  # its divisor depends on the targets
    notation = ", ".join([x, x if soft else " ".join(rows), *["c"] * (len(operands) - 2)])
    result = "" if values["reduction"] else " ".join(rows)
    return make_rule(
        f"{notation} -> {result}",
        shapes,
        shape_of(node),
        reductions={r: _KINDS[values["reduction"]] for r in rows} if values["reduction"] else {},
        blocked=["c"],
    )


def _localize_cross_entropy(call: LocalCall) -> None:
    group = call.joint_group("c")
    if group:
        x, target = call.args[:2]
        call.target = operators.cross_entropy_sum_sharded
        values = arguments(call.node)
        call.args, call.kwargs = (x, target, values["ignore_index"], group, values["classes"]), {}


@rule(operators.cross_entropy_sum)
def _cross_entropy_sum(node: fx.Node) -> Rule:
    operands = tensor_operands(node)
    shapes = [shape_of(o) for o in operands]
    rows, x = _rows_and_classes(shapes[0])
    notation = ", ".join([x, " ".join(rows), *["c"] * (len(operands) - 2)])
    # Only the plain loss has a class-sharded form; class weights and smoothing keep the classes whole.
    plain = len(operands) == 2 and arguments(node)["label_smoothing"] == 0
    return make_rule(
        f"{notation} -> ",
        shapes,
        (),
        reductions={**{r: "sum" for r in rows}, **({"c": "composite"} if plain else {})},
        blocked=[] if plain else ["c"],
        localize=_localize_cross_entropy,
    )


@rule(operators.weighted_mean)
def _weighted_mean(node: fx.Node) -> Rule:
    return elementwise(node, linear=[(0,)])


@rule(operators.cross_entropy_weight)
def _cross_entropy_weight(node: fx.Node) -> Rule:
    operands = tensor_operands(node)
    shapes = [shape_of(o) for o in operands]
    rows = [f"n{i}" for i in range(len(shapes[0]))]
    notation = ", ".join([" ".join(rows), *["c"] * (len(operands) - 1)])
    return make_rule(f"{notation} -> ", shapes, (), reductions={r: "sum" for r in rows}, blocked=["c"])
