"""`launch()`: a function on several ranks, started from a plain process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import autoparallel


def _train(model: nn.Module) -> list[float]:
    torch.manual_seed(0)
    x, y = torch.randn(8, 4, dtype=torch.float64), torch.randint(0, 3, (8,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_ranks_train_what_one_process_trains() -> None:
    plain = nn.Linear(4, 3).double()

    def train(plan: Any, *, axis: str) -> dict[str, Any]:  # neither this nor the model can be pickled by name
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(axis,))
        model = autoparallel.compile(plain, mesh, plan=plan)
        losses = _train(model)
        weight = model.weight.full_tensor()  # type: ignore[operator, union-attr]
        return {"rank": dist.get_rank(), "file": losses, "weight": weight.detach(), "plan": model.plan}

    results = autoparallel.launch(train, "fsdp", ranks=2, axis="dp", timeout=120)
    before = plain.weight.detach().clone()
    expected = _train(plain)
    assert [result["rank"] for result in results] == [0, 1]
    for result in results:
        assert result["file"] == pytest.approx(expected, abs=1e-9)
        assert torch.allclose(result["weight"], plain.weight, rtol=0, atol=1e-9)
        assert "dim 0 over dp" in result["plan"].explain()
    assert not torch.equal(before, plain.weight), "ranks had copies"


def _fails(how: str) -> Any:
    rank = dist.get_rank()
    if how == "raises":
        return 1 / (rank - 1)
    if how == "shard":
        mesh = init_device_mesh("cpu", (2,))
        return [0, {"weight": distribute_tensor(torch.zeros(4), mesh, [Shard(0)])}]
    return (lambda: rank) if how == "lambda" else autoparallel.launch(print, ranks=1)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raises", "rank 1 failed: ZeroDivisionError"),
        ("shard", r"TypeError: .* returns a DTensor at \[1\]\['weight'\], .*full_tensor"),
        ("lambda", "lambda"),
        ("nested", "already .*without torchrun"),
    ],
)
def test_what_goes_wrong_on_a_rank_is_raised_here(how: str, message: str) -> None:
    with pytest.raises(autoparallel.ProcessError, match=message) as caught:
        autoparallel.launch(_fails, how, ranks=2, timeout=120)
    assert caught.value.failures[0].reported


def test_without_ranks_or_time() -> None:
    for wrong in ({"ranks": 0}, {"timeout": 0}, {"timeout": float("nan")}):
        with pytest.raises(ValueError, match="at least one rank and some time"):
            autoparallel.launch(print, **wrong)
