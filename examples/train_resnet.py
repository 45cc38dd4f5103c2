"""Train a small ResNet-18 on scikit-learn's handwritten digits, with gradient accumulation and clipping.

On one process, or on as many as you like:

    python examples/train_resnet.py
    torchrun --nproc-per-node 4 examples/train_resnet.py --mesh 2,2

An epoch has 12 microbatches of 120 images and accumulates 5 of them per step, so its last window is short: two
microbatches. `accumulate()` steps it like the others, divided by the microbatches that it really has. Batch norm's
statistics are those of the whole microbatch, however many processes share it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import autoparallel

ACCUMULATION = 5  # microbatches per optimizer step
ROWS = 120  # images per microbatch, over all processes
TRAINING_IMAGES = 1440  # of 1797
MAX_NORM = 1.0
AXIS_NAMES = {1: ("dp",), 2: ("dp", "tp"), 3: ("pod", "dp", "tp")}

Batch = tuple[Tensor, Tensor]


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        return F.relu(y + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 for images of 8 x 8 pixels: one 3x3 convolution in place of the large stem, and narrow layers."""

    def __init__(self, channels: int = 1, classes: int = 10, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        blocks: list[nn.Module] = []
        inputs = width
        for stage in range(4):
            outputs = width * 2**stage
            for index in range(2):
                blocks.append(BasicBlock(inputs, outputs, stride=2 if stage > 0 and index == 0 else 1))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.stem(x)))
        return self.fc(torch.flatten(self.pool(self.blocks(x)), 1))


def read_digits() -> tuple[Batch, Batch]:
    """Images and labels for training and for evaluation, shuffled once and in the same way everywhere."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 8 - 1
    labels = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:TRAINING_IMAGES], order[TRAINING_IMAGES:]
    return (images[train], labels[train]), (images[test], labels[test])


def microbatches(data: Batch, generator: torch.Generator) -> Iterator[Batch]:
    """One epoch. Every process draws the same order, because the generators are seeded alike."""
    images, labels = data
    for index in torch.randperm(len(images), generator=generator).split(ROWS):
        yield images[index], labels[index]


def accuracy(model: nn.Module, data: Batch) -> float:
    """The share of images that are recognised. The last batch is filled up, so that every batch divides."""
    images, labels = data
    model.eval()
    right = 0
    with torch.no_grad():
        for x, y in zip(images.split(ROWS), labels.split(ROWS), strict=True):
            filled = F.pad(x, (0, 0, 0, 0, 0, 0, 0, ROWS - len(x)))
            right += int((model(filled)[: len(x)].argmax(1) == y).sum())
    model.train()
    return right / len(images)


def make_mesh(option: str | None) -> DeviceMesh | None:
    """'2,2' is two mesh axes of two ranks. Without the option, all processes there are lie on one axis."""
    if option is None:
        return None
    shape = tuple(int(size) for size in option.split(","))
    return init_device_mesh("cpu", shape, mesh_dim_names=AXIS_NAMES[len(shape)])


def train(epochs: int, plan: autoparallel.Preset, mesh: DeviceMesh | None) -> tuple[list[float], float]:
    """The loss of every optimizer step, and the accuracy at the end."""
    torch.manual_seed(0)
    training, evaluation = read_digits()
    generator = torch.Generator().manual_seed(0)
    example = (training[0][:ROWS], training[1][:ROWS])

    model = autoparallel.compile(ResNet18(), mesh, loss_fn=F.cross_entropy, example_inputs=example, plan=plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    steps = epochs * -(-TRAINING_IMAGES // (ROWS * ACCUMULATION))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    leader = not dist.is_initialized() or dist.get_rank() == 0
    progress = Progress(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  norm {task.fields[norm]:.2f}"),
        TimeElapsedColumn(),
        disable=not leader,
    )
    if leader:
        print(model.plan.explain(), flush=True)

    losses: list[float] = []
    with progress:
        task = progress.add_task("train", total=steps, loss=float("nan"), norm=float("nan"))
        for epoch in range(epochs):
            for window in model.accumulate(ACCUMULATION, microbatches(training, generator)):
                total = torch.zeros(())
                for x, y in window:
                    loss = model(x, y)
                    loss.backward()
                    total += loss.detach()
                norm = model.clip_grad_norm_(MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                losses.append(total.item() / window.done)
                progress.update(task, advance=1, loss=losses[-1], norm=norm.item())
            if leader:
                progress.console.print(f"epoch {epoch}  loss {losses[-1]:.4f}")
    return losses, accuracy(model, evaluation)


def save(losses: list[float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(losses)
    axes.set(xlabel="optimizer step", ylabel="cross-entropy", title="ResNet-18 on handwritten digits", yscale="log")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12, help="passes over the data (default: %(default)s)")
    parser.add_argument("--plan", default="auto", help="auto, data_parallel, fsdp or tensor_parallel")
    parser.add_argument("--mesh", help="sizes of the mesh axes, such as 2,2 (default: all processes on one axis)")
    parser.add_argument("--out", type=Path, default=Path("resnet_loss_curve.png"), help="the picture")
    options = parser.parse_args()

    losses, right = train(options.epochs, options.plan, make_mesh(options.mesh))
    if not dist.is_initialized() or dist.get_rank() == 0:
        save(losses, options.out)
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; accuracy {right:.1%}; the curve is in {options.out}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
