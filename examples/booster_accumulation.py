"""Colossal-AI's tutorial on gradient accumulation with its Booster, with ours: a ResNet, Adam, four batches a step.

    python examples/booster_accumulation.py
    torchrun --nproc-per-node 2 examples/booster_accumulation.py

The tutorial steps where `idx % (GRADIENT_ACCUMULATION - 1)` is zero: at once, and then after every third batch. Here a
step is four batches, the last one what an epoch leaves, and its gradient is that of one batch which holds them all.
Batches are those of all ranks. The images, which there are CIFAR-10's and must be fetched, are scikit-learn's
handwritten digits, which are there.
"""

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from train_resnet import ResNet18, microbatches, read_digits

from autoparallel.integrations.booster import Booster, TorchFSDPPlugin, launch_from_torch

GRADIENT_ACCUMULATION = 4


def train(epochs: int = 2) -> list[float]:
    """The loss of every batch."""
    launch_from_torch(seed=0)
    (images, labels), _ = read_digits()
    data = images[:1200].double(), labels[:1200]  # ten batches: steps of four, four and two
    order = torch.Generator().manual_seed(0)

    model: nn.Module = ResNet18().double()
    criterion = nn.CrossEntropyLoss()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=1e-3)

    booster = Booster(plugin=TorchFSDPPlugin())
    model, optimizer, criterion, _, _ = booster.boost(model, optimizer, criterion)

    losses = []
    for _ in range(epochs):
        batches = list(microbatches(data, order))
        for idx, (x, y) in enumerate(batches):
            first = idx - idx % GRADIENT_ACCUMULATION
            window = batches[first : first + GRADIENT_ACCUMULATION]
            is_last = idx == first + len(window) - 1
            with nullcontext() if is_last else booster.no_sync(model, optimizer):
                loss = criterion(model(x), y)
                booster.backward(loss / len(window), optimizer)
            losses.append(loss.item())
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
    return losses


if __name__ == "__main__":
    losses = train()
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} batches of {GRADIENT_ACCUMULATION} a step")
    if dist.is_initialized():
        dist.destroy_process_group()
