"""Losses: elementwise ones with a reduction, and those over classes."""

from __future__ import annotations

from torch import fx

from autoparallel import operators
from autoparallel.rules.calls import arguments, operand_shapes
from autoparallel.rules.core import Rule, dimwise
from autoparallel.rules.localize import LocalCall
from autoparallel.rules.pointwise import pointwise
from autoparallel.rules.reductions import reduction

_KINDS = {1: "mean", 2: "sum"}
"""Torch's numbers of the reductions of a loss; 0 is none."""


def elementwise_loss(node: fx.Node) -> Rule | None:
    """The rule of a loss of each element, and their sum or mean."""
    kind = _KINDS.get(arguments(node)["reduction"])
    return reduction(node, kind, linear=False) if kind else pointwise(node)


def _rows(count: int) -> list[str]:
    """The factors of dims of rows."""
    return [f"n{i}" for i in range(count)]


def class_loss(node: fx.Node) -> Rule | None:
    """What canonicalize_operators leaves of these: no reduction, a sum, or targets that are probabilities."""
    values, (logits, target, *weights) = arguments(node), operand_shapes(node)
    kind, soft = _KINDS.get(values["reduction"]), len(target) == len(logits)
    if kind == "mean" and not soft:
        return None  # its divisor depends on the targets
    rows = _rows(len(logits) - 1)
    x = [*rows[:1], "c", *rows[1:]]
    return dimwise(
        node,
        [x, x if soft else rows, *(["c"] for _ in weights)],
        [] if kind else rows,
        reductions=dict.fromkeys(rows, kind) if kind else {},
        blocked=["c"],
    )


def ctc_losses(node: fx.Node) -> Rule | None:
    """The rule of what sequences lose, each by itself; targets that stand one after the other belong to all."""
    if len(operand_shapes(node)[1]) == 1:
        return None
    return dimwise(node, [["xt", "n", "xc"], ["n", "xs"], ["n"], ["n"]], ["n"])


def _localize_cross_entropy(call: LocalCall) -> None:
    group = call.joint_group("c")
    if group:
        x, target = call.args[:2]
        call.target = operators.cross_entropy_sum_sharded
        values = arguments(call.node)
        call.args, call.kwargs = (x, target, values["ignore_index"], group, values["classes"]), {}


def cross_entropy_sum(node: fx.Node) -> Rule:
    """The rule of the sum of cross-entropies, whose classes may be sharded."""
    logits, _, *weights = operand_shapes(node)
    rows = _rows(len(logits) - 1)
    # Only the plain loss has a class-sharded form; class weights and smoothing keep the classes whole.
    plain = not weights and arguments(node)["label_smoothing"] == 0
    return dimwise(
        node,
        [[*rows, "c"], rows, *(["c"] for _ in weights)],
        [],
        reductions={"c": "composite"} if plain else {},
        blocked=[] if plain else ["c"],
        localize=_localize_cross_entropy,
    )


def cross_entropy_weight(node: fx.Node) -> Rule:
    """The rule of what the mean of cross-entropies is divided by."""
    target, *weights = operand_shapes(node)
    return dimwise(node, [_rows(len(target)), *(["c"] for _ in weights)], [], blocked=["c"])
