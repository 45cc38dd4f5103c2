"""Replicas are equal, or the job stops: parameters along the axes that do not shard them, and buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autoparallel
from autoparallel._torch.dtensor import local_of
from autoparallel.runtime.ranks.replicas import Replicas
from tests.runtime.support import batch, make, mesh_of, raised, run_on_ranks


class Net(nn.Module):
    """A linear, a buffer that every call changes, a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(3))
        self.down = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return self.down(torch.tanh(self.up(x)))


def _train(shape: tuple[int, ...], plan: str, faults: list[tuple[str, int, str]]) -> list[str]:
    """What each fault makes of the six steps that follow it; the three before have none."""
    found = []
    for name, rank, kind in faults:
        axes = {"pipeline": ("pp", "dp"), "pipeline, as the last axis": ("dp", "pp")}.get(plan)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes) if axes else mesh_of(*shape)
        preset: Any = "data_parallel" if axes else plan
        options: Any = {"loss_fn": F.mse_loss, "example_inputs": batch(), "check_replicas": 2}
        if axes:
            options["pipeline"] = autoparallel.Pipeline(microbatches=2)
        model = autoparallel.compile(make(Net), mesh, plan=preset, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step(i: int, model: Any = model, optimizer: Any = optimizer) -> None:
            model(*batch(i)).backward()
            optimizer.step(), optimizer.zero_grad()

        for i in range(3):
            step(i)
        if dist.get_rank() == rank:
            _spoil(model, optimizer, name, kind)
        found.append(raised(lambda: [step(i) for i in range(3, 9)]))
    return found


def _spoil(model: Any, optimizer: torch.optim.Optimizer, name: str, kind: str) -> None:
    tensor = model.get_parameter(name) if name != "calls" else model.calls
    if kind == "a moment":
        tensor = optimizer.state[tensor]["exp_avg"]
    words = local_of(tensor).detach().view(-1).view(torch.int64)
    if kind == "signs":
        words.bitwise_xor_(-(2**63))
    elif kind == "swapped":
        words[:2] = words[:2].flip(0)
    else:
        words[-1] ^= 1 << 45  # a smaller one may be rounded away


@pytest.mark.parametrize(
    "faults",
    [
        [("up.weight", 1, "a bit")],
        pytest.param(
            [("down.bias", 0, "a moment"), ("calls", 1, "a bit"), ("up.bias", 1, "signs"), ("up.weight", 0, "swapped")],
            marks=pytest.mark.wide,
        ),
    ],
)
def test_what_differs_stops_the_job(faults: list[tuple[str, int, str]]) -> None:
    for errors in run_on_ranks(_train, (2,), "data_parallel", faults, world_size=2, keep_after_error=True):
        for (name, _, kind), error in zip(faults, errors, strict=True):
            call = 7 if kind == "a moment" else 5  # the first is that of compile()'s example inputs
            assert error.startswith("RankMismatchError: the ranks have different values of what must be equal"), error
            assert f"before call {call}:" in error and f"\n  {name}: ranks 0, 1 do not have the same" in error


@pytest.mark.wide
@pytest.mark.parametrize(
    ("shape", "plan", "name", "rank", "expected"),
    [
        ((4,), "data_parallel", "up.weight", 2, "rank 2 differs from 0, 1, 3"),
        ((4,), "fsdp", "calls", 0, "rank 0 differs from 1, 2, 3"),
        ((2, 2), "tensor_parallel", "up.weight", 3, "ranks 1, 3 do not have the same"),
        ((2, 2), "tensor_parallel", "down.bias", 1, "rank 1 differs from 0, 2, 3"),
        ((2, 2), "pipeline", "up.weight", 1, "ranks 0, 1 do not have the same"),
        ((2, 2), "pipeline, as the last axis", "up.weight", 2, "ranks 0, 2 do not have the same"),
    ],
)  # fmt: skip
def test_the_rank_that_differs_is_named(shape: Any, plan: str, name: str, rank: int, expected: str) -> None:
    for (error,) in run_on_ranks(_train, shape, plan, [(name, rank, "a bit")], world_size=4):
        assert f"\n  {name}: {expected}" in error, error


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.int8, torch.complex64])
@pytest.mark.parametrize("device", ["cpu", "any other"])
def test_every_element_counts(dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device != "cpu":
        monkeypatch.setattr(Replicas, "_number", Replicas._weighted_sum)
    model = nn.Module()
    replicas = Replicas(model, lambda: None, 1)  # type: ignore[arg-type, return-value]
    model.register_buffer("x", torch.arange(70_001).remainder(100).to(dtype)[1:].view(7, -1).t())
    numbers = {replicas.digests()}
    for i in (0, 4_000, 69_999):
        view = model.x.t().reshape(-1)  # type: ignore[operator, union-attr]
        view[i] = not view[i] if dtype == torch.bool else view[i] + 8
        model.x = view.view(7, -1).t()
        numbers.add(replicas.digests())
    assert len(numbers) == 4


def test_tensors_without_a_dimension_or_an_element_have_a_number() -> None:
    replicas = Replicas(nn.Module(), lambda: None, 1)  # type: ignore[arg-type, return-value]
    tensors = [torch.ones(()), torch.ones(0, 3), torch.ones(3, 0, dtype=torch.bfloat16), torch.ones(2, 1)]
    assert all(-(2**63) <= int(replicas._number(x)) < 2**63 for x in tensors)


def test_a_number_of_calls_that_is_none() -> None:
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match="check_replicas must be a positive number of calls"):
            autoparallel.compile(nn.Linear(2, 2), check_replicas=wrong)  # type: ignore[arg-type]
