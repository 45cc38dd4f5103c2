"""What the benchmarks share: a GPT, and running several ways to train it side by side, in the same processes."""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn

import autoparallel
from autoparallel.tools.processes import FileStore

WIDTH, HEADS, LAYERS, SEQUENCE, VOCABULARY = 256, 8, 4, 128, 2048


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

    def __init__(self, layers: int = LAYERS, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def tokens(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A global batch of so many rows: token ids and targets, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    ids, target = torch.randint(0, VOCABULARY, (2, rows, SEQUENCE), generator=generator)
    return ids, target


@dataclass
class Contender:
    """One way to train the model: a function that runs a step on the global batch."""

    name: str
    step: Callable[[], None]

    def sends(self) -> str:
        """Collectives and bytes of a step, after one that is not counted."""
        self.step()
        with autoparallel.count_traffic() as traffic:
            self.step()
        return f"{traffic.total_collectives} / {traffic.total_bytes / 1e6:.1f} MB"


def updates(parameters: Sequence[nn.Parameter]) -> Callable[[], None]:
    """A step of AdamW on the gradients of some parameters."""
    # Hand-written tensor parallelism leaves plain parameters beside DTensors, which torch cannot update in one call.
    kinds = [[p for p in parameters if isinstance(p, DTensor) is sharded] for sharded in (True, False)]
    optimizers = [torch.optim.AdamW(kind, lr=1e-3, fused=True) for kind in kinds if kind]

    def update() -> None:
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return update


def medians(contenders: Sequence[Contender], rounds: int, steps: int) -> list[float]:
    """Milliseconds of a step of each: medians over rounds in which they alternate."""
    return [statistics.median(times) for times in alternating(contenders, rounds, steps)]


def alternating(contenders: Sequence[Contender], rounds: int, steps: int) -> list[list[float]]:
    """Milliseconds of a step of each, in every round, in another order: what runs behind a step that has used much
    memory is slower. All ranks draw the same orders."""
    times: dict[str, list[float]] = {c.name: [] for c in contenders}
    orders = random.Random(0)
    for _ in range(rounds):
        for contender in orders.sample(contenders, len(contenders)):
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(steps):
                contender.step()
            times[contender.name].append((time.perf_counter() - begin) / steps * 1e3)
    return [times[c.name] for c in contenders]


def alternate(actions: dict[str, Callable[[], object]], rounds: int, first: int = 1) -> dict[str, tuple[float, float]]:
    """Milliseconds of each on the clock and on a processor: medians over rounds, after some first ones."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in actions}
    for i in range(first + rounds):
        for name, action in actions.items():
            dist.barrier()
            begin, own = time.perf_counter(), time.thread_time()
            action()
            if i >= first:
                times[name].append(((time.perf_counter() - begin) * 1e3, (time.thread_time() - own) * 1e3))
    clock, processor = ({n: statistics.median(t[k] for t in ts) for n, ts in times.items()} for k in (0, 1))
    return {name: (clock[name], processor[name]) for name in times}


class Comparison:
    """A table of ours against theirs, a row for each pair."""

    def __init__(self, title: str, what: str) -> None:
        self._table = Table(title=title)
        for column in (what, "autoparallel", "instead", "ms", "ratio", "wanted", "ours sends", "theirs sends"):
            self._table.add_column(column, justify="left" if column in (what, "instead") else "right")

    def measure(self, what: str, contenders: Sequence[Contender], wanted: float, rounds: int, steps: int) -> None:
        """Lets ours, the first, and theirs alternate and adds a row for each of theirs; ``wanted`` is the ratio to
        reach."""
        sent = [contender.sends() for contender in contenders]
        ours, *others = medians(contenders, rounds, steps)
        for contender, theirs, sends in zip(contenders[1:], others, sent[1:], strict=True):
            verdict = f"{ours / theirs:.2f}x" + (" (lost)" if ours / theirs > wanted else "")
            cells = (f"{ours:.0f}", contender.name, f"{theirs:.0f}", verdict, f"{wanted:.2f}x", sent[0], sends)
            self._table.add_row(what, *cells)

    def print(self) -> None:
        """Prints the table, once for all ranks."""
        if dist.get_rank() == 0:
            Console(width=140).print(self._table)


def launch(run: Callable[[argparse.Namespace], None], arguments: argparse.Namespace, ranks: int) -> None:
    """Calls ``run`` in so many processes of one thread, joined by gloo."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        spawn(_start, (ranks, os.path.join(folder, "store"), run, arguments), nprocs=ranks)


def _start(rank: int, world: int, store: str, run: Callable[..., None], arguments: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=FileStore(store, world), rank=rank, world_size=world)
    run(arguments)
    dist.barrier()
    dist.destroy_process_group()
