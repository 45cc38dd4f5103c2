"""The ways in which a node may run, and what each of them needs and makes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from autoparallel import operators
from autoparallel.operators.opaque import has_own_backward
from autoparallel.placements import Layout, divides, fills_up, reaches_all
from autoparallel.placements.modes import Mode
from autoparallel.rules.calls import tensor_operands
from autoparallel.rules.registry import rule_for
from autoparallel.rules.typing import Typed, typed_modes


def typed_call(node: fx.Node, modes: Sequence[Mode]) -> tuple[list[Layout], Layout]:
    """The layouts of a call's operands and result when it runs as ``modes`` says on each axis.

    Raises:
        ValueError: when the operator cannot run so.
    """
    ways = {typed.mode: typed for typed in call_modes(node)}
    for mode in modes:
        if mode not in ways:
            raise ValueError(f"{node.meta.get('key', node.name)} cannot run as {mode}")
    chosen = [ways[mode] for mode in modes]
    count = len(tensor_operands(node))
    operands = [tuple(t.operands[i] for t in chosen) for i in range(count)]
    return operands, tuple(t.result for t in chosen)


def operand_fits(
    node: fx.Node, shape: Sequence[int], result: Sequence[int], layout: Layout, axis_sizes: Sequence[int]
) -> bool:
    """Whether a call can read an operand of this global shape in this layout: its shards are equal, and none is empty;
    ``pad_rows`` reads shards that differ, as long as it makes them equal."""
    if node.target is operators.pad_rows:
        return fills_up(shape, result, layout, axis_sizes)
    return divides(shape, layout, axis_sizes) and reaches_all(shape, layout, axis_sizes)


def call_modes(node: fx.Node) -> list[Typed]:
    """Every way in which a call may run on one mesh axis."""
    operands = tensor_operands(node)
    flows = bool(node.meta["differentiable"])
    return typed_modes(
        rule_for(node),
        len(operands),
        [flows and bool(o.meta["differentiable"]) for o in operands],
        flows,
        has_own_backward(node.target),
    )
