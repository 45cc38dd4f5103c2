"""Colossal-AI's tutorial on gradient clipping with its Booster, with ours: a ResNet, SGD, a schedule, clipping to 1.

    python examples/booster_clipping.py
    torchrun --nproc-per-node 2 examples/booster_clipping.py

The loop is the tutorial's. What differs: batches are those of all ranks, and the images, which there are CIFAR-10's and
must be fetched, are scikit-learn's handwritten digits, which are there.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from train_resnet import ResNet18, microbatches, read_digits

from autoparallel.integrations.booster import Booster, TorchFSDPPlugin, launch_from_torch

GRADIENT_CLIPPING = 1.0


def train(epochs: int = 2) -> tuple[list[float], list[float]]:
    """The loss and the norm before clipping of every step."""
    launch_from_torch(seed=0)
    (images, labels), _ = read_digits()
    data = images.double(), labels
    order = torch.Generator().manual_seed(0)

    model: nn.Module = ResNet18().double()
    criterion = nn.CrossEntropyLoss()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1], gamma=0.3)

    booster = Booster(plugin=TorchFSDPPlugin())
    model, optimizer, criterion, _, schedule = booster.boost(model, optimizer, criterion, lr_scheduler=schedule)

    losses, norms = [], []
    for _ in range(epochs):
        for x, y in microbatches(data, order):
            loss = criterion(model(x), y)
            booster.backward(loss, optimizer)
            norms.append(optimizer.clip_grad_by_norm(max_norm=GRADIENT_CLIPPING).item())
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        schedule.step()
    return losses, norms


if __name__ == "__main__":
    losses, norms = train()
    if not dist.is_initialized() or dist.get_rank() == 0:
        clipped = sum(norm > GRADIENT_CLIPPING for norm in norms)
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}; {clipped} of {len(norms)} steps were clipped")
    if dist.is_initialized():
        dist.destroy_process_group()
