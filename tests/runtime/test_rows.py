"""Rows that each rank brings itself: which the plan wants, samplers, and batches that do not divide."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import DataLoader, TensorDataset

from autoparallel.runtime.calls.rows import Rows, RowSampler
from tests.runtime.support import Net, gradients_off, make, off, raised, run_on_ranks, whole

CASES: dict[str, tuple[str, tuple[int, ...], tuple[str, ...]]] = {
    "fsdp": ("fsdp", (2,), ("dp",)),
    "tensor parallel": ("tensor_parallel", (2, 2), ("dp", "tp")),
    "auto": ("auto", (2, 2), ("dp", "tp")),
    "a pipeline": ("fsdp", (2, 2), ("pp", "dp")),
}
SAMPLES, BATCH = 13, 8


@functools.cache
def mesh_of_case(case: str) -> DeviceMesh:
    return init_device_mesh("cpu", CASES[case][1], mesh_dim_names=CASES[case][2])


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, 8, generator=generator, dtype=torch.float64)
    return x, 3 * torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)


def pair(case: str, **options: Any) -> tuple[Any, Any]:
    import autoparallel

    model = make(Net)
    plain = copy.deepcopy(model)
    pipeline = autoparallel.Pipeline("1f1b", 2) if case == "a pipeline" else None
    options = {"plan": CASES[case][0], "loss_fn": F.mse_loss, "pipeline": pipeline, **options}
    return autoparallel.compile(model, mesh_of_case(case), **options), plain


def _epoch(case: str) -> dict[str, Any]:
    """An epoch of rows per rank, the last batch uneven, and what the sampler remembers."""
    results: dict[str, Any] = {}
    model, plain = pair(case)
    data = samples()
    sampler = model.sampler(TensorDataset(*data), BATCH, shuffle=True, seed=1, drop_last=case == "a pipeline")
    results["no plan"] = raised(lambda: next(iter(sampler)))
    model.prepare(*[t[:BATCH] for t in data])
    results["kinds"], results["read"], order = [], [], []
    for number, batch in enumerate(DataLoader(TensorDataset(*data), batch_sampler=sampler)):
        x, y = model.local_rows(batch)
        results["kinds"].append(type(x).__name__), results["read"].append(len(batch[0]))
        loss, expected = model(x, y), F.mse_loss(plain(whole(x)), whole(y))
        loss.backward(), expected.backward()
        results[f"loss {number}"] = off(loss, expected)
        if case != "a pipeline":  # the gradients of other stages lie elsewhere
            results[f"gradients {number}"] = gradients_off(model, plain)
        norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
        results[f"norm {number}"] = off(model.grad_norm(), norm)
        model.zero_grad(), plain.zero_grad()
        order += whole(x)[:, 0].tolist()
    expected_order = data[0][torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(1)), 0]
    results["order"] = order == expected_order[: len(order)].tolist()
    if case == "tensor parallel":  # the two ranks of "tp" are replicas
        results["mixed"] = raised(lambda: model.local_rows([t[: 1 + dist.get_rank() % 2] for t in data]))
    return results


@pytest.mark.wide_where(lambda case: case != "fsdp")
@pytest.mark.slow_where(lambda case: case == "auto")
@pytest.mark.parametrize("case", CASES)
def test_an_epoch_of_rows_per_rank(case: str) -> None:
    size = torch.Size(CASES[case][1]).numel()
    for results in run_on_ranks(_epoch, case, world_size=size):
        assert "there is no plan yet" in results["no plan"]
        numbers = {k: v for k, v in results.items() if isinstance(v, float)}
        assert all(v < 1e-9 for v in numbers.values()), numbers
        assert results["order"], "samples were left out, or came in another order"
        if case in ("fsdp", "tensor parallel"):
            assert len(numbers) == 6 and results["kinds"] == ["DTensor", "Tensor"]  # the second is uneven
            assert results["read"][0] == BATCH // 2 and results["read"][1] < 4
        if case == "tensor parallel":
            assert "ranks that want the same rows have [1, 2] of them" in results["mixed"]


def _odd(case: str) -> dict[str, float]:
    """Batches of any size in evaluation, and in training but in a pipeline, before there is a plan and after."""
    x, y = samples()
    results: dict[str, float] = {}
    for first in (1, BATCH):
        model, plain = pair(case)
        model.eval(), plain.eval()
        for rows in (first, 5, 1, SAMPLES, BATCH):
            with torch.no_grad():
                results[f"{first}, {rows}: output"] = off(model(x[:rows]), plain(x[:rows]))
                expected = F.mse_loss(plain(x[:rows]), y[:rows])
                results[f"{first}, {rows}: loss"] = off(model(x[:rows], y[:rows]), expected)
        model.train(), plain.train()
        for rows in (BATCH,) if case == "a pipeline" else (BATCH, 5):
            model(x[:rows], y[:rows]).backward()
            F.mse_loss(plain(x[:rows]), y[:rows]).backward()
            norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
            results[f"{first}, {rows}: norm"] = off(model.grad_norm(), norm)
            model.zero_grad(), plain.zero_grad()
    return results


@pytest.mark.wide_where(lambda case: case != "fsdp")
@pytest.mark.slow_where(lambda case: case == "auto")
@pytest.mark.parametrize("case", CASES)
def test_batches_of_any_size(case: str) -> None:
    for results in run_on_ranks(_odd, case, world_size=torch.Size(CASES[case][1]).numel()):
        assert len(results) >= 18 and all(v < 1e-9 for v in results.values()), results


def test_parts_cover_a_batch_once() -> None:
    for size in range(20):
        parts = [list(Rows((0,), 3, index).part(size)) for index in range(3)]
        assert list(itertools.chain(*parts)) == list(range(size))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_sampler_goes_on_where_it_was_on_any_mesh() -> None:
    def epoch(ranks: int, state: dict[str, int] | None = None, batches: int | None = None) -> tuple[list[int], Any]:
        found: list[int] = []
        samplers = [RowSampler(lambda i=i: Rows((0,), ranks, i), 23, 4, True, 7, False) for i in range(ranks)]
        for sampler in samplers:
            if state is not None:
                sampler.load_state_dict(state)
        for number, parts in enumerate(zip(*samplers, strict=True)):
            found += itertools.chain(*parts)
            if number + 1 == batches:
                break
        return found, samplers[0].state_dict()

    every, after = epoch(2)
    assert sorted(every) == list(range(23)) and after == {"epoch": 1, "seed": 7, "sample": 0}
    begun, state = epoch(2, batches=3)
    assert state == {"epoch": 0, "seed": 7, "sample": 12}
    assert begun + epoch(3, state)[0] == every
    assert epoch(1, after)[0] != every, "the second epoch has an order of its own"


def test_what_a_sampler_refuses() -> None:
    sampler = RowSampler(lambda: Rows((0,), 4, 0), 9, 8, False, 0, False)
    assert "a batch of 1 samples leaves ranks without any" in raised(lambda: list(sampler))
    assert len(RowSampler(lambda: Rows((0,), 4, 0), 9, 8, False, 0, True)) == 1
    assert "batch_size must be positive" in raised(lambda: RowSampler(lambda: Rows((), 1, 0), 9, 0, False, 0, True))
