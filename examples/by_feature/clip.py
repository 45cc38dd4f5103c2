"""base.py with gradients clipped: the norm is that of the whole gradient, whatever the plan, by one all-reduce.

torchrun --nproc-per-node 2 examples/by_feature/clip.py
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
    for x, y in batches():
        loss = model(x, y)
        loss.backward()
        norm = model.clip_grad_norm_(0.5)  # new
        assert norm > 0.5 or len(losses) > 3, "the limit bites"  # new
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    show(train())
