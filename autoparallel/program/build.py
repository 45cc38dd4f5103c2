"""Runs the passes on a captured graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoparallel.decisions.parameters import PlanError
from autoparallel.graph.captured import Captured
from autoparallel.graph.sizes import Sizes
from autoparallel.passes.bucket_collectives import Buckets
from autoparallel.passes.chunk_loss import ChunkError
from autoparallel.passes.find_divisors import Divisors
from autoparallel.passes.recompute_layers import regions_of
from autoparallel.passes.runner import CAPTURED, Fact, PassList, run_passes
from autoparallel.passes.specification import Specification
from autoparallel.placements import Layout
from autoparallel.plan import Plan
from autoparallel.program.passes import placing_passes, program_passes
from autoparallel.program.program import LocalProgram, Target


def lay_out(
    captured: Captured, plan: Plan, target: Target, parameters: Mapping[str, Layout], *, hoisted: bool = True
) -> Specification:
    """Makes a captured graph a rank's, in place, in which parameters are gathered where they are used, and inputs are
    whole; gives what it was to become.

    Args:
        parameters: placeholder name to its layout.
        hoisted: whether the gathers will be taken out of the body (see :func:`placing_passes`).
    """
    outputs = captured.output_layouts(target.outputs, len(plan.mesh))
    taken_out = captured.parameters if hoisted else {}
    passes = placing_passes(plan, target, Sizes(captured.actual), parameters, outputs, taken_out)
    return run_passes(PassList(passes, CAPTURED, {Fact.PLACED}), captured.module)[Specification]


def build_program(
    captured: Captured,
    plan: Plan,
    target: Target,
    inputs: Mapping[str, Layout],
    outputs: Sequence[Layout | None] | None = None,
) -> LocalProgram:
    """Runs the passes on ``captured`` (whose graph becomes the body).

    Args:
        inputs: the layouts in which ``DTensor`` inputs come.
        outputs: those in which outputs leave; unless told, those that the target wants.

    Raises:
        PlanError: when the plan cannot be carried out.
    """
    passes = program_passes(captured, plan, target, inputs, outputs)
    module = captured.module
    try:
        findings = run_passes(passes, module, target.watch, checked=target.checked)
    except ChunkError as error:
        raise PlanError(str(error)) from error
    layouts = [node.meta["placements"] for node in module.graph.output_node().args[0]]  # type: ignore[union-attr]
    buckets = list(findings[Buckets].buckets)
    return LocalProgram(captured, module, buckets, layouts, list(findings[Divisors].pairs), regions_of(module))
