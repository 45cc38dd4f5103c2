"""What operators cost: shared by the search, which prices choices, and by the prediction of a finished program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from autoparallel.decisions.prediction import Workload
from autoparallel.graph.calls import Call
from autoparallel.graph.captured import Captured, InputSpec
from autoparallel.graph.sizes import Sizes
from autoparallel.hardware import Profile
from autoparallel.placements.modes import Mode
from autoparallel.rules import Rule, rule_for
from autoparallel.rules.core import TensorFactors


def operator_seconds(
    profile: Profile,
    rule: Rule | None,
    modes: Sequence[Mode],
    axis_sizes: Sequence[int],
    size: Callable[[Any], int],
    moved_bytes: float,
    dtype: torch.dtype,
) -> tuple[float, float]:
    """The time of one rank's call of an operator, and of its backward: twice the work, as for a matrix product, or half
    as much again for a fused attention.

    What an operator exchanges between the ranks of an axis is part of its time.

    Args:
        rule: gives the arithmetic; None for an operator without a rule, which is priced by the bytes it moves.
        modes: how the operator runs on each mesh axis; empty for one that every rank runs whole.
        size: reads a traced size.
        moved_bytes: of the local operands and the local result.
    """
    points = 0.0
    if rule is not None and rule.flops:
        points = rule_points(rule, size)
    for mode, n in zip(modes, axis_sizes, strict=bool(modes)):
        if mode.kind == "shard":
            points /= n
    passes = 2.0
    if rule is not None and rule.attention:
        points, passes = points / profile.attention, 2.5
    forward = profile.compute_seconds(points, moved_bytes, dtype)
    backward = profile.compute_seconds(passes * points, 2 * moved_bytes, dtype)
    if rule is None or not rule.exchange:
        return forward, backward
    travel_seconds, return_seconds = _exchange_seconds(profile, rule, modes, axis_sizes, size, dtype.itemsize)
    # The backward sends the rows and the gradients of what came back, and gets the gradients of the rows.
    return forward + travel_seconds + return_seconds, backward + 2 * travel_seconds + return_seconds


def _exchange_seconds(
    profile: Profile,
    rule: Rule,
    modes: Sequence[Mode],
    axis_sizes: Sequence[int],
    size: Callable[[Any], int],
    itemsize: int,
) -> tuple[float, float]:
    """The time in which an operator that exchanges rows sends them away, and that in which it gets their results."""
    axes = [i for i, mode in enumerate(modes) if mode.kind == "shard" and mode.factor == rule.exchanged()]
    if not axes:
        return 0.0, 0.0

    def seconds(tensor: TensorFactors) -> float:
        factors = {factor for dim in tensor for factor in dim}
        local = float(itemsize)
        for factor in factors:
            local *= size(rule.sizes[factor])
        for mode, n in zip(modes, axis_sizes, strict=True):
            if mode.kind == "shard" and mode.factor in (*factors, rule.exchanged()):
                local /= n
        for axis in axes:  # as the group sees it: the rows of all its ranks
            local *= axis_sizes[axis]
        return profile.step_seconds(axis_sizes, "all_to_all", axes, int(local))

    return seconds(rule.operands[0]), seconds(rule.result)


def model_flops(graph: fx.Graph, size: Callable[[Any], int]) -> dict[torch.dtype, float]:
    """The floating-point operations of a model on the whole batch, forward and backward, by dtype.

    A backward is twice its forward; nothing is computed twice.
    """
    flops: dict[torch.dtype, float] = {}
    for node in graph.nodes:
        rule = rule_for(node)
        if rule is not None and rule.flops:
            dtype = node.meta["val"].dtype
            passes = 3 if node.meta["backward"] else 1
            flops[dtype] = flops.get(dtype, 0.0) + passes * rule_points(rule, size)
    return flops


def workload_of(captured: Captured, call: Call, profile: Profile) -> Workload:
    """What a call of a captured model has to do."""
    tokens = [s for s in call.specs if isinstance(s, InputSpec) and s.is_integer and len(s.shape) > 1]
    count = max((torch.Size(s.shape).numel() for s in tokens), default=0)
    flops = model_flops(captured.graph, Sizes(captured.actual))
    peak = profile.peak_flops(max(flops, key=lambda d: flops[d], default=torch.float32))
    return Workload(count or call.batch, "tokens" if count else "rows", sum(flops.values()), peak)


def rule_points(rule: Rule, size: Callable[[Any], int]) -> float:
    """The floating-point operations of a whole call, forward."""
    points = float(rule.flops)
    for factor in {f for tensor in (*rule.operands, rule.result) for dim in tensor for f in dim}:
        points *= size(rule.sizes[factor])
    return points
