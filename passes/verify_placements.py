"""Checks a rank's program against the typing of its operators; changes nothing.

What every call needs and gives is derived anew, from its rule and from how it runs on each mesh axis; what a
redistribution does, from its arguments.  Nothing that the rewriting passes have noted is taken for granted.  That each
gradient is completed exactly once follows, because a layout says what each rank's gradient is (see ``placements``).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoparallel.comm.collectives import redistribute
from autoparallel.comm.groups import group_name
from autoparallel.operators.opaque import has_own_backward
from autoparallel.passes.insert_collectives import Redistribution
from autoparallel.passes.mark_gradients import flows
from autoparallel.placements import ACTIONS, Invariant, Layout, format_layout, parse_placement, shards_of
from autoparallel.placements.modes import Mode
from autoparallel.placements.redistribution import Step
from autoparallel.rules.calls import is_tensor, tensor_operands
from autoparallel.rules.typing import Typed, typed_modes


class PlacementError(AssertionError):
    """A program whose layouts contradict the rules: a bug of ours, found before anything runs."""


@dataclass(frozen=True)
class Asked:
    """What a program was to be, as ``insert_collectives`` was told.

    Attributes:
        modes: node key to how the operator runs on each mesh axis.
        placeholders: placeholder name to its layout; others are Invariant.
        outputs: the layout each output must have; None leaves it as it is, with sums completed.
        axes: the mesh axes by name and size.
        prefix: the name under which the mesh is bound.
    """

    modes: Mapping[str, Sequence[Mode]]
    placeholders: Mapping[str, Layout]
    outputs: Sequence[Layout | None]
    axes: Sequence[tuple[str, int]]
    prefix: str

    @property
    def names(self) -> list[str]:
        """The names of the mesh axes."""
        return [name for name, _ in self.axes]

    def ranks(self, axes: Sequence[int]) -> int:
        """The number of ranks along some axes."""
        return math.prod(self.axes[axis][1] for axis in axes)


def verify_placements(module: fx.GraphModule, asked: Asked | None = None) -> fx.GraphModule:
    """Raises ``PlacementError`` at the first node that contradicts its rule; returns the module.

    Args:
        module: the program.
        asked: what it was to be; None checks it by itself.
    """
    for node in module.graph.nodes:
        if node.op == "placeholder":
            if asked is not None and "placements" in node.meta:
                invariant = (Invariant,) * len(asked.axes)
                _require_layout(node, asked.placeholders.get(node.name, invariant), "enters as")
        elif node.op == "output":
            if asked is not None:
                _check_outputs(node, asked)
        elif node.op == "call_function" and is_tensor(node):
            _check_tensor(node, asked)
        elif node.op == "call_function" and tensor_operands(node):
            _check_global(node, asked)
    return module


def _check_tensor(node: fx.Node, asked: Asked | None) -> None:
    if "bucket" in node.meta:
        return
    if node.target is redistribute:
        _check_redistribution(node, asked)
    elif "modes" in node.meta:
        _check_call(node, asked)
    elif node.target is operator.getitem or node.target is torch.ops.aten.div.Tensor and "scales" in node.meta:
        _require_layout(node, _layout(node.args[0]), "its operand lies as")
    else:
        raise PlacementError(f"{_name(node)} has no layouts")
    if node.meta["differentiable"] != flows(node):
        whether = "is" if flows(node) else "is not"
        raise PlacementError(f"{_name(node)} {whether} differentiable, and was laid out as if it were otherwise")


def _check_redistribution(node: fx.Node, asked: Asked | None) -> None:
    source, src, dst, group = node.args
    step: Step = node.meta["redistribution"].step
    before: Layout = _layout(source)
    done: Redistribution = node.meta["redistribution"]
    if done.before != before or any(before[axis] != step.src for axis in step.axes):
        raise PlacementError(
            f"{_name(node)}: redistributes from {format_layout(done.before)}, "
            f"its operand lies as {format_layout(before)}"
        )
    if (parse_placement(str(src)), parse_placement(str(dst))) != (step.src, step.dst):
        raise PlacementError(f"{_name(node)}: redistributes from {src} to {dst}, not from {step.src} to {step.dst}")
    if asked is not None and group != group_name(asked.prefix, asked.names, step.axes):
        raise PlacementError(f"{_name(node)}: communicates over {group!r}, not over the axes {step.axes}")
    after = step.apply(before)
    _require_layout(node, after, "becomes")
    ends = [(before, step.src), (after, step.dst)]
    if (step.src.kind, step.dst.kind) not in ACTIONS or any(
        p.kind == "S" and step.axes != shards_of(layout, p.dim)[-1:] for layout, p in ends
    ):
        raise PlacementError(f"{_name(node)}: no step leads from {format_layout(before)} to {format_layout(after)}")


def _check_call(node: fx.Node, asked: Asked | None) -> None:
    modes: Sequence[Mode] = node.meta["modes"]
    if asked is not None and tuple(modes) != tuple(asked.modes[node.meta["key"]]):
        raise PlacementError(f"{_name(node)} runs as {_text(modes)}, not as {_text(asked.modes[node.meta['key']])}")
    operands = tensor_operands(node)
    rule = node.meta["rule"]
    if rule is None or len(operands) == len(rule.operands):
        typed = [_typed(node, operands, mode) for mode in modes]
        for i, x in enumerate(operands):
            need = tuple(t.operands[i] for t in typed)
            if _layout(x) != need:
                raise PlacementError(
                    f"{_name(node)} runs as {_text(modes)} and needs operand {i} as {format_layout(need)}; it lies as "
                    f"{format_layout(_layout(x))}"
                )
        _require_layout(node, tuple(t.result for t in typed), f"runs as {_text(modes)} and gives")
    if asked is not None:
        means = rule.reductions if rule is not None else {}
        axes = [i for i, mode in enumerate(modes) if mode.kind == "shard" and means.get(mode.factor) == "mean"]
        _require_scaled(node, torch.ops.aten.div.Tensor, asked.ranks(axes))


def _typed(node: fx.Node, operands: Sequence[fx.Node], mode: Mode) -> Typed:
    """What a call needs and gives on one mesh axis, as its rule says."""
    result = bool(node.meta["differentiable"])
    differentiable = [result and bool(x.meta["differentiable"]) for x in operands]
    ways = typed_modes(node.meta["rule"], len(operands), differentiable, result, has_own_backward(node.target))
    for typed in ways:
        if typed.mode == mode:
            return typed
    raise PlacementError(f"{_name(node)} cannot run as {mode}")


def _check_global(node: fx.Node, asked: Asked | None) -> None:
    """A call that gives sizes or several tensors reads whole ones; a size counts the rows of all ranks."""
    if node.target is torch.ops.aten.sym_size.int:
        source, dim = node.args
        assert isinstance(source, fx.Node) and isinstance(dim, int)
        if asked is not None:
            cuts = shards_of(_layout(source), dim % source.meta["val"].ndim)
            _require_scaled(node, operator.mul, asked.ranks(cuts))
        return
    for i, x in enumerate(tensor_operands(node)):
        if any(p != Invariant for p in _layout(x)):
            raise PlacementError(f"{_name(node)} needs operand {i} whole; it lies as {format_layout(_layout(x))}")


def _require_scaled(node: fx.Node, target: Any, count: int) -> None:
    """Between ``count`` ranks that have a part each, all that is read of a call is its result times or by the count."""
    if count > 1 and any(user.target is not target or user.args != (node, count) for user in node.users):
        raise PlacementError(f"{_name(node)} is of one of {count} parts, and is read without taking that into account")


def _check_outputs(node: fx.Node, asked: Asked) -> None:
    results: Any = node.args[0]
    for i, (value, layout) in enumerate(zip(results, asked.outputs, strict=True)):
        if isinstance(value, fx.Node) and is_tensor(value) and "placements" in value.meta:
            lies = _layout(value)
            if lies != layout if layout is not None else any(p.kind not in "IS" for p in lies):
                raise PlacementError(
                    f"output {i} leaves as {format_layout(lies)}, not as "
                    f"{format_layout(layout) if layout is not None else 'shards or whole'}"
                )


def _require_layout(node: fx.Node, layout: Layout, why: str) -> None:
    if _layout(node) != layout:
        raise PlacementError(
            f"{_name(node)} {why} {format_layout(layout)}; it is said to lie as {format_layout(_layout(node))}"
        )


def _layout(node: Any) -> Layout:
    if "placements" not in node.meta:
        raise PlacementError(f"{_name(node)} has no layouts")
    layout: Layout = node.meta["placements"]
    return layout


def _name(node: fx.Node) -> str:
    return str(node.meta.get("key", node.name))


def _text(modes: Sequence[Mode]) -> str:
    return ", ".join(map(str, modes))


__all__ = ["Asked", "PlacementError", "verify_placements"]
