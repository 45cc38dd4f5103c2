"""base.py measured: rows per second, MFU, memory, and what a step took beside what was predicted.

torchrun --nproc-per-node 2 examples/by_feature/meter.py
"""

import torch
import torch.nn.functional as F
from base import Net, batches, show

import autoparallel


def train() -> list[float]:
    torch.manual_seed(0)
    model = autoparallel.compile(Net().double(), plan="fsdp", loss_fn=F.cross_entropy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    meter = autoparallel.Meter(model)  # new
    losses: list[float] = []
    for x, y in batches():
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        took = meter.step()  # new
        assert took["rows_per_second"] > 0 and took["predicted_seconds"] > 0  # new
    return losses


if __name__ == "__main__":
    show(train())
