"""The global gradient norm: true for every placement, p and size of number, with one all-reduce.

Gradients are written by hand here, so that nothing leans on a right backward: each parameter's gradient is a known
tensor, of which each rank takes its part. The reference is computed in float64 from the whole tensors.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.runtime.support import Net, batch, compiled_pair, make, mesh_of, off, raised, run_on_ranks, whole

INF = float("inf")
NORMS = (1.0, 2.0, 3.0, 0.5, INF)

# parameter name -> its layout at rest on the mesh (2, 2): groups that are sharded over different axes
LAYOUTS = {
    "up.weight": "S0,S1",
    "up.bias": "I,S0",
    "norm.weight": "I,I",
    "norm.bias": "S0,I",
    "down.weight": "S1,S1",
    "down.bias": "S0,S0",
}


def reference(gradients: dict[str, Tensor], p: float) -> float:
    """The p-norm of all elements together, computed without overflow."""
    flat = torch.cat([g.double().flatten() for g in gradients.values()]).abs()
    largest = flat.max()
    if not torch.isfinite(largest) or largest == 0 or math.isinf(p):
        return float(largest)
    return float(largest * (flat / largest).pow(p).sum().pow(1 / p))


def made_gradients(model: nn.Module, scale: float, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        name: (torch.randn(p.shape, generator=generator, dtype=torch.float64) * scale).to(dtype)
        for name, p in model.named_parameters()
    }


def with_gradients(dtype: torch.dtype, scale: float) -> tuple[Any, dict[str, Tensor]]:
    """A compiled model whose parameters lie in all of ``LAYOUTS``, each with a known gradient."""
    model = _laid_out(dtype)
    gradients = made_gradients(model, scale, dtype)
    for name, p in model.named_parameters():
        assert isinstance(p, DTensor)
        p.grad = distribute_tensor(gradients[name].clone(), p.device_mesh, p.placements, src_data_rank=None)
    return model, gradients


_MODELS: dict[torch.dtype, Any] = {}


def _laid_out(dtype: torch.dtype) -> Any:
    import json

    import autoparallel
    from autoparallel.plan import Plan

    if dtype not in _MODELS:
        x, y = batch(0, dtype=dtype)
        searched, _ = compiled_pair(Net, 2, 2, dtype=dtype, plan="data_parallel", example_inputs=(x, y))
        data = json.loads(searched.plan.to_json())
        for name, layout in LAYOUTS.items():
            data["parameters"][name] = {"at_rest": layout, "gather": "per_microbatch"}
        plan = Plan.from_json(json.dumps(data))
        _MODELS[dtype] = autoparallel.compile(
            make(Net, dtype), mesh_of(2, 2), loss_fn=F.mse_loss, plan=plan, example_inputs=(x, y)
        )
    return _MODELS[dtype]


def _norms() -> dict[str, Any]:
    results: dict[str, Any] = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for scale in (1.0, 1e20, 1e-25) if dtype != torch.bfloat16 else (1.0,):
            for p in NORMS:
                model, gradients = with_gradients(dtype, scale)
                expected = reference(gradients, p)
                limit = 0.25 * expected
                calls: list[str] = []
                with _counted(calls):
                    norm = model.clip_grad_norm_(limit, norm_type=p)
                factor = min(1.0, limit / (expected + 1e-6))
                clipped = max(
                    (whole(q.grad).double() - gradients[n].double() * factor).abs().max().item()
                    for n, q in model.named_parameters()
                )
                results[f"{dtype} {scale:g} p={p:g}"] = {
                    "norm": norm.item() / expected - 1,
                    "clipped": clipped / expected,
                    "calls": calls,
                    "dtype": str(norm.dtype),
                    "bits": norm.double().numpy().tobytes(),
                }
    return results


class _counted:
    """Lists the collectives that are started through ``torch.distributed``."""

    NAMES = (
        "all_reduce",
        "all_gather_into_tensor",
        "all_gather_single",
        "reduce_scatter_tensor",
        "broadcast",
        "all_gather",
    )

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def __enter__(self) -> None:
        self.saved = {name: getattr(dist, name) for name in self.NAMES if hasattr(dist, name)}
        for name, function in self.saved.items():

            def counted(*args: Any, _name: str = name, _function: Any = function, **kwargs: Any) -> Any:
                self.calls.append(_name)
                return _function(*args, **kwargs)

            setattr(dist, name, counted)

    def __exit__(self, *_: object) -> None:
        for name, function in self.saved.items():
            setattr(dist, name, function)


@pytest.fixture(scope="module")
def norms() -> list[dict[str, Any]]:
    return run_on_ranks(_norms, world_size=4)


CASES = [f"{d} {s:g} p={p:g}" for d in (torch.float64, torch.float32) for s in (1.0, 1e20, 1e-25) for p in NORMS]
CASES += [f"{torch.bfloat16} 1 p={p:g}" for p in NORMS]


@pytest.mark.parametrize("case", CASES)
def test_the_norm_is_true(case: str, norms: list[dict[str, Any]]) -> None:
    tolerance = 1e-12 if "float64" in case else 1e-5
    for found in (rank[case] for rank in norms):
        assert abs(found["norm"]) < tolerance, f"off by {found['norm']:.2e}"
        assert abs(found["clipped"]) < (1e-2 if "bfloat16" in case else tolerance), f"off by {found['clipped']:.2e}"
        assert found["calls"] == ["all_reduce"], "one collective"
        assert found["bits"] == norms[0][case]["bits"], "the same bits on every rank"
        assert found["dtype"] == ("torch.float64" if "float64" in case else "torch.float32")


# ----------------------------------------------------------------------------------------------- nan, inf, and nothing


def _unusual() -> dict[str, Any]:
    results: dict[str, Any] = {}
    rank = dist.get_rank()
    for value in (math.nan, INF, -INF):
        for p in (2.0, 1.0, INF):
            for name in ("up.weight", "norm.weight"):  # of a shard, and of a replica that the sum does not count
                model, _ = with_gradients(torch.float32, 1.0)
                parameter = dict(model.named_parameters())[name]
                local = parameter.grad.to_local()
                if rank == 3:
                    local.view(-1)[0] = value
                refused = raised(lambda m=model, q=p: m.clip_grad_norm_(1.0, norm_type=q, error_if_nonfinite=True))
                norm = model.clip_grad_norm_(1.0, norm_type=p)
                results[f"{value} p={p:g} {name}"] = (refused, repr(norm.item()))
    for p in NORMS:
        model, _ = with_gradients(torch.float32, 0.0)
        norm = model.clip_grad_norm_(1.0, norm_type=p)
        results[f"zero p={p:g}"] = (norm.item(), max(whole(q.grad).abs().max().item() for q in model.parameters()))
        small, gradients = with_gradients(torch.float32, 1.0)
        small.clip_grad_norm_(1e9, norm_type=p)
        results[f"untouched p={p:g}"] = max(off(q.grad, gradients[n]) for n, q in small.named_parameters())
    return results


@pytest.fixture(scope="module")
def unusual() -> list[dict[str, Any]]:
    return run_on_ranks(_unusual, world_size=4)


@pytest.mark.parametrize("name", ["up.weight", "norm.weight"])
@pytest.mark.parametrize("p", [2.0, 1.0, INF])
@pytest.mark.parametrize("value", [math.nan, INF, -INF])
def test_what_is_not_finite_on_one_rank_is_seen_by_all(value: float, p: float, name: str, unusual) -> None:
    seen = [rank[f"{value} p={p:g} {name}"] for rank in unusual]
    assert len(set(seen)) == 1, seen
    refused, norm = seen[0]
    assert refused.startswith("RuntimeError") and "error_if_nonfinite=False" in refused, refused
    assert norm == "nan" if math.isnan(value) else norm in ("nan", "inf"), norm


@pytest.mark.parametrize("p", NORMS)
def test_gradients_of_zero_and_gradients_below_the_limit_stay(p: float, unusual) -> None:
    for rank in unusual:
        assert rank[f"zero p={p:g}"] == (0.0, 0.0)
        assert rank[f"untouched p={p:g}"] == 0.0


def _loss_not_finite(value: float) -> list[Any]:
    """A target that is not finite, in one row, which one rank alone has."""
    model, _ = compiled_pair(plan="data_parallel")
    x, y = batch(0)
    y[7, 0] = value
    loss = model(x, y)
    loss.backward()
    before = [p.grad.to_local().isfinite().all().item() for p in model.parameters()]
    norm = model.clip_grad_norm_(1.0)
    return [repr(loss.item()), before, repr(norm.item()), raised(lambda: _clip_strictly(model, value, p=INF))]


def _clip_strictly(model: Any, value: float, p: float) -> None:
    model.zero_grad()
    x, y = batch(0)
    y[7, 0] = value
    model(x, y).backward()
    model.clip_grad_norm_(1.0, norm_type=p, error_if_nonfinite=True)


@pytest.mark.parametrize("value", [math.nan, INF])
def test_a_loss_that_is_not_finite_is_treated_alike_by_all(value: float) -> None:
    seen = run_on_ranks(_loss_not_finite, value, world_size=2)
    assert seen[0] == seen[1]
    loss, _, norm, refused = seen[0]
    assert loss == ("nan" if math.isnan(value) else "inf")
    assert not math.isfinite(float(norm)) and refused.startswith("RuntimeError")


def _tied_and_odd() -> dict[str, float]:
    """Tied weights count once; shards may be empty; a mesh of one rank needs no collective."""
    from tests.runtime.test_gradients import Tied, tied_batch, tied_loss

    results: dict[str, float] = {}
    for plan in ("fsdp", "tensor_parallel"):
        model, plain = compiled_pair(Tied, 2, 2, plan=plan, loss_fn=tied_loss)
        model(*tied_batch(0)).backward()
        x, y = tied_batch(0)
        tied_loss(plain(x), y).backward()
        for p in NORMS:
            mine = model.clip_grad_norm_(1e9, norm_type=p)
            results[f"tied {plan} p={p:g}"] = off(mine, nn.utils.clip_grad_norm_(plain.parameters(), 1e9, norm_type=p))
    return results


@pytest.mark.wide
def test_a_tied_weight_counts_once() -> None:
    for results in run_on_ranks(_tied_and_odd, world_size=4):
        assert all(far < 1e-9 for far in results.values()), results


# ----------------------------------------------------------------------------------------- the arithmetic, by itself


@pytest.mark.parametrize("p", NORMS)
def test_an_empty_shard_adds_nothing(p: float) -> None:
    from autoparallel.runtime.norms import norm

    full = torch.tensor([3.0, -4.0])
    parts = [[full], [torch.empty(0)], [torch.empty(0, 5), torch.empty(3, 0)]]
    totals = [norm.local_sum(part, p) for part in parts]
    assert [t.item() for t in totals[1:]] == [0.0, 0.0]
    found = norm.finish_norm(norm.pack(totals, totals, p, [[0, 1, 2]]), p)
    assert math.isclose(found.item(), reference({"": full}, p), rel_tol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_sums_are_wide(dtype: torch.dtype) -> None:
    """Ten thousand numbers whose sum of squares a narrow accumulator cannot hold."""
    from autoparallel.runtime.norms import norm

    x = torch.full((10_000,), 100.0, dtype=dtype)
    assert math.isclose(norm.local_sum([x], 2.0).item(), 1e8, rel_tol=1e-6)


def test_dtypes_may_be_mixed() -> None:
    from autoparallel.runtime.norms import norm

    parts = [torch.full((4,), 2.0, dtype=d) for d in (torch.float16, torch.float32, torch.float64, torch.bfloat16)]
    assert norm.local_sum(parts, 2.0).item() == 64.0 and norm.local_sum(parts, INF).item() == 2.0


@pytest.mark.parametrize("value", [math.nan, INF, -INF])
@pytest.mark.parametrize("p", NORMS)
def test_local_sums_pass_on_what_is_not_finite(value: float, p: float) -> None:
    from autoparallel.runtime.norms import norm

    total = norm.local_sum([torch.tensor([1.0, value]), torch.ones(3)], p)
    assert not math.isfinite(total.item()) and (not math.isnan(value) or math.isnan(total.item()))
    packed = norm.pack([torch.zeros((), dtype=torch.float64)], [total], p, [[0]])  # of a replica not counted
    assert packed[1, 0] > 0, "the flag travels even where the sum does not count"


def test_clipping_equals_torch_on_plain_tensors() -> None:
    """The same coefficient as ``torch.nn.utils.clip_grad_norm_``, epsilon included."""
    from autoparallel.runtime.norms import norm

    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([3.0, 4.0, 12.0])
    expected = nn.utils.clip_grad_norm_([parameter], 0.5)
    found = norm.clip_coefficient(expected.double(), 0.5) * torch.tensor([3.0, 4.0, 12.0])
    assert torch.allclose(found.float(), parameter.grad, rtol=1e-7)
