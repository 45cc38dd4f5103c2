"""The first compiled step: how long it takes as a model gets deeper, and the memory of the steps that follow.

A GPT (width 256, sequence 128, vocabulary 2048) on two processes of one thread, with as many layers as asked for:
``backend="inductor"`` under the preset "fsdp", which gathers parameters for each use, against FSDP2 with each block
compiled. Every contender is a launch of its own, whose Inductor caches are empty and which compiles in its own
processes. A first step is all from ``compile()`` (``fully_shard``) to the end of the first ``optimizer.step()``:
seconds on the clock, and in brackets those of both ranks, which share the caches, and of the compilers that they start
on a processor, which a busy machine changes less. "lost" stands where ours takes more than 1.1 times its seconds on a
processor for the fewest layers, more than 1.2 times FSDP2's, or more than 1.05 times the memory of ``backend="eager"``.

    python benchmarks/first_step.py [--layers 4 12 32] [--contenders ours FSDP2 eager]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.planner_accuracy import Trial
from benchmarks.side_by_side import GPT, launch, loss_fn, tokens

ROWS = 4
CONTENDERS = ("ours", "FSDP2", "eager")


def _processor() -> float:
    """Seconds of this process and of those that it waited for."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def _fsdp2(layers: int, mesh: Any) -> None:
    """The first step of FSDP2 with each block compiled."""
    rank, rows = dist.get_rank(), slice(dist.get_rank() * ROWS, (dist.get_rank() + 1) * ROWS)
    torch.manual_seed(rank)
    model, (ids, target) = GPT(layers), tokens(ROWS * dist.get_world_size())
    for block in model.blocks:
        block.compile()
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    loss_fn(model(ids[rows]), target[rows]).backward()
    optimizer.step()


def _make(layers: int) -> Any:
    return GPT(layers), tokens(ROWS * dist.get_world_size()), loss_fn


def _run(arguments: argparse.Namespace) -> None:
    """One contender; writes what the first rank saw."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    dist.barrier()
    began, spent, peak = time.perf_counter(), _processor(), 0
    if arguments.contender == "FSDP2":
        _fsdp2(arguments.depth, mesh)
    else:
        backend = "eager" if arguments.contender == "eager" else "inductor"
        trial = Trial(partial(_make, arguments.depth), mesh, plan="fsdp", backend=backend)
        trial.step()
    all_spent = torch.tensor(_processor() - spent)
    dist.all_reduce(all_spent)
    seen = {"clock": time.perf_counter() - began, "processor": all_spent.item()}
    if arguments.contender != "FSDP2":
        peak = trial.peak()
    if dist.get_rank() == 0:
        Path(arguments.out).write_text(json.dumps(seen | {"peak": peak}))


def _measure(contender: str, depth: int) -> dict[str, float]:
    """Launches one contender with empty caches."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        out = os.path.join(folder, "seen.json")
        launch(_run, argparse.Namespace(contender=contender, depth=depth, out=out), 2)
        seen: dict[str, float] = json.loads(Path(out).read_text())
    return seen


def main() -> None:
    """Runs the benchmark and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 12, 32])
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    arguments = parser.parse_args()
    table = Table(title="first compiled step, 2 gloo ranks of one thread; s (of those on a processor)")
    for column in ("layers", *CONTENDERS, "/ fewest layers", "/ FSDP2", "peak MB", "eager's", "/ eager", ""):
        table.add_column(column, justify="right")
    first: dict[str, float] = {}
    for depth in arguments.layers:
        found = {contender: _measure(contender, depth) for contender in arguments.contenders}
        ours = found.get("ours")
        first = first or (ours or {})
        ratios = {
            "/ fewest layers": (ours and ours["processor"] / first["processor"], 1.1),
            "/ FSDP2": (ours and "FSDP2" in found and ours["processor"] / found["FSDP2"]["processor"], 1.2),
            "/ eager": (ours and "eager" in found and ours["peak"] / found["eager"]["peak"], 1.05),
        }
        cells = {c: f"{seen['clock']:.0f} ({seen['processor']:.0f})" for c, seen in found.items()}
        cells |= {name: f"{ratio:.2f}x" for name, (ratio, _) in ratios.items() if ratio}
        peaks = {"peak MB": "ours", "eager's": "eager"}
        cells |= {name: f"{found[c]['peak'] / 1e6:.1f}" for name, c in peaks.items() if c in found}
        cells["layers"] = str(depth)
        cells[""] = "lost" if any(ratio and ratio > wanted for ratio, wanted in ratios.values()) else ""
        table.add_row(*(cells.get(str(column.header), "") for column in table.columns))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
