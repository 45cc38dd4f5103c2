"""Choosing the mesh: the devices factored into axes, by what a step is searched to cost on each (see `meshes`).

[Note: one yardstick] All meshes are compared by what the search adds up, also those with a pipeline: the time of its
schedule, and what gathering, reducing and updating its parameters costs the rank that has most of that to do.  What is
hidden behind what is no sum, and is predicted for the chosen mesh only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from autoparallel.comm.world import PIPELINE_AXIS, Axes, mesh_text
from autoparallel.decisions.meshes import Alternative, MeshChoice
from autoparallel.decisions.parameters import PlanError
from autoparallel.decisions.pipeline import Pipeline
from autoparallel.graph.calls import Call
from autoparallel.graph.captured import Captured, InputSpec, explain_ambiguity
from autoparallel.planner.meshes import (
    PIPELINES,
    THREE_AXES,
    TWO_AXES,
    distinct,
    factored,
    inside,
    named,
    splits,
    stage_counts,
    stage_meshes,
)
from autoparallel.planner.planning import Planner, Request
from autoparallel.planner.staged import StagedPlanner
from autoparallel.predict.stages import memory_by_rank, parameter_seconds

Spread = Callable[[Callable[[Axes], Alternative], Sequence[Axes]], list[Alternative]]
"""Applies a function to every one of some meshes."""


def one_after_another(price: Callable[[Axes], Alternative], meshes: Sequence[Axes]) -> list[Alternative]:
    """The meshes priced here, in order."""
    return [price(mesh) for mesh in meshes]


@dataclass(frozen=True)
class MeshSearch:
    """What is to be planned for, on a mesh that is open.

    Attributes:
        model, request, captured, call: as ``Planner`` takes them; of the request, the axes do not matter.
        devices: how many there are.
        pipeline: what is fixed of a pipeline, which then must be one; None lets the search decide.
        refusal: why no pipeline can be run at all; empty where one can.
    """

    model: nn.Module
    request: Request
    captured: Captured
    call: Call
    devices: int
    pipeline: Pipeline | None = None
    refusal: str = ""

    def choose(self, spread: Spread = one_after_another) -> MeshChoice:
        """The best mesh, with what the others would cost.

        Args:
            spread: prices several meshes, in the order given.

        Raises:
            PlanError: where no mesh has a plan.
        """
        tried: list[Alternative] = []
        untried: list[Axes] = []
        if self.pipeline is None:
            self._without_pipeline(spread, tried, untried)
        problem = self.refusal or unable(self.captured, self.call)
        if not problem:
            self._pipelines(spread, tried, untried)
        elif self.pipeline is not None:
            raise PlanError(f"pipeline=... was given, but the model cannot be a pipeline: {problem}")
        capacity = self.request.profile.memory
        tried.sort(key=lambda a: a.order(capacity))
        if not tried or tried[0].seconds is None or tried[0].problem:
            reasons = "; ".join(f"{mesh_text(a.mesh)}: {a.problem}" for a in tried[:3])
            raise PlanError(f"no mesh of {self.devices} devices has a plan: {reasons or 'too few devices'}")
        return MeshChoice(tuple(tried), tuple(untried), capacity)

    def _without_pipeline(self, spread: Spread, tried: list[Alternative], untried: list[Axes]) -> None:
        profile = self.request.profile
        two = distinct(factored(self.devices, 2), profile)
        near = [shape for shape in two if inside(shape, profile)]
        near.sort(key=lambda shape: (max(shape), shape))
        taken = near[:TWO_AXES]
        flat = spread(self.price, [named((self.devices,)), *map(named, taken)])
        tried += flat
        untried += [named(shape) for shape in two if shape not in taken]
        best = min(flat[1:], key=lambda a: a.order(profile.memory), default=None)
        three = distinct(factored(self.devices, 3), profile)
        split = splits(tuple(size for _, size in best.mesh), profile)[:THREE_AXES] if best is not None else []
        tried += spread(self.price, [named(shape) for shape in split])
        untried += [named(shape) for shape in three if shape not in split]

    def _pipelines(self, spread: Spread, tried: list[Alternative], untried: list[Axes]) -> None:
        """Pipelines of more and more stages, until more cost more."""
        profile = self.request.profile
        pairs = [a for a in tried if len(a.mesh) == 2]
        best = min(pairs, key=lambda a: a.order(profile.memory), default=None)
        inner = best.mesh[-1][1] if best is not None else min(profile.node or self.devices, self.devices)
        before: Alternative | None = None
        searched = 0
        for ranks in stage_counts(self.devices):
            meshes = stage_meshes(self.devices, ranks, inner, profile)
            if searched + len(meshes) > PIPELINES or before is not None and before.seconds is None:
                untried += meshes
                continue
            searched += len(meshes)
            found = spread(self.price, meshes)
            tried += found
            least = min(found, key=lambda a: a.order(profile.memory))
            if before is not None and before.order(profile.memory) < least.order(profile.memory):
                searched = PIPELINES
            before = least

    def price(self, mesh: Axes) -> Alternative:
        """What a mesh costs, by one search."""
        staged = mesh[0][0] == PIPELINE_AXIS
        request = replace(self.request, axes=mesh[1:] if staged else mesh)
        planner: Planner
        if staged:
            planner = StagedPlanner(self.model, request, mesh[0][1], self.pipeline or Pipeline())
        else:
            planner = Planner(self.model, request)
        planner.thorough = False
        graph = self.captured.copy() if staged else self.captured
        try:
            plan = planner.search(graph, self.call)
        except ValueError as error:
            return Alternative(mesh, problem=str(error))
        estimate = plan.estimate
        assert estimate is not None and plan.cost is not None
        if plan.pipeline is None:
            return Alternative(mesh, plan.cost, estimate.memory)
        pipeline = plan.pipeline
        return Alternative(
            mesh,
            pipeline.seconds + max(parameter_seconds(graph, plan)),
            max(memory_by_rank(plan)),
            pipeline.schedule,
            pipeline.microbatches,
            pipeline.bubble,
            changes(self.captured, self.request.outputs),
        )


def unable(captured: Captured, call: Call) -> str:
    """Why a model cannot be a pipeline; empty where it can."""
    if captured.objective is None:
        return explain_ambiguity(len(captured.flowing)) if len(captured.flowing) > 1 else "it has no loss"
    weight = captured.weight
    if weight is not None and weight.kind == "unknown":
        return f"it cannot be told what the loss is a mean over: {weight.reason}"
    if any(layout is not None for layout in call.layouts):
        return "an input is a DTensor"
    if any(isinstance(s, InputSpec) and s.requires_grad for s in call.specs):
        return "an input is differentiated"
    if not captured.actual:
        return f"the model fixes the batch size at {call.batch}"
    return ""


def changes(captured: Captured, outputs: str) -> str:
    """What a pipeline would change about the model's results, so that it is not taken unasked; empty for nothing."""
    if captured.mutated_buffers:
        return "a pipeline takes batch statistics of microbatches; give a mesh with an axis 'pp' to have one"
    results = {o for o in captured.outputs if isinstance(o, int)}
    if outputs != "gather" and not results.issubset({captured.objective}):
        return "a pipeline keeps no output beside the loss; give a mesh with an axis 'pp' to have one"
    return ""


def refusal(precision: object, outputs: str, scaler: torch.amp.GradScaler | None, dtypes: set[torch.dtype]) -> str:
    """Why options do not go with a pipeline; empty where they do."""
    used = getattr(precision, "param_dtype", None)
    if scaler is None and torch.float16 in {used, *dtypes}:
        return (
            "a pipeline in float16 must know the gradient scaler, because it computes gradients before the loss is "
            "scaled: pass grad_scaler=torch.amp.GradScaler(...) to compile(), or use bfloat16"
        )
    if outputs == "sharded":
        return "outputs='sharded' is not supported by pipelines: use outputs='gather', or 'auto'"
    return ""


__all__ = ["MeshSearch", "one_after_another", "refusal"]
