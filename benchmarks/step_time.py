"""Time of a training step: autoparallel against what a user would pick instead.

A GPT (4 layers of width 256, sequence 128, vocabulary 2048) on two processes of one thread each.  Each pair runs the
same strategy on the same model, in the same processes, alternating; the table gives medians, with what one step sends
beside the times.  "auto" is what the search chooses for ranks that were calibrated just before, against each of them.
With ``--compiled``, ours is ``backend="inductor"`` and FSDP2 has each block compiled.

    python benchmarks/step_time.py [--rounds 12] [--steps 3] [--only data_parallel] [--layers 4]
    python benchmarks/step_time.py --compiled --layers 12
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import autoparallel
from autoparallel.planner.request.presets import Preset
from autoparallel.tools.calibration import calibrate
from benchmarks.side_by_side import GPT, LAYERS, WIDTH, Comparison, Contender, launch, loss_fn, tokens, updates

ROWS = 4
STRATEGIES: dict[Preset, tuple[str, float]] = {
    "data_parallel": ("DistributedDataParallel", 1.00),
    "fsdp": ("FSDP2 fully_shard", 0.85),
    "tensor_parallel": ("DTensor tensor parallel", 0.70),
}


def _trainer(forward: Callable[[], torch.Tensor], parameters: list[nn.Parameter]) -> Callable[[], None]:
    update = updates(parameters)

    def step() -> None:
        forward().backward()
        update()

    return step


def contenders(
    strategy: Preset, mesh: DeviceMesh, rows: int = ROWS, make: Callable[[], GPT] = GPT, compiled: bool = False
) -> list[Contender]:
    """Ours and theirs for one strategy, so many rows a rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    ids, target = tokens(rows * world)
    mine = slice(rank * rows, (rank + 1) * rows)

    torch.manual_seed(0)
    backend = "inductor" if compiled else "eager"
    ours = autoparallel.compile(make(), mesh, loss_fn=loss_fn, plan=strategy, backend=backend)
    torch.manual_seed(0)
    model = make()
    theirs: nn.Module = model
    own = mine
    if strategy == "data_parallel":
        theirs = DistributedDataParallel(model)
    elif strategy == "fsdp":
        for block in model.blocks:
            if compiled:
                block.compile()
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        own = slice(None)
        for block in model.blocks:
            parallelize_module(
                block,
                mesh,
                {
                    "attention.q": ColwiseParallel(),
                    "attention.k": ColwiseParallel(),
                    "attention.v": ColwiseParallel(),
                    "attention.out": RowwiseParallel(),
                    "up": ColwiseParallel(),
                    "down": RowwiseParallel(),
                },
            )
    return [
        Contender("autoparallel", _trainer(lambda: ours(ids, target), list(ours.parameters()))),
        Contender(
            STRATEGIES[strategy][0],
            _trainer(lambda: loss_fn(theirs(ids[own]), target[own]), list(theirs.parameters())),
        ),
    ]


def _run(arguments: argparse.Namespace) -> None:
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    layers, make = arguments.layers, partial(GPT, arguments.layers)
    title = f"GPT {layers} x {WIDTH}, {ROWS} rows a rank, {world} ranks of one thread; ms per step"
    table = Comparison(title + ", compiled" * arguments.compiled, "strategy")

    def measure(what: str, pair: list[Contender], wanted: float) -> None:
        table.measure(what, pair, wanted, arguments.rounds, arguments.steps)

    if arguments.compiled:
        measure("fsdp", contenders("fsdp", mesh, ROWS, make, True), 0.80)
    else:
        for strategy in STRATEGIES:
            if arguments.only in (None, strategy):
                measure(strategy, contenders(strategy, mesh, ROWS, make), STRATEGIES[strategy][1])
        if arguments.only in (None, "auto"):
            measure("auto", _searched(mesh, make), 0.95)
    table.print()


def _searched(mesh: DeviceMesh, make: Callable[[], GPT]) -> list[Contender]:
    """What the search chooses for these ranks, and theirs of all strategies."""
    ids, target = tokens(ROWS * mesh.size())
    hardware = calibrate(mesh, f"{mesh.size()} processes")
    torch.manual_seed(0)
    model = autoparallel.compile(make(), mesh, loss_fn=loss_fn, hardware=hardware)
    ours = Contender("autoparallel", _trainer(lambda: model(ids, target), list(model.parameters())))
    return [ours, *(contenders(strategy, mesh, ROWS, make)[1] for strategy in STRATEGIES)]


def main() -> None:
    """Runs the benchmark and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3, help="steps per contender and round")
    parser.add_argument("--only", choices=[*STRATEGIES, "auto"])
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--compiled", action="store_true", help="against FSDP2 with each block compiled")
    launch(_run, parser.parse_args(), ranks=2)


if __name__ == "__main__":
    main()
