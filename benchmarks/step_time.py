"""Time of a training step: autoparallel against what a user would pick instead.

A 4-layer GPT (width 256, sequence 128, vocabulary 2048) on two processes of one thread each.  Each pair runs the same
strategy on the same model, in the same processes, alternating; the table gives medians, with what one step sends
beside the times.

    python benchmarks/step_time.py [--rounds 12] [--steps 3] [--only data_parallel]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import autoparallel
from autoparallel.planner.request.presets import Preset
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


def contenders(strategy: Preset, mesh: DeviceMesh, rows: int = ROWS, make: Callable[[], GPT] = GPT) -> list[Contender]:
    """Ours and theirs for one strategy, so many rows a rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    ids, target = tokens(rows * world)
    mine = slice(rank * rows, (rank + 1) * rows)

    torch.manual_seed(0)
    ours = autoparallel.compile(make(), mesh, loss_fn=loss_fn, plan=strategy)
    torch.manual_seed(0)
    model = make()
    theirs: nn.Module = model
    own = mine
    if strategy == "data_parallel":
        theirs = DistributedDataParallel(model)
    elif strategy == "fsdp":
        for block in model.blocks:
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
    title = f"GPT {LAYERS} x {WIDTH}, {ROWS} rows a rank, {world} ranks of one thread; ms per step"
    table = Comparison(title, "strategy")
    for strategy in [arguments.only] if arguments.only else STRATEGIES:
        pair = contenders(strategy, mesh)
        table.measure(strategy, pair, STRATEGIES[strategy][1], arguments.rounds, arguments.steps)
    table.print()


def main() -> None:
    """Runs the benchmark and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3, help="steps per contender and round")
    parser.add_argument("--only", choices=list(STRATEGIES))
    launch(_run, parser.parse_args(), ranks=2)


if __name__ == "__main__":
    main()
