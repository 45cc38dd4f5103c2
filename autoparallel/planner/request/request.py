"""What is asked of the planner."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from autoparallel.comm.world import PIPELINE_AXIS, Axes, axes_of
from autoparallel.decisions.means import OpenMeans
from autoparallel.decisions.parameters import ParameterPlan
from autoparallel.decisions.pipeline import Pipeline, PipelinePlan
from autoparallel.hardware import Profile, profile_for
from autoparallel.placements.redistribution import Redistributor
from autoparallel.plan import Plan
from autoparallel.planner.request.pins import Pins
from autoparallel.planner.request.presets import PRESETS, Constraints, constraints_for
from autoparallel.predict.optimizer import MakeOptimizer, optimizer_cost
from autoparallel.program.program import Target

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


@dataclass(frozen=True)
class Request(OpenMeans):
    """What is asked of the planner, for all calls of a model, with what is fixed of the means that save memory.

    Attributes:
        axes: the mesh axes by name and size, but for a pipeline's.
        profile: the hardware that is planned for.
        plan: "auto", a preset, or a plan to carry out as it is.
        pins: what some parameters, modules and operators must be, whatever else is chosen.
        loss_fn, memory_limit, outputs, precision: as ``compile()`` takes them; the limit in bytes, None for none.
        device: the kind of device that programs run on.
        stages: the ranks of a pipeline's axis; 0 where there is none.
        pipeline: what is fixed of the pipeline; None leaves all of it open.
        compiled: whether ``torch.compile`` runs the programs.
    """

    axes: Axes
    profile: Profile
    plan: str | Plan = "auto"
    pins: Pins = field(default_factory=Pins)
    loss_fn: Callable[..., Any] | None = None
    memory_limit: float | None = None
    outputs: str = "auto"
    precision: MixedPrecisionPolicy | None = None
    device: str = "cpu"
    stages: int = 0
    pipeline: Pipeline | None = None
    compiled: bool = False

    @property
    def origin(self) -> str:
        """The preset's name, that of a plan's preset, or "auto"."""
        return self.plan.origin if isinstance(self.plan, Plan) else self.plan

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def batch_ranks(self) -> int:
        """The ranks over which a preset shards the batch."""
        return math.prod(self.sizes[axis] for axis in self.constraints().data)

    @cached_property
    def redistributor(self) -> Redistributor:
        """The ways between layouts on these axes, at the profile's prices."""
        return Redistributor(self.sizes, partial(self.profile.step_seconds, self.sizes))

    def target(self, prefix: str) -> Target:
        """What programs are made for, on the mesh that is bound under a name."""
        return Target(
            prefix,
            self.redistributor,
            self.outputs,
            torch.device(self.device),
            self.precision.reduce_dtype if self.precision is not None else None,
            self.profile.node,
            overlaps=not (self.compiled or self.profile.fuses),
        )

    def on(self, mesh: Axes) -> Request:
        """The same request on a mesh, of which a pipeline's axis is the request's stages."""
        inner = tuple(axis for axis in mesh if axis[0] != PIPELINE_AXIS) or axes_of(1)
        return replace(self, axes=inner, stages=dict(mesh).get(PIPELINE_AXIS, 0))

    def constraints(self, preset: str | None = None) -> Constraints:
        """What a preset asks of each mesh axis; the request's, unless told another.

        Raises:
            PlanError: for a preset that the mesh has no axis for.
        """
        preset = preset or self.origin
        return constraints_for(preset if preset in PRESETS else "auto", self.names)


@dataclass(frozen=True)
class Settled:
    """What the plan of the first kind of call has settled for all others.

    Attributes:
        at_rest: how every parameter lies; None where that is open.
        pipeline: the schedule and the cuts; None where there are none, or they are open.
        recompute: the layers that run again in the pipeline's backward, and how much of them.
        offload_optimizer: whether the optimizer's states lie in host memory; None where that is open.
    """

    at_rest: Mapping[str, ParameterPlan] | None = None
    pipeline: PipelinePlan | None = None
    recompute: Mapping[str, str] = field(default_factory=dict)
    offload_optimizer: bool | None = None


UNSETTLED = Settled()
"""Before a model has a plan."""


def profile_of_run(
    device_type: str, hardware: str | Path | Profile | None, backend: str, optimizer: MakeOptimizer | None
) -> Profile:
    """The profile that a step is priced with: the hardware's, with what the backend fuses and what the optimizer costs.

    Raises:
        ValueError: for hardware that is not known.
    """
    profile = replace(profile_for(device_type, hardware), fuses=backend == "inductor")
    return profile if optimizer is None else replace(profile, optimizer=optimizer_cost(optimizer))


def limit_in_bytes(limit: float | str | None, profile: Profile) -> float | None:
    """A limit on memory in bytes.

    Args:
        limit: bytes, as a number or as a text such as "70GB"; at most 1, a part of what the profile's device has; None
            for what a plan may take there, where that is known.

    Raises:
        TypeError, ValueError: for what is no limit, and for a part of a memory that is not known.
    """
    if limit is None:
        return profile.usable
    if isinstance(limit, bool) or not isinstance(limit, int | float | str):
        raise TypeError(f"memory_limit must be a number, or a text such as '70GB', not a {type(limit).__name__}")
    value = _number(limit) if isinstance(limit, str) else limit
    if not 0 < value < math.inf:
        raise ValueError(f"memory_limit={limit!r} is not a limit: write 70GB, 7e10 or 0.9")
    if value > 1:
        return value
    if profile.memory is None:
        raise ValueError(
            f"memory_limit={limit} is a part of the device's memory, which the profile {profile.name!r} does not know: "
            "give bytes"
        )
    return value * profile.memory


def pipeline_refusal(
    precision: MixedPrecisionPolicy | None,
    outputs: str,
    scaler: torch.amp.GradScaler | None = None,
    dtypes: Collection[torch.dtype] = (),
) -> str:
    """Why options do not go with microbatches or a pipeline; empty where they do.

    Args:
        dtypes: of the model's parameters.
    """
    used = precision.param_dtype if precision is not None else None
    if scaler is None and torch.float16 in {used, *dtypes}:
        return (
            "microbatches in float16 must know the gradient scaler, because gradients are computed before the loss is "
            "scaled: pass grad_scaler=torch.amp.GradScaler(...) to compile(), or use bfloat16"
        )
    if outputs == "sharded":
        return "outputs='sharded' is not supported with microbatches or a pipeline: use outputs='gather', or 'auto'"
    return ""


def _number(text: str) -> float:
    """The bytes of a text with a unit or without; 0 for any other text."""
    match = re.fullmatch(r"\s*([\d.]+(?:e[+-]?\d+)?)\s*([kmgt]?)b?\s*", text.lower())
    try:
        return float(match[1]) * 1e3 ** " kmgt".index(match[2] or " ") if match is not None else 0.0
    except ValueError:
        return 0.0
