"""Time of a training step: autoparallel against what a user would pick instead.

A 4-layer GPT (width 256, sequence 128, vocabulary 2048) on two processes of one thread each.  Each pair runs the same
strategy on the same model, in the same processes, alternating; the table gives medians, with what one step sends
beside the times.

    python benchmarks/step_time.py [--rounds 12] [--steps 3] [--only data_parallel]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import autoparallel

WIDTH, HEADS, LAYERS, SEQUENCE, VOCABULARY, ROWS = 256, 8, 4, 128, 2048, 4
STRATEGIES = {
    "data_parallel": ("DistributedDataParallel", 1.10),
    "fsdp": ("FSDP2 fully_shard", 1.00),
    "tensor_parallel": ("DTensor tensor parallel", 0.80),
}


class Attention(nn.Module):
    """Causal self-attention; the number of local heads follows from the projections, so that DTensor can cut it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = (f(x).view(rows, length, -1, WIDTH // HEADS).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(rows, length, -1))


class Block(nn.Module):
    """Attention and a GELU MLP, each behind a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """The benchmark's model."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


@dataclass
class Contender:
    """One way to train the model: a function that runs a step on the global batch."""

    name: str
    step: Callable[[], None]


def _trainer(forward: Callable[[], torch.Tensor], parameters: list[nn.Parameter]) -> Callable[[], None]:
    # Hand-written tensor parallelism leaves plain parameters beside DTensors, which torch cannot update in one call.
    kinds = [[p for p in parameters if isinstance(p, DTensor) is sharded] for sharded in (True, False)]
    optimizers = [torch.optim.AdamW(kind, lr=1e-3, fused=True) for kind in kinds if kind]

    def step() -> None:
        forward().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


def contenders(strategy: str, mesh: DeviceMesh) -> list[Contender]:
    """Ours and theirs for one strategy."""
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    ids, target = torch.randint(0, VOCABULARY, (2, ROWS * world, SEQUENCE), generator=generator)
    mine = slice(rank * ROWS, (rank + 1) * ROWS)

    torch.manual_seed(0)
    ours = autoparallel.compile(GPT(), mesh, loss_fn=loss_fn, plan=strategy)
    torch.manual_seed(0)
    model = GPT()
    theirs: nn.Module = model
    rows = mine
    if strategy == "data_parallel":
        theirs = DistributedDataParallel(model)
    elif strategy == "fsdp":
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        rows = slice(None)
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
            _trainer(lambda: loss_fn(theirs(ids[rows]), target[rows]), list(theirs.parameters())),
        ),
    ]


def _run(rank: int, world: int, store: str, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    table = Table(title=f"GPT {LAYERS} x {WIDTH}, {ROWS} rows a rank, {world} ranks of one thread; ms per step")
    for column in ("strategy", "autoparallel", "instead", "ms", "ratio", "wanted", "ours sends", "theirs sends"):
        table.add_column(column, justify="left" if column in ("strategy", "instead") else "right")
    for strategy in [arguments.only] if arguments.only else STRATEGIES:
        pair = contenders(strategy, mesh)
        sent = []
        for contender in pair:
            contender.step()
            with autoparallel.count_traffic() as traffic:
                contender.step()
            sent.append(f"{traffic.total_collectives} / {traffic.total_bytes / 1e6:.1f} MB")
        times: dict[str, list[float]] = {c.name: [] for c in pair}
        for _ in range(arguments.rounds):
            for contender in pair:
                dist.barrier()
                begin = time.perf_counter()
                for _ in range(arguments.steps):
                    contender.step()
                times[contender.name].append((time.perf_counter() - begin) / arguments.steps * 1e3)
        ours, theirs = (statistics.median(times[c.name]) for c in pair)
        name, wanted = STRATEGIES[strategy]
        verdict = f"{ours / theirs:.2f}x" + (" (lost)" if ours / theirs > wanted else "")
        table.add_row(strategy, f"{ours:.0f}", name, f"{theirs:.0f}", verdict, f"{wanted:.2f}x", *sent)
    if rank == 0:
        Console(width=140).print(table)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Runs the benchmark and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3, help="steps per contender and round")
    parser.add_argument("--only", choices=list(STRATEGIES))
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_run, (2, os.path.join(folder, "store"), arguments), nprocs=2)


if __name__ == "__main__":
    main()
