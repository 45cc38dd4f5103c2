"""Time of a pipelined training step: autoparallel against torch.distributed.pipelining written by hand.

An 8-layer GPT (width 256, sequence 128) on as many processes of one thread as stages, with the same cut into equal
numbers of layers, the same 1F1B schedule and the same microbatches, alternating in the same processes.  Then, on the
same GPT with a vocabulary of 16384, whose head costs as much as six of its layers, cuts planned by autoparallel for
what this machine was just measured to do, against equal numbers of layers.

Ranks that share a core cannot wait for each other: what one leaves, the other takes, and no cut is faster than another.
So the time that each rank computes is measured, too, and played through the schedule: what a step takes where each rank
has a core to itself.

    python benchmarks/pipeline.py [--stages 2] [--microbatches 8] [--rounds 6] [--steps 1]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import autoparallel
from autoparallel.hardware import Profile
from autoparallel.pipeline.schedules import FORWARD, Action, Passing, actions_of, play
from autoparallel.tools.calibration import calibrate
from benchmarks.side_by_side import GPT, Comparison, Contender, launch, loss_fn, tokens, updates

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
    mesh: DeviceMesh,
    microbatches: int,
    rows: int,
    cuts: tuple[str, ...] | None,
    vocabulary: int = 2048,
    hardware: Profile | None = None,
) -> tuple[Callable[[], None], autoparallel.ParallelModule]:
    """A step of autoparallel's, and the model."""
    torch.manual_seed(0)
    pipeline = autoparallel.Pipeline("1f1b", microbatches, 1, cuts)
    model = autoparallel.compile(GPT(LAYERS, vocabulary), mesh, loss_fn=loss_fn, pipeline=pipeline, hardware=hardware)
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


class Watched:
    """A way to train that notes how long each of its steps takes on this rank.

    Attributes:
        step: a step.
        times: of each step the seconds on the clock and those on a processor, of all threads together.
    """

    def __init__(self, step: Callable[[], None]) -> None:
        self.step = step
        self.times: list[tuple[float, float]] = []

    def __call__(self) -> None:
        begin, own = time.perf_counter(), time.process_time()
        self.step()
        self.times.append((time.perf_counter() - begin, time.process_time() - own))

    def medians(self) -> tuple[float, list[float]]:
        """Seconds of a step on the clock, and those in which each rank computes."""
        clock, own = (statistics.median(column) for column in zip(*self.times, strict=True))
        ranks = [torch.zeros(1, dtype=torch.float64) for _ in range(dist.get_world_size())]
        dist.all_gather(ranks, torch.tensor([own], dtype=torch.float64))
        return clock, [float(rank) for rank in ranks]


def played(seconds: list[float], microbatches: int) -> tuple[float, float]:
    """The time of a step of 1F1B whose ranks compute so long, a core for each of them, and the share in which they
    wait; a backward takes twice its forward."""
    stages = len(seconds)

    def duration(action: Action) -> float:
        return seconds[action.stage] / microbatches * (1 if action.kind == FORWARD else 2) / 3

    passings = [Passing(i, i, i + 1, True) for i in range(stages - 1)]
    timeline = play(actions_of("1f1b", stages, stages, microbatches), lambda stage: stage, passings, duration)
    return timeline.seconds, timeline.bubble


def _run(arguments: argparse.Namespace) -> None:
    stages, microbatches = arguments.stages, arguments.microbatches
    rows, rounds, steps = microbatches * arguments.rows, arguments.rounds, arguments.steps
    mesh = init_device_mesh("cpu", (stages,), mesh_dim_names=("pp",))
    title = f"GPT of {LAYERS} layers, {stages} stages, {microbatches} microbatches of {arguments.rows} rows"
    table = Comparison(title, "what")
    notes = [f"{len(os.sched_getaffinity(0))} cores for {stages} ranks"]
    if not arguments.no_even:
        mine = Watched(ours(mesh, microbatches, rows, equal_cuts(stages))[0])
        by_hand = Watched(theirs(stages, microbatches, rows))
        table.measure(
            "1F1B, equal cuts", [Contender("ours", mine), Contender("written by hand", by_hand)], 1.0, rounds, steps
        )
        whole, used = mine.medians()
        alone, bubble = played(used, microbatches)
        formula = (stages - 1) / (microbatches + stages - 1)
        notes += [
            f"the bubble of 1F1B: {formula:.0%} by its formula, for stages that are alike; {bubble:.0%} by what the "
            "ranks compute, played through",
            f"a step of ours takes {alone * 1e3:.0f} ms with a core for each rank, one written by hand "
            f"{played(by_hand.medians()[1], microbatches)[0] * 1e3:.0f} ms",
            f"here ranks wait for {1 - sum(used) / stages / whole:.0%} of a step of ours",
        ]
    if not arguments.no_uneven:
        hardware = calibrate(mesh)
        planned, chosen = ours(mesh, microbatches, rows, None, LARGE_VOCABULARY, hardware)
        equal, _ = ours(mesh, microbatches, rows, equal_cuts(stages), LARGE_VOCABULARY)
        pair = [Watched(planned), Watched(equal)]
        contenders = [Contender("planned", pair[0]), Contender("equal layers", pair[1])]
        table.measure("planned cuts", contenders, 1 / 1.15, rounds, steps)
        (ours_alone, bubble), (equal_alone, _) = (played(step.medians()[1], microbatches) for step in pair)
        assert chosen.plan.pipeline is not None
        notes += [
            f"planned cuts: {', '.join(chosen.plan.pipeline.cuts)}",
            f"with a core for each rank, a step takes {ours_alone * 1e3:.0f} ms planned, ranks wait for {bubble:.0%} "
            f"of it; with equal layers {equal_alone * 1e3:.0f} ms, "
            f"{equal_alone / ours_alone:.2f}x as long (wanted 1.15x)",
        ]
    table.print()
    if dist.get_rank() == 0:
        print(*notes, sep="\n")


def main() -> None:
    """Runs the benchmark and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rows", type=int, default=2, help="rows of a microbatch")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=1, help="steps per contender and round")
    parser.add_argument("--no-even", action="store_true", help="leaves the comparison with torch's out")
    parser.add_argument("--no-uneven", action="store_true", help="leaves the planned cuts out")
    arguments = parser.parse_args()
    launch(_run, arguments, ranks=arguments.stages)


if __name__ == "__main__":
    main()
