"""The programs that a request makes of a captured graph and a plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from autoparallel.decisions.parameters import PlanError
from autoparallel.decisions.pipeline import PipelinePlan
from autoparallel.graph.calls import Call, input_layouts, micro_specs, sizes_of
from autoparallel.graph.captured import Captured
from autoparallel.passes.adapt_captured import leave_only_loss, leave_out_logits, pad
from autoparallel.passes.chunk_loss import chunkable
from autoparallel.passes.runner import Watch, ignore
from autoparallel.plan import Plan
from autoparallel.planner.fits import require_cuttable, require_fits
from autoparallel.planner.request import Request
from autoparallel.program import (
    LocalProgram,
    StagedProgram,
    build_program,
    build_stages,
    wanted_outputs,
)


def outputs_of(request: Request, captured: Captured) -> Sequence[Any]:
    """The layout that each output must have; None where it may stay as it is made."""
    return wanted_outputs(captured, request.outputs, len(request.axes))


def local_program(
    request: Request, captured: Captured, plan: Plan, call: Call, prefix: str, watch: Watch = ignore
) -> LocalProgram:
    """A rank's program; the captured graph becomes its body; ``watch`` is told of each pass."""
    return build_program(
        captured,
        plan,
        prefix=prefix,
        redistributor=request.redistributor,
        outputs=outputs_of(request, captured),
        inputs=input_layouts(captured, call.specs, call.layouts),
        device=torch.device(request.device),
        reduce_dtype=request.precision.reduce_dtype if request.precision is not None else None,
        watch=watch,
    )


def step_program(request: Request, captured: Captured, plan: Plan, call: Call, prefix: str) -> LocalProgram:
    """A rank's program of a call, or of each of its microbatches; not for a pipeline."""
    if plan.microbatches > 1:
        return stage_programs(request, captured, plan, call, prefix).programs[0]
    return local_program(request, captured, plan, call, prefix)


def stage_programs(request: Request, captured: Captured, plan: Plan, call: Call, prefix: str) -> StagedProgram:
    """The local program of every stage of a pipeline, or of the one stage of microbatches, the same on all ranks.

    Raises:
        PlanError: where the model cannot be run so.
    """
    assert plan.staging is not None
    return build_stages(
        captured,
        plan,
        prefix=prefix,
        redistributor=request.redistributor,
        outputs=request.outputs,
        device=torch.device(request.device),
        reduce_dtype=request.precision.reduce_dtype if request.precision is not None else None,
        node=request.profile.node,
        training=call.is_training,
    )


def prepare(request: Request, captured: Captured, plan: Plan, call: Call) -> None:
    """Rewrites a captured graph into the one that a plan is about, once, and checks that it is.

    Where the batch is cut, the graph has the sizes of a microbatch, and differentiates its loss only.

    Raises:
        PlanError: when the plan does not fit it.
    """
    if plan.loss_chunks > 1 and call.trains and request.outputs == "auto":
        leave_out_logits(captured)
    if request.stages or plan.microbatches > 1:
        leave_only_loss(captured)
    pad(captured, plan.padded)
    require_fits(plan, captured.graph, request.axes, captured.parameters)
    chunks = max(plan.loss_chunks, request.loss_chunks or 1)
    if chunks > 1 and call.trains and captured.objective is not None and not chunkable(captured.graph):
        raise PlanError(
            f"the loss cannot be computed in {chunks} chunks of rows: that takes a linear layer whose logits go to "
            "cross_entropy (or through log_softmax to nll_loss) with reduction 'mean' or 'sum', and which nothing else "
            "reads, outputs included, unless the loss is known and outputs='auto'. Else leave loss_chunks out"
        )
    if request.stages and (plan.pipeline is None or plan.pipeline.ranks != request.stages):
        raise PlanError(f"the plan is not for a pipeline over {request.stages} ranks: plan again")
    if plan.microbatches > 1:
        require_cuttable(captured, call, plan.microbatches)
    if plan.staging is not None:
        captured.actual = sizes_of(captured, micro_specs(call.specs, microbatches_of(plan.staging, captured, call)))


def microbatches_of(pipeline: PipelinePlan, captured: Captured, call: Call) -> int:
    """How many microbatches a call has, or at least may have."""
    differentiated = captured.objective is not None and call.is_training and call.gradients
    return pipeline.microbatches if differentiated else math.gcd(pipeline.microbatches, call.batch)


__all__ = ["local_program", "microbatches_of", "outputs_of", "prepare", "stage_programs", "step_program"]
