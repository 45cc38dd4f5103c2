"""base.py saved in the middle and resumed by a new model and a new optimizer: the losses are those of base.py.

torchrun --nproc-per-node 2 examples/by_feature/checkpoint.py
"""

import os
import tempfile

import torch
import torch.nn.functional as F
from base import Net, batches, show

import autoparallel


def train(path: str = os.path.join(tempfile.gettempdir(), "autoparallel-by-feature")) -> list[float]:  # new
    torch.manual_seed(0)
    model = autoparallel.compile(Net().double(), plan="fsdp", loss_fn=F.cross_entropy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    for step, (x, y) in enumerate(batches()):  # new
        if step == 6:  # new
            model.save(path, step=step, optimizer=optimizer, keep=1)  # new
            model = autoparallel.compile(Net().double(), plan="fsdp", loss_fn=F.cross_entropy)  # new
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # new
            assert model.load(path, optimizer=optimizer).step == step  # new
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    show(train())
