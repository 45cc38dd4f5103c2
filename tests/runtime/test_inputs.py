"""What people bring: dataclasses, ``BatchEncoding``, numpy, autocast, wrappers, second derivatives, odd batches."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pack_sequence

import autoparallel
from tests.runtime.support import Net, batch, gradients_off, make, mesh_of, off, raised, run_on_ranks


@dataclasses.dataclass
class Inner:
    scale: Tensor


@dataclasses.dataclass
class Batch:
    x: Tensor
    inner: Inner
    mask: Tensor | None = None


class Encoding(UserDict[str, Any]):
    """As transformers' BatchEncoding is made."""


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 4)

    def forward(self, batch: Any) -> Tensor:
        if isinstance(batch, Batch):
            x = batch.x * batch.inner.scale
            return self.up(x if batch.mask is None else x * batch.mask)
        return self.up(batch["x"] if isinstance(batch, dict | UserDict) else batch)


def _pair() -> tuple[Any, Any]:
    model = make(Reader)
    plain = copy.deepcopy(model)
    return autoparallel.compile(model, loss_fn=F.mse_loss, plan="fsdp"), plain


def _inputs() -> dict[str, Any]:
    model, plain = _pair()
    x, y = torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    scale = torch.tensor(2.0, dtype=torch.float64)
    results: dict[str, Any] = {}
    inputs = {
        "dataclass": Batch(x, Inner(scale)),
        "with a mask": Batch(x, Inner(scale), x > 0),
        "encoding": Encoding(x=x),
    }
    for name, value in inputs.items():
        loss, expected = model(value, y), F.mse_loss(plain(value), y)
        loss.backward(), expected.backward()
        results[name] = max(off(loss, expected), off(model.up.weight.grad, plain.up.weight.grad))
    kinds = len(model._kinds)
    model(Batch(2 * x, Inner(scale)), y)
    results["kinds"] = len(model._kinds) - kinds
    results["array"] = raised(lambda: model(x.numpy(), y))
    results["deep"] = raised(lambda: model({"x": [np.zeros(3)]}, y))
    results["packed"] = raised(lambda: model(pack_sequence([x[0], x[1, :3]], enforce_sorted=False), y))
    results["sparse"] = raised(lambda: model(x.to_sparse(), y))
    results["dtype"] = raised(lambda: model(x.float(), y))
    results["target"] = raised(lambda: model(x, y.numpy()))
    results["wrapped"] = raised(lambda: DistributedDataParallel(model))
    fully_shard(model, mesh=mesh_of(1))
    results["sharded again"] = raised(lambda: model(x, y))
    return results


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    (results,) = run_on_ranks(_inputs, world_size=1)
    return results


def test_structures_of_tensors(found: dict[str, Any]) -> None:
    assert all(found[name] < 1e-12 for name in ("dataclass", "with a mask", "encoding")), found
    assert found["kinds"] == 0, "a batch of a known kind was captured again"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("array", "the argument batch is a numpy array: give torch.from_numpy"),
        ("deep", "the argument batch['x'][0] is a numpy array"),
        ("target", "(the target) is a numpy array"),
        ("packed", "pack them in forward"),
        ("sparse", "the argument batch is not dense (torch.sparse_coo)"),
        ("dtype", "It was called with batch [8, 8] float32, the target [8, 4] float64."),
        ("wrapped", "cannot be wrapped in DistributedDataParallel"),
        ("sharded again", "fully_shard() was applied to the compiled model"),
    ],
)
def test_what_is_refused_says_why(found: dict[str, Any], name: str, words: str) -> None:
    assert words in found[name]


def _under_autocast() -> dict[str, Any]:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(self.up(x))
            with torch.autocast("cpu", enabled=False):
                h = h.float() @ torch.full((16, 16), 1 / 3)
            return self.down(h)

    model = make(Small, torch.float32)
    plain = copy.deepcopy(model)
    mesh = mesh_of(2)
    model = autoparallel.compile(model, mesh, loss_fn=F.mse_loss, plan="fsdp")
    x, y = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)), torch.ones(8, 4)
    results: dict[str, Any] = {}
    for name, dtype in (("autocast", torch.bfloat16), ("none", None)):
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss, expected = model(x, y), F.mse_loss(plain(x), y)
        loss.backward(), expected.backward()
        largest = max(float(p.grad.abs().max()) for p in plain.parameters())
        results[name] = max(off(model.get_parameter(n).grad, p.grad) for n, p in plain.named_parameters()) / largest
        results[f"{name}, loss"] = off(loss, expected), loss.dtype == expected.dtype, float(expected.detach())
        model.zero_grad(), plain.zero_grad()
    return results


@pytest.mark.wide
def test_autocast_is_the_policy_it_means() -> None:
    for results in run_on_ranks(_under_autocast, world_size=2):
        assert results["autocast"] < 2e-2 and results["none"] < 1e-5, results
        assert results["autocast, loss"][0] < 1e-2 and results["autocast, loss"][1], results
        assert results["autocast, loss"][2] != results["none, loss"][2], "the autocast did nothing"


@pytest.mark.parametrize("build", [lambda: nn.Linear(8, 4), Net], ids=["a linear layer", "layers"])
def test_autocast_around_a_model_that_says_nothing_of_it(build: Callable[[], nn.Module]) -> None:
    plain = make(build, torch.float32)
    model = autoparallel.compile(copy.deepcopy(plain))
    x, _ = batch(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = model(x), plain(x)
    assert y.dtype == expected.dtype == torch.bfloat16
    y.sum().backward(), expected.sum().backward()
    assert off(y, expected) == 0 and gradients_off(model, plain) < 1e-2


def _uneven_first() -> dict[str, Any]:
    results: dict[str, Any] = {}
    for plan in ("fsdp", "data_parallel"):
        plain = make()
        model = autoparallel.compile(copy.deepcopy(plain), mesh_of(2), loss_fn=F.mse_loss, plan=plan)
        for rows in (7, 8):
            x, y = batch(rows=rows)
            loss, expected = model(x, y), F.mse_loss(plain(x), y)
            loss.backward(), expected.backward()
            results[f"{plan}, {rows}"] = max(
                off(loss, expected), *(off(model.get_parameter(n).grad, p.grad) for n, p in plain.named_parameters())
            )
        results[f"{plan}, at rest"] = str(model.up.weight.placements)
    return results


@pytest.mark.wide
def test_the_first_batch_need_not_divide() -> None:
    for results in run_on_ranks(_uneven_first, world_size=2):
        layouts = {plan: results.pop(f"{plan}, at rest") for plan in ("fsdp", "data_parallel")}
        assert all(difference < 1e-9 for difference in results.values()), results
        assert "Shard" in layouts["fsdp"] and "Shard" not in layouts["data_parallel"], layouts


class Neighbours(nn.Module):
    """Compares each row of the batch with the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return self.down(torch.tanh(hidden[1:]) - torch.tanh(hidden[:-1]))


def _neighbours(plan: str) -> dict[str, Any]:
    plain = make(Neighbours)
    model = autoparallel.compile(copy.deepcopy(plain), mesh_of(2), plan=plan)
    x, _ = batch()
    result, expected = model(x), plain(x)
    result.square().sum().backward(), expected.square().sum().backward()
    gradients = [off(model.get_parameter(n).grad, p.grad) for n, p in plain.named_parameters()]
    modes = {key.partition("/")[0]: ways for key, ways in model.plan.operators.items() if "linear" in key}
    return {"off": max(off(result, expected), *gradients), "modes": modes}


@pytest.mark.parametrize("plan", ["data_parallel", "fsdp"])
def test_what_has_fewer_rows_than_the_batch_need_not_be_cut(plan: str) -> None:
    for results in run_on_ranks(_neighbours, plan, world_size=2):
        assert results["off"] < 1e-9
        assert results["modes"] == {"up": ("shard:...0",), "down": ("R",)}


class Column(nn.Module):
    """Sorts one column over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)[:, 0].sort()[0]


def _one_row_each() -> float:
    plain = make(Column)
    model = autoparallel.compile(copy.deepcopy(plain), mesh_of(2), plan="data_parallel")
    x = batch(rows=2)[0]
    return off(model(x), plain(x))


def test_a_column_of_one_row_on_each_rank_is_sent() -> None:
    assert max(run_on_ranks(_one_row_each, world_size=2)) < 1e-12
