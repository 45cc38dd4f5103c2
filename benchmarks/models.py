"""Which architectures are captured, are right under which plan, and how much of them is sharded.

    python -m benchmarks.models [--models GPT-2;LSTM] [--out docs/models.md]

Each model is made tiny, in float64, and compared with itself in plain eager autograd: its captured graph (the loss, all
outputs and every gradient), and for each plan the program of a (2, 2) mesh, whose ranks are threads of one process,
operator by operator, forward and backward.  Nothing may be off by more than 1e-9, or 1e-5 where a model casts to
float32 by itself.  Every model is a process of its own.
"""

from __future__ import annotations

import argparse
import logging
import re
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import transformers

from autoparallel.graph.captured import Captured
from autoparallel.operators import RandomState
from autoparallel.plan import Plan
from autoparallel.planner.request.presets import Preset
from autoparallel.tools.parity.localize_capture import capture_deviation
from autoparallel.tools.parity.localize_program import call_of_task, planner_of, program_deviation
from autoparallel.tools.parity.noise import narrowing_casts
from autoparallel.tools.parity.report import Deviation
from autoparallel.tools.parity.task import Task, make_task
from autoparallel.tools.processes import Place, Process, ProcessError, run_processes
from benchmarks.zoo import ZOO

PLANS: tuple[Preset, ...] = ("auto", "fsdp", "tensor_parallel")
MESH = (2, 2)
LIMIT = 1200
"""Seconds for one model on the clock; RWKV, a loop over tokens, takes a minute of a processor that is its own."""
RIGHT = "right"
TOLERANCES = (1e-9, 1e-5)
"""Where nothing is cast to a narrower dtype than float64, and where the model itself does that: single operators of it
then differ by what float32 rounds."""


@dataclass
class Row:
    """What is found of one model.

    Attributes:
        captured: ``RIGHT``, or what failed.
        plans: for each plan ``RIGHT``, or what failed.
        sharded: for each plan the share of operators that run sharded on some axis.
        unruled: the operators without a rule, under any plan.
        whole: parameters that ``tensor_parallel`` leaves whole though they have two dims or more.
        seconds: for everything.
    """

    captured: str = ""
    plans: dict[str, str] = field(default_factory=dict)
    sharded: dict[str, float] = field(default_factory=dict)
    unruled: dict[str, int] = field(default_factory=dict)
    whole: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def right(self) -> bool:
        return self.captured == RIGHT and all(self.plans.get(plan) == RIGHT for plan in PLANS)


def examine(name: str) -> Row:
    """Tries one model, in this process."""
    started = time.process_time()
    torch.manual_seed(0)
    made, row = ZOO[name](), Row()
    task = make_task(made.model.train(), MESH, made.args, made.loss_fn, made.kwargs, dtype=torch.float64)
    try:
        tolerance = TOLERANCES[bool(narrowing_casts(task))]
        captured = planner_of(task, "auto").capture(call_of_task(task, task.batch(1)))
        random = RandomState(task.seed, 0)
        row.captured = _verdict(capture_deviation(task, captured, task.batch(1), random, tolerance))
    except Exception as error:  # noqa: BLE001 - whatever it is, it belongs into the table
        row.captured = _failure(error)
    for plan in PLANS if row.captured == RIGHT else ():
        try:
            row.plans[plan] = _verdict(_examine_plan(replace(task, plan=plan), captured.copy(), random, tolerance, row))
        except Exception as error:  # noqa: BLE001
            row.plans[plan] = _failure(error)
    row.seconds = time.process_time() - started
    return row


def _examine(process: Process, name: str) -> Row:
    return examine(name)


def _verdict(deviation: Deviation | None) -> str:
    return RIGHT if deviation is None else f"wrong: {deviation}"


def _failure(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _examine_plan(task: Task, captured: Captured, random: RandomState, tolerance: float, row: Row) -> Deviation | None:
    batch, name = task.batch(1), str(task.plan)
    plan = planner_of(task, name).search(captured, call_of_task(task, batch))
    modes = [plan.modes(key) for key in plan.operators]
    row.sharded[name] = sum(any(m.kind == "shard" for m in ways) for ways in modes) / max(len(modes), 1)
    row.unruled |= plan.unruled
    if name == "tensor_parallel":
        row.whole = _left_whole(task, plan)
    return program_deviation(task, captured, plan, batch, random, tolerance)


def _left_whole(task: Task, plan: Plan) -> list[str]:
    shapes = {name: p.shape for name, p in task.model.named_parameters()}
    return [n for n in plan.parameters if len(shapes[n]) > 1 and all(p.kind != "S" for p in plan.at_rest(n))]


def words_of(text: str) -> str:
    """A failure in one line of a table."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    kept = [lines[0], *(line for line in lines[1:] if line.startswith("What to change"))]
    return re.sub(r'"[^"]*/([^"/]+)"', r"`\1`", " ".join(kept)).replace("|", "/")[:400]


def table(rows: Mapping[str, Row]) -> str:
    """The rows as a page of Markdown."""
    right = sum(row.right for row in rows.values())
    lines = [
        "# Models that were tried",
        "",
        f"`python -m benchmarks.models` makes this page: {len(rows)} architectures, from tiny configs of transformers "
        f"{transformers.__version__} or in plain torch {torch.__version__.partition('+')[0]}. {right} of them are "
        "right under every plan of the table.",
        "",
        "*Captured*: the captured graph against the model in eager autograd, loss, outputs and every gradient in "
        "float64. *auto*, *fsdp*, *tensor_parallel*: the program of a (2, 2) mesh against the captured graph, all "
        "ranks simulated in one process, operator by operator, forward and backward; right means within "
        f"{TOLERANCES[0]:g} ({TOLERANCES[1]:g} where a model casts to float32 by itself), and the number is the share "
        "of operators that run sharded. *Without a rule*: operators that run on whole tensors. *Whole*: how many "
        "parameters of two dims or more tensor_parallel leaves whole. Where *auto* has 0%, every way to cut so small "
        "a model is predicted to take longer than to leave it whole.",
        "",
        f"| model | captured | {' | '.join(PLANS)} | without a rule | whole |",
        f"| --- | --- | {' | '.join('---' for _ in PLANS)} | --- | --- |",
    ]
    for name, row in rows.items():
        cells = [name, "yes" if row.captured == RIGHT else "no"]
        for plan in PLANS:
            verdict = row.plans.get(plan, "")
            cells.append(f"{row.sharded[plan]:.0%}" if verdict == RIGHT else "wrong" if "wrong" in verdict else "no")
        cells += [", ".join(f"`{op}`" for op in sorted(row.unruled)), str(len(row.whole) or "")]
        lines.append(f"| {' | '.join(cells)} |")
    failures = [
        f"- **{name}**, {what}: {words_of(text)}"
        for name, row in rows.items()
        for what, text in {"capture": row.captured, **row.plans}.items()
        if text != RIGHT
    ]
    lines += ["", "## What fails, and why", "", *(failures or ["Nothing."])]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Tries the models one after the other, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="", help="names with semicolons (default: all)")
    parser.add_argument("--out", type=Path, help="the file to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    rows: dict[str, Row] = {}
    for name in options.models.split(";") if options.models else ZOO:
        try:
            [rows[name]] = run_processes([Place(name, "", 0, 1)], _examine, name, LIMIT)
        except ProcessError as error:
            failure = error.failures[0]
            rows[name] = Row(f"{failure.type}: {failure.message}")
        row = rows[name]
        print(f"{name} ({row.seconds:.0f} s): {RIGHT if row.right else row}", flush=True)
    if options.out:
        options.out.write_text(table(rows))


if __name__ == "__main__":
    main()
