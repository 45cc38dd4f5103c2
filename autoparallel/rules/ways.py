"""The ways in which a node may run, and what each of them needs and makes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from torch import fx

from autoparallel import operators
from autoparallel.operators.opaque import has_own_backward
from autoparallel.placements import Layout, divides, fills_up, reaches_all
from autoparallel.placements.modes import Mode
from autoparallel.rules.calls import map_tensor_operands, tensor_operands
from autoparallel.rules.core import Rule
from autoparallel.rules.localize import LocalCall
from autoparallel.rules.registry import rule_for
from autoparallel.rules.typing import Typed, typed_modes


def typed_call(node: fx.Node, modes: Sequence[Mode]) -> tuple[Sequence[Layout], Layout]:
    """The layouts of a call's operands and result when it runs as ``modes`` says on each axis.

    Raises:
        ValueError: when the operator cannot run so.
    """
    return _typed_call(node, rule_for(node), modes)


def local_call(
    node: fx.Node,
    modes: Sequence[Mode],
    operand: Callable[[fx.Node, Layout], Any],
    axis_sizes: Sequence[int],
    groups: Sequence[str],
) -> LocalCall:
    """The call that a rank makes for a node of the global graph, as the node's rule says.

    Args:
        modes: how the operator runs on each mesh axis.
        operand: gives what the call reads of an operand that it needs in a layout.
        axis_sizes, groups: of the mesh axes; ``groups`` are their names in programs.

    Raises:
        ValueError: when the operator cannot run so.
    """
    rule = rule_for(node)
    needs, result = _typed_call(node, rule, modes)
    divisor = 1
    for size, mode in zip(axis_sizes, modes, strict=True):
        if rule is not None and mode.kind == "shard" and rule.reductions.get(mode.factor) == "mean":
            divisor *= size
    graph = node.graph
    with graph.inserting_before(node):
        args, kwargs = map_tensor_operands(node, lambda i, x: operand(x, needs[i]))
        call = LocalCall(graph, node, node.target, args, kwargs, modes, needs, result, axis_sizes, groups, divisor)
        if rule is not None and rule.localize is not None:
            rule.localize(call)
    return call


def _typed_call(node: fx.Node, rule: Rule | None, modes: Sequence[Mode]) -> tuple[Sequence[Layout], Layout]:
    try:
        return _layouts(_kind_of(node, rule), tuple(modes))
    except ValueError as error:
        raise ValueError(f"{node.meta.get('key', node.name)} {error}") from None


def operand_fits(
    node: fx.Node, shape: Sequence[int], result: Sequence[int], layout: Layout, axis_sizes: Sequence[int]
) -> bool:
    """Whether a call can read an operand of this global shape in this layout: its shards are equal, and none is empty;
    ``pad_rows`` reads shards that differ, as long as it makes them equal."""
    if node.target is operators.pad_rows:
        return fills_up(shape, result, layout, axis_sizes)
    return divides(shape, layout, axis_sizes) and reaches_all(shape, layout, axis_sizes)


def call_modes(node: fx.Node) -> Sequence[Typed]:
    """Every way in which a call may run on one mesh axis."""
    return tuple(_ways(_kind_of(node, rule_for(node))).values())


@dataclass(frozen=True)
class _Kind:
    """What the ways follow from in which a call may run: few calls of a model differ in it, so they are worked out once
    for all that do not."""

    factors: Hashable
    differentiable: tuple[bool, ...]
    result_differentiable: bool
    own_backward: bool
    rule: Rule | None = field(compare=False)


def _kind_of(node: fx.Node, rule: Rule | None) -> _Kind:
    operands, flows = tensor_operands(node), bool(node.meta["differentiable"])
    differentiable = tuple([flows and bool(o.meta["differentiable"]) for o in operands])
    factors = None if rule is None else rule.typed_by
    return _Kind(factors, differentiable, flows, has_own_backward(node.target), rule)


@lru_cache(maxsize=1 << 12)
def _ways(kind: _Kind) -> Mapping[Mode, Typed]:
    """Every way in which calls of a kind may run on one mesh axis, by its mode."""
    modes = typed_modes(kind.rule, kind.differentiable, kind.result_differentiable, kind.own_backward)
    return {typed.mode: typed for typed in modes}


@lru_cache(maxsize=1 << 14)
def _layouts(kind: _Kind, modes: tuple[Mode, ...]) -> tuple[tuple[Layout, ...], Layout]:
    """The layouts of the operands and of the result of calls of a kind that run as ``modes`` says on each axis.

    Raises:
        ValueError: when they cannot run so.
    """
    ways = _ways(kind)
    for mode in modes:
        if mode not in ways:
            raise ValueError(f"cannot run as {mode}")
    chosen = [ways[mode] for mode in modes]
    operands = tuple([tuple([t.operands[i] for t in chosen]) for i in range(len(kind.differentiable))])
    return operands, tuple([t.result for t in chosen])
