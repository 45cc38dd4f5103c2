"""base.py in two stages, each on half of the ranks: the losses are those of base.py.

torchrun --nproc-per-node 2 examples/by_feature/pipeline.py
"""

import torch
import torch.nn.functional as F
from base import Net, batches, show
from torch.distributed.device_mesh import init_device_mesh

import autoparallel


def train() -> list[float]:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))  # new
    pipeline = autoparallel.Pipeline(schedule="1f1b", microbatches=4)  # new
    model = autoparallel.compile(Net().double(), mesh, loss_fn=F.cross_entropy, pipeline=pipeline)  # new
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
