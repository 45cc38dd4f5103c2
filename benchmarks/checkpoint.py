"""Time of a checkpoint: what it costs the training loop, and what its digests cost it.

A pile of linears with AdamW's moments on two processes.  The time that digests take is counted while they are taken;
beside a save stands one of ``torch.distributed.checkpoint``, which takes none.

    python benchmarks/checkpoint.py [--megabytes 600] [--rounds 5] [--path /tmp]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh

import autoparallel
from autoparallel.checkpoint import folder
from benchmarks.side_by_side import launch

LAYERS = 12
PAIRS = (("asynchronous, blocked", "asynchronous, in all"), ("its digests", "save"))


def _seconds(action: Callable[[], Any]) -> float:
    os.sync()  # what others have written is on the disk, and nobody waits for that here
    dist.barrier()
    begin = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - begin


def _run(options: argparse.Namespace) -> None:
    world = dist.get_world_size()
    width = round((options.megabytes * 1e6 / 12 / LAYERS) ** 0.5)  # a parameter and two moments of 4 bytes
    model = autoparallel.compile(
        nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS))),
        init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)),
        plan="fsdp", loss_fn=nn.functional.mse_loss, example_inputs=(torch.ones(4, width), torch.ones(4, width)),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, width), torch.ones(4, width)).backward()
    optimizer.step()
    path = Path(options.path) / "benchmark-checkpoints"
    times: dict[str, list[float]] = {}
    take = folder._digest

    def note(name: str, action: Callable[[], Any]) -> Any:
        made: list[Any] = []
        times.setdefault(name, []).append(_seconds(lambda: made.append(action())))
        return made[0]

    save = partial(model.save, path, keep=1, optimizer=optimizer)
    for _ in range(options.rounds + 1):
        digests: list[float] = []

        def timed(content: Any, taken: list[float] = digests) -> str:
            begin = time.perf_counter()
            digest = take(content)
            taken.append(time.perf_counter() - begin)
            return digest

        with mock.patch.object(folder, "_digest", timed):
            note("save", save)
        times.setdefault("its digests", []).append(sum(digests))
        begin = time.perf_counter()
        saving = note("asynchronous, blocked", partial(save, asynchronous=True))
        saving.wait()
        times.setdefault("asynchronous, in all", []).append(time.perf_counter() - begin)
        note("load", partial(model.load, path, optimizer=optimizer))
        state = {"model": model.state_dict(), "optimizer": {str(i): s for i, s in enumerate(optimizer.state.values())}}
        note("DCP", partial(dcp_save, state, checkpoint_id=path / "dcp"))
    if dist.get_rank() == 0:
        shutil.rmtree(path)
        table = Table(title=f"{options.megabytes} MB on {world} ranks of one thread, {options.rounds} rounds")
        for column in ("", "seconds, median", "least", "MB/s"):
            table.add_column(column)
        for name, found in times.items():
            median = statistics.median(found[1:])  # the first makes what later ones reuse
            table.add_row(name, f"{median:.3f}", f"{min(found[1:]):.3f}", f"{options.megabytes / median:.0f}")
        Console().print(table)
        for over, under in PAIRS:
            ratios = [a / b for a, b in zip(times[over][1:], times[under][1:], strict=True)]
            print(f"{over} / {under}: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=600, help="of the checkpoint (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--path", default=tempfile.gettempdir(), help="of the disk (default: %(default)s)")
    options = parser.parse_args()
    launch(_run, options, 2)


if __name__ == "__main__":
    main()
