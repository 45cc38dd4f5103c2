"""``verify()``: the user's own model against its plan, in real processes.

The model runs twice at the same time: as it is, in plain eager autograd, in one process; and compiled, in one process
for each rank of the mesh.  Both do what a training step does (forward, backward, the gradient norm, clipping with a
limit that bites, a step of an optimizer), and everything that can be seen of it is compared.

[Note: the reference] It is always the user's model in eager autograd, and nothing of the capture takes part in it: what
the capture drops is missing on one side only.  Random operators draw the numbers there that they draw in the compiled
model (see ``operators.plain_randomness``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from autoparallel import operators
from autoparallel.comm.world import MeshShape
from autoparallel.plan import Plan
from autoparallel.planner.request.presets import Preset
from autoparallel.predict.optimizer import MakeOptimizer
from autoparallel.tools.parity.comparison import RankSeen, Record, compare, compare_ranks, seen_of
from autoparallel.tools.parity.localize import localized
from autoparallel.tools.parity.noise import RUNS, TOLERANCES, narrowing_casts, noisy_records, tolerances_of
from autoparallel.tools.parity.report import Deviation, VerifyReport
from autoparallel.tools.parity.task import BeforeStep, Task, compile_task, make_task
from autoparallel.tools.parity.training import LimitOf, observe
from autoparallel.tools.processes import (
    Place,
    PlainModelError,
    Process,
    ranks_of_mesh,
    require_plain_process,
    run_processes,
)

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


def verify(
    model: nn.Module,
    mesh_shape: MeshShape,
    example_inputs: Any = (),
    loss_fn: Callable[..., Any] | None = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    plan: Preset | Plan = "auto",
    tolerance: float | str = "auto",
    dtype: torch.dtype | None = torch.float64,
    steps: int | None = None,
    seed: int = 0,
    optimizer: MakeOptimizer | None = None,
    precision: MixedPrecisionPolicy | None = None,
    before_step: BeforeStep | None = None,
    localize: bool = False,
    timeout: float = 300.0,
) -> VerifyReport:
    """Checks that a plan computes what the plain model computes, on this machine's CPU.

    Starts one process for each rank of the mesh and one for the reference, and four more where tolerances are measured,
    all with one thread; the user's model is copied, never changed.
    Use a small configuration of the model: every process holds it.

    The difference of two tensors is ``max |a - b| / max(1, max |b|)``, where b is the reference's: relative for large
    values and absolute for small ones.

    Args:
        model: the plain model, in the mode (training or not) in which it is to be compared, with its hooks.
        mesh_shape: the number of ranks; or a tuple of sizes, for the axes "dp", "tp", "ep"; or sizes by axis name.
        example_inputs: the positional inputs of one call, the target last where there is a ``loss_fn``; one tensor or
            object is taken as the only input, a mapping as keyword inputs.  A list of tuples or mappings is one batch
            for each step, taken in turn.  Tensors are global; those that require a gradient are compared by theirs,
            too.
        loss_fn: called as ``loss_fn(output, target)``.  Without it, the loss is the output named "loss", or the only
            one that is differentiable, if that is a scalar, or else a fixed weighted sum of all outputs.
        example_kwargs: keyword inputs of every call.
        plan: "auto", a preset, or a ``Plan``.
        tolerance: the largest difference that passes.  "auto" is 1e-9 (1e-5 in float32), and 1e-6 for a float64 model
            that casts to a narrower dtype by itself, as many do in rotary tables and losses.  Where ``dtype`` is None,
            or with ``precision``, it is measured for every tensor: the plain model is trained again with parameters,
            inputs and every operator's result moved by the rounding error of their dtypes, and four times what that
            moves is allowed (see ``tools.parity.noise``).
        dtype: what the model and its floating-point inputs are cast to, float64 or float32; None leaves them as they
            are, bfloat16 and mixed dtypes included.  Float64 finds what is wrong however small it is; None shows that
            what is run is right as far as its dtypes can tell.
        steps: the number of training steps; None takes one for each batch.
        seed: of random operators.
        optimizer: makes the optimizer, such as ``lambda parameters: torch.optim.AdamW(parameters)``; SGD with momentum
            otherwise.
        precision: as ``compile()`` takes it; the reference casts by hand.
        before_step: called with the model, plain or compiled, and the number of the step that comes, from 1 on: for
            what a loop changes, such as ``lambda model, step: setattr(model, "tau", 1 / step)``.
        localize: where something differs, looks for the first operator that deviates, forward and then backward, in
            float64: between the plain model and the captured graph, and between that and the ranks' program.
        timeout: seconds for everything; then all processes are stopped.

    Returns:
        The report: ``print`` it, or call its ``raise_if_failed()``.

    Raises:
        ValueError: for arguments that cannot be used.
        RuntimeError: when called from one of several ranks.
        ProcessError: when the model cannot be run or compiled, or a process dies or hangs; with its traceback.
    """
    require_plain_process("verify()")
    started = time.perf_counter()
    task = make_task(
        model, mesh_shape, example_inputs, loss_fn, example_kwargs, plan, dtype, steps, seed, optimizer, precision,
        before_step,
    )  # fmt: skip
    if isinstance(tolerance, str) and tolerance != "auto":
        raise ValueError(f"tolerance is a number or 'auto', got {tolerance!r}")
    measures = tolerance == "auto" and task.is_open_ended
    noisy = [Place(f"rounding errors {run}", f"{_NOISY}{run}", 0, 1) for run in range(RUNS * measures)]
    places = [*ranks_of_mesh(task.ranks), Place("the reference", "reference", 0, 1), *noisy]
    results = run_processes(places, _train, task, timeout)
    views, plans = zip(*results[: task.ranks], strict=True)
    reference, *runs = results[task.ranks :]
    measured = tolerances_of(reference.records, runs) if measures else None
    report = make_report(task, plans[0], views, reference, measured, tolerance, time.perf_counter() - started)
    if localize and not report.ok:
        left = max(timeout - (time.perf_counter() - started), 1.0)
        place = Place("the search for the first deviation", "localize", 0, 1)
        [deviation] = run_processes([place], _localize, (task, report), left)
        report = replace(report, deviation=deviation, seconds=time.perf_counter() - started)
    return report


@dataclass(frozen=True)
class Reference:
    """What the plain model shows after training.

    Attributes:
        records: what the ranks are compared with.
        casts: where the model itself casts to a narrower dtype.
        notes: what a reader should know of it.
    """

    records: Sequence[Record]
    casts: tuple[str, ...]
    notes: Sequence[str]


def make_report(
    task: Task,
    plan: Plan,
    ranks: Sequence[RankSeen],
    reference: Reference,
    measured: Mapping[tuple[int, str, str], float] | None,
    tolerance: float | str,
    seconds: float,
) -> VerifyReport:
    """What the processes' results say; with the tolerance of each record, where they are measured."""
    if not isinstance(tolerance, str):
        limit = float(tolerance)
    elif measured is not None:
        limit = max(measured.values(), default=0.0)
    else:
        limit = TOLERANCES[task.dtype or torch.float64][bool(reference.casts)]
    layouts = {name: layout for rank in reversed(ranks) for name, layout in rank.layouts.items()}
    differences = [*compare(_join_records(ranks), reference.records, layouts, measured), *compare_ranks(ranks)]
    if not differences:
        raise ValueError("there is nothing to compare: the model returns no tensor")
    return VerifyReport(
        model=type(task.model).__name__,
        mesh=task.axes,
        plan=plan,
        dtype=task.dtype,
        tolerance=limit,
        differences=tuple(sorted(differences, key=lambda d: -d.value)),
        reference="the plain model, in eager torch",
        layouts=layouts,
        casts=reference.casts,
        notes=tuple(reference.notes),
        seconds=seconds,
    )


def _join_records(ranks: Sequence[RankSeen]) -> list[Record]:
    """What the ranks have seen together: those of a pipeline tell of the parameters of their own stages."""
    joined = {(step, kind, name): x for rank in reversed(ranks) for step, kind, name, x in rank.records}
    return [(*key, value) for key, value in joined.items()]


# ------------------------------------------------------------------------------------------------- what processes do


_NOISY = "noisy"


def _train(process: Process, task: Task) -> tuple[RankSeen, Plan] | Reference | list[Record]:
    """Trains the plain model in the process of the reference and, with noise, in those of rounding errors, and the
    compiled one in those of the ranks, of which only the first sends what it has seen, but for those of a pipeline."""
    if process.group == "reference":
        return run_reference(task, lambda step, limit: process.shared.set(f"limit{step}", repr(limit)))

    def limit_of(step: int, _: Sequence[Tensor]) -> float:
        return float(process.shared.get(f"limit{step}"))

    if process.group.startswith(_NOISY):
        return noisy_records(task, int(process.group.removeprefix(_NOISY)), limit_of)
    view, plan = run_rank(task, limit_of)
    tells = process.rank == 0 or plan.pipeline is not None
    return view if tells else replace(view, records=[]), plan


def run_rank(task: Task, limit_of: LimitOf) -> tuple[RankSeen, Plan]:
    """Trains the compiled model on this rank, and tells what is seen of it, and its plan."""
    module = compile_task(task)
    return seen_of(module, list(observe(module, task, limit_of))), module.plan


def run_reference(task: Task, tell: Callable[[int, float], None]) -> Reference:
    """Trains the plain model in eager autograd, and tells what is seen of it.

    Args:
        tell: is told each step and the limit of its norm, half of what the norm is.

    Raises:
        PlainModelError: when the model fails by itself.
    """

    def half(step: int, grads: Sequence[Tensor]) -> float:
        norm = torch.stack([g.double().norm() for g in grads]).norm().item() if grads else 0.0
        limit = norm / 2 if 0 < norm < math.inf else 1.0
        tell(step, limit)
        return limit

    fresh = task.copy()
    try:
        records = list(observe(task.model, task, half))
    except operators.UnsupportedRandomness:
        raise
    except Exception as error:
        text = f"the plain model fails by itself: {type(error).__name__}: {error}"
        if task.dtype is not None and "dtype" in text:
            text += (
                f"\nWhat to change: pass dtype=None, where the model reads what is no part of it, as a teacher in a "
                f"closure: the model and its inputs were cast to {task.dtype}, and that was not"
            )
        raise PlainModelError(text) from error
    return Reference(records, () if task.is_open_ended else narrowing_casts(fresh), _notes(task.model, records))


def _notes(model: nn.Module, records: Sequence[Record]) -> list[str]:
    """What a reader should know of what was differentiated in the plain model."""
    notes = []
    if not any(p.requires_grad for p in model.parameters()):
        notes.append("no parameter is trainable, so there are no gradients to compare")
    values = {kind: value for _, kind, _, value in records if value is not None}
    if "loss" not in values and {"gradient", "input gradient"} & values.keys():
        notes.append("there is no scalar loss: a fixed weighted sum of all outputs is differentiated")
    return notes


def _localize(process: Process, work: tuple[Task, VerifyReport]) -> Deviation:
    return localized(*work)
