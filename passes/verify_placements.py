"""Checks a rank's program against the typing of its operators; changes nothing.

Every call must run in a way that its rule allows, on operands in just the layouts that this way needs; every
redistribution must start from its operand's layout.  That each gradient is completed exactly once follows, because a
layout says what each rank's gradient is (see ``placements``).
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from autoparallel.collectives import redistribute
from autoparallel.passes.insert_collectives import Redistribution
from autoparallel.placements import format_layout
from autoparallel.rules.calls import is_tensor, tensor_operands


class PlacementError(AssertionError):
    """A program whose layouts contradict the rules: a bug of ours, found before anything runs."""


def verify_placements(module: fx.GraphModule) -> fx.GraphModule:
    """Raises ``PlacementError`` at the first node that contradicts its rule; returns the module."""
    for node in module.graph.nodes:
        if node.op != "call_function" or not is_tensor(node):
            continue
        if node.target is redistribute:
            _check_redistribution(node)
        elif "needs" in node.meta:
            _check_call(node)
        elif node.target is operator.getitem or node.target is torch.ops.aten.div.Tensor and "scales" in node.meta:
            if node.meta["placements"] != node.args[0].meta["placements"]:
                raise PlacementError(f"{node.meta['key']}: its layout differs from its operand's")
        elif "bucket" not in node.meta:
            raise PlacementError(f"{node.meta.get('key', node.name)} has no layouts")
    return module


def _check_redistribution(node: fx.Node) -> None:
    done: Redistribution = node.meta["redistribution"]
    source = node.args[0]
    assert isinstance(source, fx.Node)
    if source.meta["placements"] != done.before or done.step.apply(done.before) != node.meta["placements"]:
        raise PlacementError(
            f"{node.meta['key']}: redistributes from {format_layout(done.before)}, "
            f"its operand lies as {format_layout(source.meta['placements'])}"
        )


def _check_call(node: fx.Node) -> None:
    operands = tensor_operands(node)
    needs = node.meta["needs"]
    if len(operands) != len(needs):
        return  # the local call has other operands than the global one; its rule's proof covers it
    for i, (x, need) in enumerate(zip(operands, needs, strict=True)):
        if x.meta["placements"] != need:
            raise PlacementError(
                f"{node.meta['key']} runs as {', '.join(map(str, node.meta['modes']))} and needs operand {i} as "
                f"{format_layout(need)}; it lies as {format_layout(x.meta['placements'])}"
            )
