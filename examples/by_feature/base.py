"""The loop that the other files of this folder change: a small classifier of handwritten digits, on all ranks.

    python examples/by_feature/base.py
    torchrun --nproc-per-node 2 examples/by_feature/base.py

Each of the others is this loop with one feature more; its lines that are not here end with "# new".
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import autoparallel


class Net(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, width), nn.Linear(width, 10)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return self.last(x)


def read_digits() -> tuple[Tensor, Tensor]:
    digits = load_digits()
    return torch.from_numpy(digits.data) / 16, torch.from_numpy(digits.target).long()


def batches(steps: int = 12, rows: int = 64) -> Iterator[tuple[Tensor, Tensor]]:
    """The same batches on every rank: a plain tensor is the whole batch."""
    images, labels = read_digits()
    for start in range(0, steps * rows, rows):
        yield images[start : start + rows], labels[start : start + rows]


def show(losses: list[float]) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps")
    if dist.is_initialized():
        dist.destroy_process_group()


def train() -> list[float]:
    torch.manual_seed(0)
    model = autoparallel.compile(Net().double(), plan="fsdp", loss_fn=F.cross_entropy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    for x, y in batches():
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    show(train())
