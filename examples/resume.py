"""Train through interruptions: a run that is killed at any moment goes on, on as many processes as there are then.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # without it torchrun's restarts do not find each other
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/resume.py --path runs/a
    torchrun --nproc-per-node 4 examples/resume.py --path runs/a --mesh 2,2 --plan tensor_parallel --steps 400
    python examples/resume.py --path runs/a --steps 600

The lines that differ from an ordinary script are marked with "<-". Every start goes on from the newest complete
checkpoint in `--path`: the parameters, the optimizer, the schedule, the dropout masks and the order of the data are
those of a run that nobody has interrupted. At SIGTERM, which schedulers send before they kill, the run saves once more
and ends (`slurm.sh` has its job queued again).
"""

from __future__ import annotations

import argparse
import json
import signal
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset

import autoparallel

SAMPLES, FEATURES, CLASSES, ROWS = 1000, 32, 8, 64
AXIS_NAMES = {1: ("dp",), 2: ("dp", "tp")}


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, 128)
        self.hidden = nn.Linear(128, 128)
        self.dropout = nn.Dropout(0.1)
        self.down = nn.Linear(128, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(F.gelu(self.hidden(F.gelu(self.up(x))))))


def make_data(dtype: torch.dtype) -> TensorDataset:
    """Samples that a random linear map has labelled."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, FEATURES, generator=generator)
    labels = (x @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(1)
    return TensorDataset(x.to(dtype), labels)


def watch_for_end() -> Callable[[], bool]:
    """A function that tells, all ranks alike, whether one of them was told to end; all ranks call it together."""
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))

    def is_told() -> bool:
        count = torch.tensor(len(told))
        if dist.is_initialized():
            dist.all_reduce(count)
        return bool(count)

    return is_told


def train(options: argparse.Namespace) -> None:
    dtype = torch.float64 if options.double else torch.float32
    torch.manual_seed(0)
    data = make_data(dtype)
    shape = tuple(int(size) for size in options.mesh.split(",")) if options.mesh else ()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=AXIS_NAMES[len(shape)]) if shape else None
    model = autoparallel.compile(
        Classifier().to(dtype), mesh, plan=options.plan, loss_fn=F.cross_entropy, example_inputs=data[:ROWS]
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.9)
    sampler = model.sampler(data, ROWS, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_sampler=sampler)

    states = {"optimizer": optimizer, "schedule": schedule, "sampler": sampler}  # <-
    step = 0
    if autoparallel.latest(options.path):  # <-
        step = model.load(options.path, **states).step  # <-
    leader = not dist.is_initialized() or dist.get_rank() == 0
    if leader:
        print(f"from step {step}", flush=True)

    is_told, over = watch_for_end(), step >= options.steps  # <-
    with (options.path / "losses.jsonl").open("a") as record:
        while not over:
            for batch in loader:
                loss = model(*model.local_rows(batch))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                step += 1
                if leader:
                    print(json.dumps({"step": step, "loss": loss.item()}), file=record, flush=True)
                over = step == options.steps or is_told()  # <-
                if step % options.every == 0 or over:  # <-
                    model.save(options.path, step=step, keep=2, asynchronous=not over, **states)  # <-
                if over:
                    break


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, required=True, help="the folder of the run, which all processes share")
    parser.add_argument("--steps", type=int, default=200, help="steps in all (default: %(default)s)")
    parser.add_argument("--every", type=int, default=5, help="steps from one save to the next (default: %(default)s)")
    parser.add_argument("--plan", default="auto", help="auto, data_parallel, fsdp or tensor_parallel")
    parser.add_argument("--mesh", help="sizes of the mesh axes, such as 2,2 (default: all processes on one axis)")
    parser.add_argument("--double", action="store_true", help="in float64")
    options = parser.parse_args()
    options.path.mkdir(parents=True, exist_ok=True)
    train(options)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
