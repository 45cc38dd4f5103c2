"""Time of gradient clipping: autoparallel against ``torch.nn.utils.clip_grad_norm_`` on the same ``DTensor``s.

10, 100 and 1000 parameters of mixed layouts on a (2, 2) mesh of four processes, first call and warm, beside the floor:
one ``_foreach_norm`` and one ``_foreach_mul_`` over the same local bytes.

    python benchmarks/clip.py [--rounds 20] [--size 64]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autoparallel


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


def _milliseconds(function: Callable[[], object]) -> float:
    dist.barrier()
    begin = time.perf_counter()
    function()
    return (time.perf_counter() - begin) * 1e3


def _floor(grads: list[torch.Tensor]) -> None:
    torch.stack(torch._foreach_norm(grads)).norm()
    torch._foreach_mul_(grads, 1.0)


def _run(rank: int, world: int, store: str, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    table = Table(title=f"clip_grad_norm_ on (2, 2), {world} ranks of one thread; ms")
    columns = "parameters", "first: ours", "torch", "ratio", "warm: ours", "torch", "ratio", "floor", "collectives"
    for column in columns:
        table.add_column(column, justify="right")
    for count in arguments.counts:
        torch.manual_seed(0)
        x = torch.randn(8, arguments.size)
        model = autoparallel.compile(Layers(count, arguments.size), mesh, plan="tensor_parallel")
        model(x).backward()
        parameters = list(model.parameters())
        locals_ = [p.grad.to_local() for p in parameters if isinstance(p.grad, DTensor)]

        def ours(model: autoparallel.ParallelModule = model) -> object:
            return model.clip_grad_norm_(1e9)

        def theirs(parameters: list[nn.Parameter] = parameters) -> object:
            norm = nn.utils.clip_grad_norm_(parameters, 1e9)
            return norm.full_tensor() if isinstance(norm, DTensor) else norm

        first = _milliseconds(ours), _milliseconds(theirs)
        with autoparallel.count_traffic() as ours_sent:
            ours()
        with autoparallel.count_traffic() as theirs_sent:
            theirs()
        warm: dict[str, list[float]] = {"ours": [], "theirs": [], "floor": []}
        for _ in range(arguments.rounds):
            warm["ours"].append(_milliseconds(ours))
            warm["theirs"].append(_milliseconds(theirs))
            warm["floor"].append(_milliseconds(lambda grads=locals_: _floor(grads)))
        a, b, floor = (statistics.median(warm[k]) for k in ("ours", "theirs", "floor"))
        table.add_row(
            str(count),
            f"{first[0]:.1f}",
            f"{first[1]:.1f}",
            f"{first[0] / first[1]:.3f}x",
            f"{a:.2f}",
            f"{b:.2f}",
            f"{a / b:.2f}x",
            f"{floor:.2f}",
            f"{ours_sent.total_collectives} / {theirs_sent.total_collectives}",
        )
    if rank == 0:
        Console(width=140).print(table)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Runs the benchmark and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--counts", type=int, nargs="+", default=[10, 100, 1000])
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_run, (4, os.path.join(folder, "store"), arguments), nprocs=4)


if __name__ == "__main__":
    main()
