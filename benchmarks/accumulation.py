"""Time of a step of eight microbatches: autoparallel against what a user would write instead.

A 4-layer GPT on two processes of one thread each.  Ours is ``model.accumulate(8, batches)``; theirs is DDP with
``no_sync()`` and FSDP2 with ``set_requires_gradient_sync``, resharding after each forward and not.  All alternate in
the same processes; the table gives medians, with what one step sends beside the times.

Ours returns the loss of the global batch, which takes an all-reduce of a number in each microbatch and so keeps the
ranks in step; theirs return each rank's own.  The lines "+ loss" give theirs that all-reduce, too.

    python benchmarks/accumulation.py [--rounds 6] [--microbatches 8]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import autoparallel
from autoparallel.plan import Plan
from autoparallel.planner.request.presets import Preset
from benchmarks.side_by_side import GPT, LAYERS, WIDTH, Comparison, Contender, launch, loss_fn, tokens, updates

ROWS = 2
WANTED = 1.0


def _ours(mesh: DeviceMesh, plan: Preset | Plan, count: int) -> tuple[Any, Callable[[], None]]:
    torch.manual_seed(0)
    batch = tokens(ROWS * mesh.size())
    model = autoparallel.compile(GPT(), mesh, loss_fn=loss_fn, plan=plan, example_inputs=batch)
    update = updates(list(model.parameters()))

    def step() -> None:
        for window in model.accumulate(count, [batch] * count):
            for ids, target in window:
                model(ids, target).backward()
            update()

    return model, step


def _sharded(mesh: DeviceMesh, gather: str) -> Plan:
    """The plan "fsdp" with its parameters gathered at other times."""
    model, _ = _ours(mesh, "fsdp", 1)
    data = json.loads(model.plan.to_json())
    for parameter in data["parameters"].values():
        parameter["gather"] = gather
    return Plan.from_json(json.dumps(data))


def _theirs(mesh: DeviceMesh, kind: str, count: int) -> Callable[[], None]:
    torch.manual_seed(0)
    model: Any = GPT()
    kind, ddp, whole = kind.removesuffix(" + loss"), kind.startswith("DDP"), kind.endswith(" + loss")
    rank = dist.get_rank()
    ids, target = (t[rank * ROWS : (rank + 1) * ROWS] for t in tokens(ROWS * mesh.size()))
    if ddp:
        model = DistributedDataParallel(model)
    else:
        keep = kind.endswith("kept")
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=not keep)
        fully_shard(model, mesh=mesh, reshard_after_forward=not keep)
    update = updates(list(model.parameters()))

    def step() -> None:
        for i in range(count):
            last = i == count - 1
            if not ddp:
                model.set_requires_gradient_sync(last)
                if kind.endswith("kept"):
                    model.set_reshard_after_backward(last)
            with nullcontext() if last or not ddp else model.no_sync():
                loss = loss_fn(model(ids), target)
                if whole:
                    dist.all_reduce(loss.detach().clone())
                (loss / count).backward()
        update()

    return step


def _run(arguments: argparse.Namespace) -> None:
    count, world = arguments.microbatches, dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    pairs: dict[str, tuple[Preset | Plan, str]] = {
        "replicated": ("data_parallel", "DDP"),
        "sharded, gathered per use": ("fsdp", "FSDP2"),
        "sharded, gathered per step": (_sharded(mesh, "per_step"), "FSDP2 kept"),
    }
    title = f"GPT {LAYERS} x {WIDTH}, {count} microbatches of {ROWS} rows a rank, {world} ranks; ms per step"
    table = Comparison(title, "parameters")
    for what, (plan, kind) in pairs.items():
        kinds = [kind, f"{kind} + loss"]
        contenders = [Contender(k, _theirs(mesh, k, count)) for k in kinds]
        table.measure(
            what, [Contender("autoparallel", _ours(mesh, plan, count)[1]), *contenders], WANTED, arguments.rounds, 1
        )
    table.print()


def main() -> None:
    """Runs the benchmark and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--microbatches", type=int, default=8)
    launch(_run, parser.parse_args(), ranks=2)


if __name__ == "__main__":
    main()
