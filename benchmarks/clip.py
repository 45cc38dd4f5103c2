"""Time of gradient clipping: ours, ``torch.nn.utils.clip_grad_norm_``, FSDP2, and the least that it can take.

10, 100 and 1000 parameters of mixed layouts on a (2, 2) mesh of four processes, first call and warm. Torch clips the
same ``DTensor``s, and those of the same model under FSDP2 on a mesh of four. The floor is one ``_foreach_norm`` and one
``_foreach_mul_`` over the same local bytes, without and with an all-reduce of two numbers. Beside the times of a rank
stands the processor time of its main thread, which does not count what it waits for the others.

    python benchmarks/clip.py [--rounds 20] [--size 64]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import autoparallel
from benchmarks.side_by_side import launch

CONTENDERS = ("ours", "DTensor", "FSDP2", "floor", "floor + all-reduce")
LIMIT = 1e9  # the work is the same whether it bites


class Layers(nn.Module):
    """Many square linears, half of them with a bias; each parameter counts as one."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.randn(size) * 0.1 + 1) for _ in range(count // 2))
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(size, size) / size**0.5) for _ in range(count // 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale, weight in zip(self.scales, self.weights, strict=True):
            x = torch.tanh(nn.functional.linear(x * scale, weight))
        return x.square().mean()


def _milliseconds(function: Callable[[], object]) -> tuple[float, float]:
    """Time on the clock, and of this thread on a processor."""
    dist.barrier()
    begin, own = time.perf_counter(), time.thread_time()
    function()
    return (time.perf_counter() - begin) * 1e3, (time.thread_time() - own) * 1e3


def _floor(grads: list[torch.Tensor]) -> None:
    torch.stack(torch._foreach_norm(grads)).norm()
    torch._foreach_mul_(grads, 1.0)


def _floor_and_reduce(grads: list[torch.Tensor], two: torch.Tensor) -> None:
    torch.stack(torch._foreach_norm(grads)).norm()
    dist.all_reduce(two)
    torch._foreach_mul_(grads, 1.0)


def _torchs(parameters: list[nn.Parameter]) -> object:
    norm = nn.utils.clip_grad_norm_(parameters, LIMIT)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _run(arguments: argparse.Namespace) -> None:
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    flat = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    times = Table(title=f"clip_grad_norm_, {world} ranks of one thread; ms (of those on a processor)")
    for column in ("parameters", "", *CONTENDERS, "/ DTensor", "/ FSDP2", "/ floor", "/ floor + all-reduce"):
        times.add_column(column, justify="right")
    for count in arguments.counts:
        torch.manual_seed(0)
        x = torch.randn(8, arguments.size)
        model = autoparallel.compile(Layers(count, arguments.size), mesh, plan="tensor_parallel")
        model(x).backward()
        torch.manual_seed(0)
        sharded: nn.Module = Layers(count, arguments.size)
        fully_shard(sharded, mesh=flat)
        sharded(x).backward()
        parameters = list(model.parameters())
        locals_ = [p.grad.to_local() for p in parameters if isinstance(p.grad, DTensor)]
        two = torch.zeros(2, dtype=torch.float64)
        actions: dict[str, Callable[[], object]] = {
            "ours": partial(model.clip_grad_norm_, LIMIT),
            "DTensor": partial(_torchs, parameters),
            "FSDP2": partial(_torchs, list(sharded.parameters())),
            "floor": partial(_floor, locals_),
            "floor + all-reduce": partial(_floor_and_reduce, locals_, two),
        }
        first = {name: [_milliseconds(action)] for name, action in actions.items()}
        sent = {}
        for name in CONTENDERS[:3]:
            with autoparallel.count_traffic() as traffic:
                actions[name]()
            sent[name] = traffic.total_collectives
        warm: dict[str, list[tuple[float, float]]] = {name: [] for name in actions}
        for _ in range(arguments.rounds):
            for name, action in actions.items():
                warm[name].append(_milliseconds(action))
        for title, found in (("first", first), ("warm", warm)):
            clock, own = ({n: statistics.median(t[i] for t in ts) for n, ts in found.items()} for i in (0, 1))
            row = [f"{clock[name]:.2f} ({own[name]:.2f})" for name in CONTENDERS]
            others = [f"{clock['ours'] / clock[n]:.2f}x ({own['ours'] / own[n]:.2f}x)" for n in CONTENDERS[1:]]
            times.add_row(str(count), title, *row, *others)
        times.add_row("", "all-reduces", *(str(sent.get(name, "")) for name in CONTENDERS))
    if dist.get_rank() == 0:
        Console(width=200).print(times)


def main() -> None:
    """Runs the benchmark and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--counts", type=int, nargs="+", default=[10, 100, 1000])
    arguments = parser.parse_args()
    launch(_run, arguments, 4)


if __name__ == "__main__":
    main()
