"""Colossal-AI's tutorial on gradient accumulation with its Booster, with ours: a ResNet, Adam, four batches a step.

    python examples/booster_accumulation.py
    torchrun --nproc-per-node 2 examples/booster_accumulation.py

The tutorial accumulates under `booster.no_sync(model, optimizer)` and steps where `idx % (GRADIENT_ACCUMULATION - 1)`
is zero: at once, and then after every third batch. Here a window is four batches, the last one what an epoch leaves,
and its gradient is that of one batch which holds them all. The tutorial's images are CIFAR-10's, which must be fetched;
these are scikit-learn's handwritten digits, which are there.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from train_resnet import ResNet18, microbatches, read_digits

import autoparallel

GRADIENT_ACCUMULATION = 4


def train(epochs: int = 2) -> list[float]:
    """The loss of every batch."""
    torch.manual_seed(0)
    (images, labels), _ = read_digits()
    data = images[:1200].double(), labels[:1200]  # ten batches: windows of four, four and two
    order = torch.Generator().manual_seed(0)

    model = autoparallel.compile(ResNet18().double(), plan="fsdp", loss_fn=F.cross_entropy)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    losses = []
    for _ in range(epochs):
        for window in model.accumulate(GRADIENT_ACCUMULATION, microbatches(data, order)):
            for x, y in window:
                loss = model(x, y)
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    return losses


if __name__ == "__main__":
    losses = train()
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} batches of {GRADIENT_ACCUMULATION} a step")
    if dist.is_initialized():
        dist.destroy_process_group()
