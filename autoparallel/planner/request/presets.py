"""Presets: well-known strategies as constraints on the one space that the search explores."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal, get_args

from autoparallel.decisions.parameters import PlanError

Preset = Literal[
    "auto",
    "data_parallel",
    "fsdp",
    "hybrid",
    "tensor_parallel",
    "fsdp_tensor_parallel",
    "expert_parallel",
    "context_parallel",
]
"""The names that ``compile(plan=...)`` takes beside a ``Plan``: the free search, or a well-known strategy."""

PRESETS: tuple[Preset, ...] = get_args(Preset)

EXPERT_AXIS = "ep"
"""The mesh axis over which every preset but "auto" shards stacks of experts; for all else it is a data axis."""

TENSOR_AXIS = "tp"
SHARDED_AXIS = "dp_shard"
"""The data axis over which every preset but "auto" shards parameters at rest, as FSDP does."""

SEQUENCE_AXES = ("cp", "sp")


@dataclass(frozen=True)
class Constraints:
    """What a preset asks of each mesh axis.

    Attributes:
        data: axes over which the batch is sharded and parameters are whole while they are used.
        sharded_at_rest: data axes over which parameters are sharded between uses, and gathered for each.
        tensor: axes over which the batch is whole, and parameters of two dims or more are sharded, also in use.
        sequence: axes over which the sequence is sharded wherever an operator can run on parts of it, and parameters
            are whole while they are used but for those that lie along it (see ``planner.space.sequences``).
        expert: data axes over which stacks of experts are sharded, at rest and in use (see ``planner.space.experts``).
        needs_experts: whether a model without experts is an error.
    """

    data: frozenset[int] = frozenset()
    sharded_at_rest: frozenset[int] = frozenset()
    tensor: frozenset[int] = frozenset()
    sequence: frozenset[int] = frozenset()
    expert: frozenset[int] = frozenset()
    needs_experts: bool = False

    def without(self, axes: frozenset[int]) -> Constraints:
        """What is left where some axes are open."""
        data, tensor, expert = self.data - axes, self.tensor - axes, self.expert - axes
        sequence, rest = self.sequence - axes, self.sharded_at_rest - axes
        return replace(self, data=data, sharded_at_rest=rest, tensor=tensor, sequence=sequence, expert=expert)


def constraints_for(preset: str, axis_names: Sequence[str]) -> Constraints:
    """The constraints of a preset on a mesh, of which an axis named "dp_shard" shards parameters at rest.

    ``hybrid`` is ``fsdp`` over the last axis, whose ranks lie inside a node first, and data parallel across the
    others.  ``tensor_parallel`` uses the axis named "tp", or else the last axis that is not "ep", and is data parallel
    over the others.  ``fsdp_tensor_parallel`` is tensor parallel over "tp" and ``fsdp`` over the others, as most
    published runs on two axes are.  ``expert_parallel`` is data parallel with an axis named "ep", and tensor parallel
    over one named "tp".  ``context_parallel`` shards the sequence over the axis named "cp" or "sp", is tensor parallel
    over one named "tp", and data parallel over the others.

    Raises:
        ValueError: for a name that is not a preset.
        PlanError: for a preset that the mesh has no axis for.
    """
    names = tuple(axis_names)
    axes = frozenset(range(len(names)))

    def named(*wanted: str) -> frozenset[int]:
        return frozenset(i for i in axes if names[i] in wanted)

    expert = named(EXPERT_AXIS)
    sharded = tensor = sequence = frozenset[int]()
    if preset == "auto":
        return Constraints()
    if preset == "fsdp":
        sharded = axes
    elif preset == "hybrid":
        if len(names) < 2:
            raise PlanError(
                f"plan='hybrid' shards parameters along the last mesh axis and repeats them along the others, the mesh "
                f"has {names}: use a mesh of two axes or more, or plan='fsdp'"
            )
        sharded = frozenset({max(axes)})
    elif preset == "tensor_parallel":
        if axes == expert:
            raise PlanError("plan='tensor_parallel' needs a mesh axis other than 'ep': name one 'tp'")
        tensor = named(TENSOR_AXIS) or frozenset({max(axes - expert)})
    elif preset == "fsdp_tensor_parallel":
        tensor = named(TENSOR_AXIS)
        sharded = axes - tensor
        if not tensor or not sharded:
            raise PlanError(
                "plan='fsdp_tensor_parallel' needs a mesh axis named 'tp' and another, the mesh has "
                f"{names}: use plan='fsdp' or plan='tensor_parallel'"
            )
    elif preset == "expert_parallel":
        tensor = named(TENSOR_AXIS)
        if not expert:
            raise PlanError(f"plan='expert_parallel' needs a mesh axis named 'ep', the mesh has {names}")
    elif preset == "context_parallel":
        tensor, sequence = named(TENSOR_AXIS), named(*SEQUENCE_AXES)
        if not sequence:
            raise PlanError(f"plan='context_parallel' needs a mesh axis named 'cp' or 'sp', the mesh has {names}")
    elif preset != "data_parallel":
        raise ValueError(f"unknown plan {preset!r}: expected one of {', '.join(PRESETS)}, or a Plan")
    data = axes - tensor - sequence
    sharded |= data & named(SHARDED_AXIS)
    return Constraints(data, sharded, tensor, sequence, expert, needs_experts=preset == "expert_parallel")


def possible_presets(axis_names: Sequence[str]) -> list[Preset]:
    """The presets that a mesh has the axes for, "auto" first."""
    possible: list[Preset] = []
    for preset in PRESETS:
        with suppress(PlanError):
            constraints_for(preset, axis_names)
            possible.append(preset)
    return possible
