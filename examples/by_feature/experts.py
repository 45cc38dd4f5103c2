"""base.py with a mixture of experts, which lie on a mesh axis of their own and are fed by all-to-all.

torchrun --nproc-per-node 2 examples/by_feature/experts.py
"""

import torch
import torch.nn.functional as F
from base import batches, show
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autoparallel


class Experts(nn.Module):
    """Each image goes to two of four experts, dropless: copies of its weights are picked by number."""

    def __init__(self, experts: int = 4, width: int = 32) -> None:
        super().__init__()
        self.router = nn.Linear(64, experts)
        self.up = nn.Parameter(torch.randn(experts, 64, width) / 8)
        self.down = nn.Parameter(torch.randn(experts, width, 10) / 6)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        rows = x.repeat_interleave(2, 0).unsqueeze(1)
        chosen = chosen.flatten()
        h = F.gelu(torch.bmm(rows, self.up[chosen]))
        y = torch.bmm(h, self.down[chosen]).view(-1, 2, 10)
        return (weights.unsqueeze(-1) * y).sum(1)


def train() -> list[float]:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "ep"))  # new
    model = autoparallel.compile(Experts().double(), mesh, plan="expert_parallel", loss_fn=F.cross_entropy)  # new
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
