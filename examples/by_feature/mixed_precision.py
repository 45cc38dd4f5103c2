"""base.py with bfloat16 inside: parameters, gradients and optimizer states stay in float32.

torchrun --nproc-per-node 2 examples/by_feature/mixed_precision.py
"""

import torch
import torch.nn.functional as F
from base import Net, batches, show
from torch.distributed.fsdp import MixedPrecisionPolicy

import autoparallel


def train() -> list[float]:
    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)  # new
    model = autoparallel.compile(Net(), plan="fsdp", loss_fn=F.cross_entropy, precision=policy)  # new
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    for x, y in batches():
        loss = model(x.float(), y)  # new
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    show(train())
