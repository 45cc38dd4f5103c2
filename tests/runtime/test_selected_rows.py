"""Experts of a module each, in a loop over masks: each rank computes on its rows, and sends none of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autoparallel
from tests.runtime.support import gradients_off, make, off, run_on_ranks

WIDTH, EXPERTS = 8, 3


class Masks(nn.Module):
    """A mixture of experts, each of a module of its own, on the tokens that a router gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.head = nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, WIDTH)
        layers = [nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH)) for _ in range(EXPERTS)]
        self.experts = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        weights, choice = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mask = choice == i
            out[mask] += expert(x[mask]) * weights[mask].unsqueeze(-1)
        return self.head(x + out)


class Places(Masks):
    """The same with two experts for each token, whose rows are added at their places."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        weights, choice = self.router(rows).softmax(-1).topk(2, -1)
        out = torch.zeros_like(rows)
        for i, expert in enumerate(self.experts):
            row, slot = torch.where(choice == i)
            out.index_add_(0, row, expert(rows[row]) * weights[row, slot, None])
        return self.head(rows + out).view_as(x)


class Asked(Masks):
    """The same, where an expert without tokens is left out."""

    def forward(self, x: Tensor) -> Tensor:
        weights, choice = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mask = choice == i
            if mask.any():
                out = out.index_put((mask,), expert(x[mask]) * weights[mask].unsqueeze(-1))
        return self.head(x + out)


class Counted(Masks):
    """The same by how many tokens there are."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        weights, choice = self.router(rows).softmax(-1).topk(2, -1)
        out = torch.zeros_like(rows)
        for i, expert in enumerate(self.experts):
            row, slot = torch.where(F.one_hot(choice, EXPERTS)[..., i])
            if row.shape[0] == 0:
                continue
            out.index_add_(0, row, expert(rows[None, row].reshape(-1, WIDTH)) * weights[row, slot, None])
        return self.head(rows + out).view_as(x)


MODELS: dict[str, type[Masks]] = {"masks": Masks, "places": Places, "asked": Asked, "counted": Counted}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "data parallel": ("data_parallel", {}),
    "sharded": ("fsdp", {}),
    "microbatches": ("fsdp", {"microbatches": 2}),
    "context parallel": ("context_parallel", {}),
}


def _train(name: str, way: str) -> tuple[list[float], list[tuple[str, float]], set[int]]:
    plain = make(MODELS[name])
    plan, options = WAYS[way]
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp" if way == "context parallel" else "dp",))
    model = autoparallel.compile(copy.deepcopy(plain), mesh, plan=plan, loss_fn=F.mse_loss, **options)
    optimizers = [torch.optim.AdamW(x.parameters(), 1e-2) for x in (model, plain)]
    differences, served = [], set()
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x, y = (torch.randn(4, 6, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
        if step == 1:  # of which one rank has tokens of one expert alone
            x[2:], x[:, 3:] = x[0, 0], x[0, 0]
        served |= {len(plain.router(part).argmax(-1).unique()) for part in x.chunk(2)}
        with autoparallel.count_traffic() as traffic:
            ours = model(x, y)
            ours.backward()
        theirs = F.mse_loss(plain(x), y)
        theirs.backward()
        differences += [off(ours, theirs), gradients_off(model, plain)]
        for optimizer in optimizers:
            optimizer.step(), optimizer.zero_grad()
    return differences, [(kind, size) for (kind, _), size in traffic.bytes.items()], served


@pytest.mark.wide_where(lambda way, name: (way, name) != ("sharded", "masks"))
@pytest.mark.slow_where(
    lambda way, name: name == "asked" or way in ("sharded", "context parallel") and name in ("places", "counted")
)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", WAYS)
def test_each_rank_computes_on_the_rows_that_it_has(way: str, name: str) -> None:
    for differences, sent, served in run_on_ranks(_train, name, way, world_size=2):
        assert max(differences) < 1e-9
        assert len(served) > 1, "every rank had tokens of each expert"
        if way == "data parallel":
            masks = 24 * 2 * 4 if name in ("asked", "counted") else 0  # may be gathered to be asked about
            assert sum(size for kind, size in sent if kind != "all_reduce") <= masks, "tokens were gathered"
