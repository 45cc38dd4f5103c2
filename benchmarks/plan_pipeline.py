"""How long a pipeline takes to plan: Llama-3-70B on 64 H100s of 80 GB, with stages and without, side by side.

    python benchmarks/plan_pipeline.py              # 80 layers
    python benchmarks/plan_pipeline.py --layers 8   # fewer, with a limit that is as much smaller

A global batch of 256 sequences of 2048 tokens in bfloat16.  Seconds of planning are those of one thread, capture apart.
Nothing is computed and no weight exists: the model is on the meta device.  No process group.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from autoparallel.decisions.parameters import PlanError
from autoparallel.hardware import H100
from autoparallel.planner.draft import call_of, draft_captured
from autoparallel.planner.planner import Planner
from autoparallel.planner.request.request import Request
from autoparallel.report.progress import Progress
from autoparallel.text import duration
from benchmarks.plan import llama

LAYERS = 80
MESHES: tuple[tuple[tuple[str, int], ...], ...] = (
    (("pp", 4), ("dp", 2), ("tp", 8)),
    (("pp", 2), ("dp", 4), ("tp", 8)),
    (("dp", 8), ("tp", 8)),
)


class Phases(Progress):
    """Tells nobody of its phases, and keeps their CPU-seconds."""

    def __init__(self) -> None:
        super().__init__("planning", is_shown=False)
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = time.process_time()
        yield
        self.seconds[name] = time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--only", type=int, choices=range(len(MESHES)), help="the number of one mesh")
    parser.add_argument("--limit", type=float, default=80.0, help="gigabytes per device of the 80 layers")
    arguments = parser.parse_args()
    limit = arguments.limit * 1e9 * arguments.layers / LAYERS
    model, (args, kwargs) = llama(arguments.layers, 8192, 28672, 64, 8, rows=256, length=2048)
    call = call_of(args, kwargs)
    begin = time.process_time()
    captured = Planner(model, Request((("dp", 64),), H100)).capture(call)
    table = Table("mesh", "plan", "search CPU s", "predict CPU s", "step", "GB per device")
    spent = time.process_time() - begin
    table.title = f"Llama-3-70B, {arguments.layers} layers, {limit / 1e9:.0f} GB; capture {spent:.1f} s"
    for axes in MESHES if arguments.only is None else [MESHES[arguments.only]]:
        staged = axes[0][0] == "pp"
        stages = axes[0][1] if staged else 0
        request = Request(axes[1:] if staged else axes, H100, memory_limit=limit, stages=stages)
        mesh = " x ".join(f"{name} {size}" for name, size in axes)
        begin, phases = time.process_time(), Phases()
        graph = captured.copy()
        try:
            drafted = draft_captured(Planner(model, request), graph, call, phases)
        except PlanError as error:
            table.add_row(mesh, str(error), f"{time.process_time() - begin:.1f}")
            if staged:
                continue
            graph = captured.copy()
            drafted = draft_captured(Planner(model, replace(request, memory_limit=None)), graph, call, phases)
            mesh = f"{mesh}, no limit"
        predicted, pipeline = drafted.prediction, drafted.plan.pipeline
        what = f"{len(drafted.plan.recompute)} layers recomputed" if drafted.plan.recompute else ""
        if pipeline is not None:
            what = f"{pipeline.schedule}, {pipeline.microbatches} microbatches, bubble {pipeline.bubble:.0%} {what}"
        took = f"{phases.seconds['search']:.1f}", f"{phases.seconds['predict']:.1f}"
        step, memory = duration(predicted.seconds()), f"{predicted.total_memory / 1e9:.1f}"
        table.add_row(mesh, what, *took, step, memory)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
