"""What a training step costs beside arithmetic: a GPT of many layers whose tensors are all tiny, against FSDP2 and DDP.

12 layers of width 16 and 8 tokens, a row a rank, on two processes of one thread, with fused AdamW.
Contenders alternate; medians of times on the clock, and of the main thread's time on a processor, which a busy machine
changes less and by which the ratio is judged.

    python benchmarks/host_time.py [--rounds 100] [--layers 12]
"""

from __future__ import annotations

import argparse

import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import side_by_side
from benchmarks.side_by_side import GPT, alternate, launch
from benchmarks.step_time import contenders

WIDTH, HEADS, SEQUENCE, VOCABULARY = 16, 2, 8, 32
WANTED = 0.7


def _run(arguments: argparse.Namespace) -> None:
    for name, value in (("WIDTH", WIDTH), ("HEADS", HEADS), ("SEQUENCE", SEQUENCE), ("VOCABULARY", VOCABULARY)):
        setattr(side_by_side, name, value)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    table = Table(title=f"{arguments.layers} layers of tiny tensors, two ranks of one thread; ms per step")
    for column in ("", "ours", "on a processor", "instead", "", "on a processor", "ratio of these", "wanted"):
        table.add_column(column, justify="left" if column in ("", "instead") else "right")
    for strategy in ("fsdp", "data_parallel"):
        pair = contenders(strategy, mesh, rows=1, make=lambda: GPT(arguments.layers, VOCABULARY))
        ours, theirs = alternate({c.name: c.step for c in pair}, arguments.rounds, first=5).values()
        ratio = ours[1] / theirs[1]
        verdict = f"{ratio:.2f}x" + " (lost)" * (ratio > WANTED)
        cells = [f"{x:.1f}" for x in (*ours, *theirs)]
        table.add_row(strategy, *cells[:2], pair[1].name, *cells[2:], verdict, f"{WANTED:.2f}x")
    if dist.get_rank() == 0:
        Console(width=140).print(table)


def main() -> None:
    """Runs the benchmark and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--layers", type=int, default=12)
    launch(_run, parser.parse_args(), ranks=2)


if __name__ == "__main__":
    main()
