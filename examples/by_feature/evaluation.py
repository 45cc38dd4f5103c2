"""base.py evaluated now and then, on batches of any size; the accuracy is the same on every rank.

torchrun --nproc-per-node 2 examples/by_feature/evaluation.py
"""

import torch
import torch.nn.functional as F
from base import Net, batches, read_digits, show

import autoparallel


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
        if len(losses) % 6 == 0:  # new
            model.eval()  # new
            with torch.no_grad():  # new
                images, labels = (t[-257:] for t in read_digits())  # new
                right = (model(images).argmax(1) == labels).double().mean()  # new
            model.train()  # new
            assert right > 0.5, f"accuracy {right:.1%} after {len(losses)} steps"  # new
    return losses


if __name__ == "__main__":
    show(train())
