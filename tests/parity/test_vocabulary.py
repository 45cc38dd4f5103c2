"""A vocabulary that does not divide, sharded in use: padding enters no loss, gradient, norm or checkpoint."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autoparallel
from autoparallel import Plan
from autoparallel.graph.losses import NO_LOSS
from tests.distributed import run_distributed
from tests.runtime.support import SideBySide

WIDTH, ROWS, LENGTH = 8, 8, 3


class LanguageModel(nn.Module):
    def __init__(self, vocabulary: int, tied: bool) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocabulary, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=not tied)
        if tied:
            self.head.weight = self.tok.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids)
        return self.head(x + self.down(torch.tanh(self.up(self.norm(x)))))


def loss_fn(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), target.flatten(), ignore_index=-1)


def batch(step: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids, target = torch.randint(0, vocabulary, (2, ROWS, LENGTH), generator=generator)
    target[:, 0] = torch.where(target[:, 0] % 3 == 0, -1, target[:, 0])
    target[0, 1] = vocabulary - 1  # the last class there is
    return ids, target


def _train(vocabulary: int, tied: bool, shape: tuple[int, ...], p: float, plan: str, folder: str) -> dict[str, Any]:
    torch.manual_seed(0)
    plain = LanguageModel(vocabulary, tied).double()
    axes = ("tp",) if len(shape) == 1 else ("dp", "tp")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
    model = autoparallel.compile(copy.deepcopy(plain), mesh, loss_fn=loss_fn, plan=plan)
    both = SideBySide(model, plain)
    for step in range(3):
        for micro in range(2):
            ids, target = batch(2 * step + micro, vocabulary)
            with torch.enable_grad() if micro else model.no_sync():
                both.backward(model(ids, target), loss_fn(plain(ids), target))
        both.step(p=p)
    with torch.no_grad():
        both.see(model(ids), plain(ids))
    weight_name = "tok.weight" if tied else "head.weight"
    dcp.save(model.state_dict(), checkpoint_id=folder)
    saved = {name: torch.zeros_like(value) for name, value in plain.state_dict().items()}
    dcp.load(saved, checkpoint_id=folder)
    for name, value in plain.state_dict().items():
        both.see(saved[name], value)
    decided = Plan.from_json(model.plan.to_json())
    again = autoparallel.compile(copy.deepcopy(plain), mesh, loss_fn=loss_fn, plan=decided)
    both.see(again(*batch(7, vocabulary)), loss_fn(plain(batch(7, vocabulary)[0]), batch(7, vocabulary)[1]))
    weight = model.head.weight
    return {
        "worst": both.worst,
        "local": tuple(weight.to_local().shape),
        "uses": sorted({str(c) for b in _program(model).buckets for c in b.chains if c.name == weight_name}),
        "unruled": dict(model.plan.unruled),
        "rows": decided.parameters[weight_name].rows,
        "explained": model.plan.explain(),
    }


def _program(model: Any) -> Any:
    kind = next(k for k in model._kinds if k.runner.program.captured.weight != NO_LOSS)
    return kind.runner.program


CASES = [
    (20011, False, (2,), 1.0, "tensor_parallel"),
    (20011, True, (4,), 2.0, "tensor_parallel"),
    (20011, True, (2, 2), float("inf"), "tensor_parallel"),
    (50257, True, (2,), 2.0, "auto"),
]


@pytest.mark.wide_where(lambda vocabulary: vocabulary == 50257)
@pytest.mark.slow_where(lambda vocabulary, tied: vocabulary == 20011 and tied)
@pytest.mark.parametrize(("vocabulary", "tied", "shape", "p", "plan"), CASES, ids=str)
def test_parity(vocabulary: int, tied: bool, shape: tuple[int, ...], p: float, plan: str, tmp_path: Path) -> None:
    ranks = run_distributed(
        _train, vocabulary, tied, shape, p, plan, str(tmp_path), world_size=torch.Size(shape).numel(), timeout=250
    )
    n = shape[-1]
    for found in ranks:
        assert found["worst"] < 1e-9, found
        assert found["unruled"] == {}
        assert found["rows"] == vocabulary + -vocabulary % n
        assert f"[{vocabulary} as {found['rows']}, {WIDTH}]" in found["explained"]
    rows = sum(found["local"][0] for found in ranks)
    assert rows == vocabulary * len(ranks) // n, "no padding at rest"
    assert max(found["local"][0] for found in ranks) == -(-vocabulary // n), "sharded"
    assert all("S0" in use.split(" -> ")[1] for use in ranks[0]["uses"]), "sharded in use, too"
