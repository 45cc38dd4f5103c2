"""How long a new user waits: for the first step, and for a plan of the command line; with a cache and without one.

The first step of a GPT (width 256, sequence 128, vocabulary 2048) on two processes of one thread, from ``compile()``
(``fully_shard`` of each block) to the end of the first ``optimizer.step()``, against FSDP2; every measurement is a
launch of its own, ours and FSDP2's alternate, and the least seconds of the first rank on a processor count.  Then
``python -m autoparallel plan`` for Llama-3-8B on 8 x 8 H100, start to finish.  "lost" stands where a first step takes
more than 3 times FSDP2's, 1.5 times with a cache that an earlier run has filled, and a plan more than 15 seconds, 3
with a cache.

    python benchmarks/first_call.py [--layers 12] [--rounds 4]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import autoparallel
from benchmarks.side_by_side import GPT, launch, loss_fn, tokens

ROWS = 4
LLAMA_3_8B: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
}  # fmt: skip


def _run(arguments: argparse.Namespace) -> None:
    """The first step of one contender; writes what the first rank spent."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    plain, (ids, target) = GPT(arguments.layers), tokens(ROWS * ranks)
    dist.barrier()
    spent = time.process_time()
    if arguments.cache is None:
        for block in plain.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(plain, mesh=mesh)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True)
        rows = slice(rank * ROWS, (rank + 1) * ROWS)
        loss_fn(plain(ids[rows]), target[rows]).backward()
    else:
        model = autoparallel.compile(plain, mesh, loss_fn=loss_fn, cache=arguments.cache)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        model(ids, target).backward()
    optimizer.step()
    if rank == 0:
        Path(arguments.out).write_text(json.dumps(time.process_time() - spent))


def _first_step(layers: int, cache: str | None) -> float:
    """Seconds on a processor of a first step of ours, or without a cache's folder of FSDP2's."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "spent.json")
        launch(_run, argparse.Namespace(layers=layers, cache=cache, out=str(out)), 2)
        return float(json.loads(out.read_text()))


def _plan(folder: str, cached: bool) -> float:
    """Seconds on a processor of the command line's plan."""
    command = [sys.executable, "-m", "autoparallel", "plan", "--model", folder, "--mesh", "8,8", "--batch", "64"]
    options = ["--seq", "2048", "--cache", f"{folder}/cache"] if cached else ["--seq", "2048"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([*command, *options], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Runs the benchmark and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=4)
    arguments = parser.parse_args()
    steps: dict[str, list[float]] = {"cold": [], "warm": [], "FSDP2": []}
    with tempfile.TemporaryDirectory() as folder:
        for i in range(arguments.rounds):
            cache = f"{folder}/{i}"
            steps["cold"].append(_first_step(arguments.layers, cache))
            steps["warm"].append(_first_step(arguments.layers, cache))
            steps["FSDP2"].append(_first_step(arguments.layers, None))
        Path(folder, "config.json").write_text(json.dumps(LLAMA_3_8B))
        plans = {"cold": _plan(folder, cached=False), "to be cached": _plan(folder, cached=True)}
        plans["warm"] = _plan(folder, cached=True)
    table = Table(title="until the first step, and until a plan; s on a processor")
    for column in ("", "seconds", "instead", "ours / instead", "wanted", " "):
        table.add_column(column, justify="right")
    theirs = min(steps["FSDP2"])
    for name, wanted in {"cold": 3.0, "warm": 1.5}.items():
        ours = min(steps[name])
        ratio = ours / theirs
        cells = f"{ours:.2f}", f"FSDP2 {theirs:.2f}", f"{ratio:.2f}x", f"{wanted}x", "lost" if ratio > wanted else ""
        table.add_row(f"first step, {name}", *cells)
    for (name, seconds), limit in zip(plans.items(), (15.0, None, 3.0), strict=True):
        lost = "lost" if limit is not None and seconds > limit else ""
        table.add_row(f"plan, {name}", f"{seconds:.1f}", "", "", f"{limit:.0f} s" if limit is not None else "", lost)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
