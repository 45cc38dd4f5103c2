"""Train a small byte-level GPT on the text of Python's own standard library.

On one process, or on four with two mesh axes; the script and the loss curve are the same:

    python examples/train_gpt.py
    torchrun --nproc-per-node 4 examples/train_gpt.py --mesh 2,2

On GPUs, one for each process, with `--device cuda`.

The model below knows nothing of meshes. `autoparallel.compile` decides how its parameters and activations lie on the
mesh, and the loop is the one you would write for one device: batches are global, and the same on every rank.
"""

from __future__ import annotations

import argparse
import csv
import os
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import autoparallel

ACCUMULATION = 4  # microbatches per optimizer step
ROWS = 16  # sequences per microbatch, over all processes
MAX_NORM = 1.0
AXIS_NAMES = {1: ("dp",), 2: ("dp", "tp"), 3: ("pod", "dp", "tp")}


@dataclass(frozen=True)
class GPTConfig:
    vocabulary: int = 256  # bytes
    context: int = 64
    width: int = 128
    heads: int = 4
    layers: int = 2


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.q = nn.Linear(config.width, config.width)
        self.k = nn.Linear(config.width, config.width)
        self.v = nn.Linear(config.width, config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (project(x).view(shape).transpose(1, 2) for project in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A pre-norm GPT; the output layer's weight is the token embedding."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tok = nn.Embedding(config.vocabulary, config.width)
        self.pos = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        nn.init.normal_(self.tok.weight, std=0.05)
        nn.init.normal_(self.pos.weight, std=0.05)
        self.head.weight = self.tok.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def read_text() -> Tensor:
    """The source of the standard library's top-level modules, about five million bytes."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def draw_batch(text: Tensor, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random windows of the text. Every process draws the same ones, because the generators are seeded alike."""
    starts = torch.randint(0, len(text) - context - 1, (ROWS,), generator=generator)
    windows = torch.stack([text[start : start + context + 1] for start in starts.tolist()]).long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def make_mesh(option: str | None, device: str) -> DeviceMesh | None:
    """'2,2' is two mesh axes of two ranks. Without the option, all processes there are lie on one axis."""
    if option is None:
        return None
    shape = tuple(int(size) for size in option.split(","))
    return init_device_mesh(device, shape, mesh_dim_names=AXIS_NAMES[len(shape)])


def train(steps: int, plan: autoparallel.Preset, mesh: DeviceMesh | None, device: str) -> list[tuple[float, float]]:
    """Loss and gradient norm of every optimizer step."""
    torch.manual_seed(0)
    text = read_text().to(device)
    generator = torch.Generator().manual_seed(0)
    config = GPTConfig()
    example = draw_batch(text, config.context, torch.Generator().manual_seed(1))

    model = autoparallel.compile(GPT(config).to(device), mesh, loss_fn=token_loss, example_inputs=example, plan=plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps + 1, pct_start=0.2)

    leader = not dist.is_initialized() or dist.get_rank() == 0
    progress = Progress(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  norm {task.fields[norm]:.2f}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        disable=not leader,
    )
    if leader:
        print(model.plan.explain(), flush=True)

    history: list[tuple[float, float]] = []
    with progress:
        task = progress.add_task("train", total=steps, loss=float("nan"), norm=float("nan"))
        for step in range(steps):
            total = torch.zeros((), device=device)
            for micro in range(ACCUMULATION):
                x, y = draw_batch(text, config.context, generator)
                with nullcontext() if micro == ACCUMULATION - 1 else model.no_sync():
                    loss = model(x, y) / ACCUMULATION
                    loss.backward()
                total += loss.detach()
            norm = model.clip_grad_norm_(MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            history.append((total.item(), norm.item()))
            progress.update(task, advance=1, loss=history[-1][0], norm=history[-1][1])
            if leader and (step % 10 == 0 or step == steps - 1):
                progress.console.print(f"step {step:4d}  loss {history[-1][0]:.4f}  norm {history[-1][1]:.3f}")
    return history


def save(history: list[tuple[float, float]], path: Path) -> None:
    """The loss curve as a picture, and its numbers beside it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".csv").open("w", newline="") as file:
        csv.writer(file).writerows([("step", "loss", "norm"), *((i, *row) for i, row in enumerate(history))])
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot([loss for loss, _ in history], label="loss")
    axes.plot([norm for _, norm in history], label="gradient norm before clipping", linewidth=0.8, alpha=0.6)
    axes.axhline(MAX_NORM, linewidth=0.8, linestyle=":", color="gray", label=f"limit {MAX_NORM:g}")
    axes.set(xlabel="optimizer step", ylabel="nats per byte", title="A byte-level GPT on Python's standard library")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--plan", default="auto", help="auto, data_parallel, fsdp or tensor_parallel")
    parser.add_argument("--mesh", help="sizes of the mesh axes, such as 2,2 (default: all processes on one axis)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("loss_curve.png"), help="the picture (default: %(default)s)")
    options = parser.parse_args()

    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    history = train(options.steps, options.plan, make_mesh(options.mesh, options.device), options.device)
    if not dist.is_initialized() or dist.get_rank() == 0:
        save(history, options.out)
        print(f"loss {history[0][0]:.3f} -> {history[-1][0]:.3f}; the curve is in {options.out}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
