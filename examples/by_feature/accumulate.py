"""base.py with four batches a step: gradients are reduced once a window, and the last, shorter one counts as it is.

torchrun --nproc-per-node 2 examples/by_feature/accumulate.py
"""

import torch
import torch.nn.functional as F
from base import Net, batches, show

import autoparallel


def train() -> list[float]:
    torch.manual_seed(0)
    model = autoparallel.compile(Net().double(), plan="fsdp", loss_fn=F.cross_entropy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    for window in model.accumulate(4, batches(steps=14)):  # new
        for x, y in window:  # new
            loss = model(x, y)  # new
            loss.backward()  # new
            losses.append(loss.item())  # new
        optimizer.step()
        optimizer.zero_grad()
    return losses


if __name__ == "__main__":
    show(train())
