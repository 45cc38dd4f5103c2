"""Presets: well-known strategies as constraints on the one space that the search explores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PRESETS = ("auto", "data_parallel", "fsdp", "tensor_parallel")


@dataclass(frozen=True)
class Constraints:
    """What a preset asks of each mesh axis.

    Attributes:
        data: axes over which the batch is sharded and parameters are whole while they are used.
        sharded_at_rest: data axes over which parameters are sharded between uses.
        tensor: axes over which the batch is whole, and parameters of two dims or more are sharded, also in use.
        gather_per_use: whether gathered parameters are dropped after each use.
    """

    data: frozenset[int] = frozenset()
    sharded_at_rest: frozenset[int] = frozenset()
    tensor: frozenset[int] = frozenset()
    gather_per_use: bool | None = None


def constraints_for(preset: str, axis_names: Sequence[str]) -> Constraints:
    """The constraints of a preset on a mesh.

    ``tensor_parallel`` uses the axis named "tp", or else the last axis, and is data parallel over the others.

    Raises:
        ValueError: for a name that is not a preset.
    """
    axes = frozenset(range(len(axis_names)))
    if preset == "auto":
        return Constraints()
    if preset == "data_parallel":
        return Constraints(data=axes)
    if preset == "fsdp":
        return Constraints(data=axes, sharded_at_rest=axes, gather_per_use=True)
    if preset == "tensor_parallel":
        tensor = list(axis_names).index("tp") if "tp" in axis_names else len(axis_names) - 1
        return Constraints(data=axes - {tensor}, tensor=frozenset({tensor}))
    raise ValueError(f"unknown plan {preset!r}: expected one of {', '.join(PRESETS)}, or a Plan")
