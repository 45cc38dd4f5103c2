"""The programs that a request makes of a captured graph and a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autoparallel.decisions.parameters import PlanError
from autoparallel.decisions.pipeline import PipelinePlan
from autoparallel.graph.calls import Call, count_microbatches, micro_specs, sizes_of
from autoparallel.graph.captured import Captured
from autoparallel.passes.adapt_captured import leave_only_loss, leave_out_logits, pad
from autoparallel.passes.runner import Watch, ignore
from autoparallel.plan import Plan
from autoparallel.planner.fits import require_chunkable, require_cuttable, require_fits, require_gathered_once
from autoparallel.planner.request.request import Request
from autoparallel.program.build import build_program
from autoparallel.program.program import LocalProgram
from autoparallel.program.stages import StagedProgram, build_stages

UNBOUND = "mesh0"
"""The name of the mesh in programs that are looked at or simulated: no mesh is bound under it."""


def build(
    request: Request,
    captured: Captured,
    plan: Plan,
    call: Call,
    prefix: str = UNBOUND,
    watch: Watch = ignore,
    checked: bool = True,
) -> LocalProgram | StagedProgram:
    """A rank's program; of a pipeline, or of microbatches, those of all stages, the same on all ranks.

    Args:
        captured: becomes the body, its vocabularies padded as the plan says.
        prefix: the name under which the mesh is bound.
        watch: is told of each pass.
        checked: whether the programs are checked and compiled, as those that run must be.

    Raises:
        PlanError: where the model cannot be run so.
    """
    pad(captured, plan.padded)
    target = replace(request.target(prefix), checked=checked, watch=watch)
    if plan.staging is not None:
        return build_stages(captured, plan, target, call.trains)
    return build_program(captured, plan, target, captured.input_layouts(call.specs, call.layouts))


def adapt(
    request: Request, captured: Captured, call: Call, rows: Mapping[str, int], microbatches: int, loss_chunks: int
) -> None:
    """Rewrites a captured graph, in place, into the one that a plan is about; one that is so already is left as it is.

    Args:
        rows: parameter name to the rows that it is used with.
        microbatches: into how many a call without a pipeline is cut.
        loss_chunks: into how many chunks of rows the loss is cut.
    """
    if loss_chunks > 1 and call.trains and request.outputs == "auto":
        leave_out_logits(captured)
    if request.stages or microbatches > 1:
        leave_only_loss(captured)
    if rows:
        pad(captured, rows)


def prepare(request: Request, captured: Captured, plan: Plan, call: Call) -> None:
    """Rewrites a captured graph into the one that a plan is about, and checks that it is.

    Where the batch is cut, the graph has the sizes of a microbatch, and differentiates its loss only.

    Raises:
        PlanError: when the plan does not fit it.
    """
    adapt(request, captured, call, plan.padded, plan.microbatches, plan.loss_chunks)
    require_gathered_once(plan, captured)
    if call.trains and captured.objective is not None:
        require_chunkable(captured.graph, max(plan.loss_chunks, request.loss_chunks or 1))
    require_stages(request, plan)
    if plan.staging is not None:
        count = microbatches_of(request, plan.staging, captured, call)
        if plan.pipeline is None:
            require_cuttable(captured, call, count)
        captured.actual = sizes_of(captured, micro_specs(call.specs, count))
    require_fits(plan, captured, request.axes)


def require_stages(request: Request, plan: Plan) -> None:
    """Raises PlanError where a mesh has a pipeline's axis that a plan was not made for."""
    if request.stages and (plan.pipeline is None or plan.pipeline.ranks != request.stages):
        raise PlanError(f"the plan is not for a pipeline over {request.stages} ranks: plan again")


def microbatches_of(request: Request, pipeline: PipelinePlan, captured: Captured, call: Call) -> int:
    """How many microbatches a call has, or at least may have."""
    if captured.objective is not None and call.trains:
        return pipeline.cut(call.batch)
    ranks = request.batch_ranks
    return count_microbatches(pipeline.microbatches, call.batch, lambda m: call.batch // m % ranks == 0)
