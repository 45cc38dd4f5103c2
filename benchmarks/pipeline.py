"""Time of a pipelined training step: autoparallel against torch.distributed.pipelining written by hand.

An 8-layer GPT (width 256, sequence 128) on as many processes of one thread as stages, with the same cut into equal
numbers of layers, the same 1F1B schedule and the same microbatches, alternating in the same processes.  Then, on a GPT
with a large vocabulary, cuts planned by autoparallel against equal numbers of layers.

    python benchmarks/pipeline.py [--stages 2] [--microbatches 8] [--rounds 8] [--steps 2]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from side_by_side import GPT, Comparison, Contender, launch, loss_fn, tokens, updates
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import autoparallel

LAYERS = 8
LARGE_VOCABULARY = 16384


class HandWritten(nn.Module):
    """One stage of the GPT, as one writes it for torch's pipelining."""

    def __init__(self, model: GPT, stage: int, stages: int) -> None:
        super().__init__()
        each = LAYERS // stages
        self.blocks = model.blocks[stage * each : (stage + 1) * each]
        self.token = model.token if stage == 0 else None
        self.position = model.position if stage == 0 else None
        self.norm = model.norm if stage == stages - 1 else None
        self.head = model.head if stage == stages - 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.token is not None and self.position is not None:
            x = self.token(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.norm is not None and self.head is not None else x


def equal_cuts(stages: int) -> tuple[str, ...]:
    """Cuts between equal numbers of layers."""
    return tuple(f"blocks.{LAYERS * i // stages}.norm1/aten.layer_norm#0" for i in range(1, stages))


def ours(
    mesh: DeviceMesh, microbatches: int, rows: int, cuts: tuple[str, ...] | None, vocabulary: int = 2048
) -> tuple[Callable[[], None], autoparallel.ParallelModule]:
    """A step of autoparallel's, and the model."""
    torch.manual_seed(0)
    pipeline = autoparallel.Pipeline("1f1b", microbatches, 1, cuts)
    model = autoparallel.compile(GPT(LAYERS, vocabulary), mesh, loss_fn=loss_fn, pipeline=pipeline)
    ids, target = tokens(rows)
    update = updates(list(model.parameters()))

    def step() -> None:
        model(ids, target).backward()
        update()

    step()
    return step, model


def theirs(stages: int, microbatches: int, rows: int) -> Callable[[], None]:
    """A step of torch's."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    part = HandWritten(GPT(LAYERS), rank, stages)
    schedule = Schedule1F1B(PipelineStage(part, rank, stages, torch.device("cpu")), microbatches, loss_fn=loss_fn)
    ids, target = tokens(rows)
    update = updates(list(part.parameters()))

    def step() -> None:
        if rank == 0:
            schedule.step(ids)
        elif rank == stages - 1:
            schedule.step(target=target, losses=[])
        else:
            schedule.step()
        update()

    step()
    return step


def busy_share(step: Callable[[], None], steps: int) -> float:
    """The share of the time in which this process computes, not waits."""
    dist.barrier()
    begin, used = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    return (time.process_time() - used) / (time.perf_counter() - begin)


def _run(arguments: argparse.Namespace) -> None:
    stages, microbatches = arguments.stages, arguments.microbatches
    rows = microbatches * arguments.rows
    mesh = init_device_mesh("cpu", (stages,), mesh_dim_names=("pp",))
    title = f"GPT of {LAYERS} layers, {stages} stages, {microbatches} microbatches of {arguments.rows} rows"
    table = Comparison(title, "what")
    mine, _ = ours(mesh, microbatches, rows, equal_cuts(stages))
    pair = [Contender("ours", mine), Contender("written by hand", theirs(stages, microbatches, rows))]
    table.measure("1F1B, equal cuts", pair, 1.05, arguments.rounds, arguments.steps)
    shares = [torch.zeros(1) for _ in range(stages)]
    dist.all_gather(shares, torch.tensor([busy_share(mine, arguments.steps)]))
    waiting = 1.0 - sum(float(s) for s in shares) / stages
    formula = (stages - 1) / (microbatches + stages - 1)
    notes = [f"ranks wait for {waiting:.0%} of a step; the bubble of 1F1B is {formula:.0%} by its formula"]
    if not arguments.no_uneven:
        planned, chosen = ours(mesh, microbatches, rows, None, LARGE_VOCABULARY)
        equal, _ = ours(mesh, microbatches, rows, equal_cuts(stages), LARGE_VOCABULARY)
        pair = [Contender("planned", planned), Contender("equal layers", equal)]
        table.measure("planned cuts", pair, 1 / 1.15, arguments.rounds, arguments.steps)
        notes.append(f"planned cuts: {', '.join(chosen.plan.pipeline.cuts)}")
    table.print()
    if dist.get_rank() == 0:
        print(*notes, sep="\n")


def main() -> None:
    """Runs the benchmark and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rows", type=int, default=2, help="rows of a microbatch")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2, help="steps per contender and round")
    parser.add_argument("--no-uneven", action="store_true", help="leaves the planned cuts out")
    arguments = parser.parse_args()
    launch(_run, arguments, ranks=arguments.stages)


if __name__ == "__main__":
    main()
