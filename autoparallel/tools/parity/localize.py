"""The first operator that deviates: of the captured graph from the plain model, or of the ranks' program from that.

Both are looked at in float64 and at the step that failed first, on the parameters that the plain model has there.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from autoparallel.graph.carried_attributes import ChangesAttributesError
from autoparallel.tools.parity.localize_capture import capture_deviation
from autoparallel.tools.parity.localize_program import call_of_task, planner_of, program_deviation
from autoparallel.tools.parity.noise import TOLERANCES, narrowing_casts
from autoparallel.tools.parity.report import Deviation, VerifyReport
from autoparallel.tools.parity.task import Task
from autoparallel.tools.parity.training import Draws, train


def localized(task: Task, report: VerifyReport) -> Deviation:
    """The first operator that deviates in the first step of which something failed."""
    if task.precision is not None:
        return Deviation("", detail="with precision=... the first deviation is not looked for: verify without it first")
    if report.plan.pipeline is not None:
        return Deviation(
            "", detail="the first deviation is not looked for in a pipeline: verify without its axis first"
        )
    step = report.first_failed_step
    failed = [d for d in report.failed if d.step == step]
    task = task.copy(torch.float64)
    tolerance = TOLERANCES[torch.float64][bool(narrowing_casts(task))]
    draws = Draws(task.seed)
    for _ in train(task.model, replace(task, steps=step - 1), lambda *_: 1.0, draws):
        pass
    task.before_step(task.model, step)
    random, batch = draws.state, task.batch(step)
    try:
        captured = planner_of(task, report.plan).capture(call_of_task(task, batch))
    except ChangesAttributesError as error:
        return Deviation("", detail=f"the first deviation is not looked for: {str(error).splitlines()[0]}")
    deviation = capture_deviation(task, captured, batch, random, tolerance)
    deviation = deviation or program_deviation(task, captured, report.plan, batch, random, tolerance)
    if deviation is not None:
        return deviation
    if failed and all(d.kind == "attribute" for d in failed):
        names = ", ".join(d.name for d in failed)
        return Deviation(
            "",
            detail=f"every operator of step {step} is right; the call changes the attribute {names} of the plain model "
            "and not of the compiled one: what depends on it is wrong from the next step on",
        )
    where = "the synchronisation of gradients, the clipping or the step"
    if task.dtype is None:
        where += ", or in the precision"
    return Deviation(
        "",
        detail=f"every operator of step {step} computes the same in float64 on the ranks, in the captured graph and in "
        f"the plain model, forward and backward: what is wrong lies behind them, in {where}",
    )
