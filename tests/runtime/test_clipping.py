"""Norms of groups, limits of groups, and what happens to norms that are not finite.

Every parity case is float64 against the plain model in one process, with a limit that bites.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.runtime.support import (
    Net,
    batch,
    compiled_pair,
    gradients_off,
    off,
    parameters_off,
    raised,
    run_on_ranks,
    whole,
)
from tests.runtime.test_norm import INF, NORMS

MESHES = {(2,): "data_parallel", (2, 2): "tensor_parallel", (4,): "fsdp"}


def backward(model: Any, plain: nn.Module, step: int = 0, value: float | None = None) -> None:
    """The same gradients on both; ``value`` goes into the last row, which one rank alone has."""
    x, y = batch(step)
    if value is not None:
        y[7, 0] = value
    for m in (model, plain):
        m.zero_grad()
    model(x, y).backward()
    F.mse_loss(plain(x), y).backward()


def norm_of(plain: nn.Module, prefix: str | tuple[str, ...], p: float = 2.0) -> Tensor:
    return nn.utils.get_total_norm([q.grad for n, q in plain.named_parameters() if n.startswith(prefix)], p)


# ---------------------------------------------------------------------------------------------------- groups and limits


def _groups(shape: tuple[int, ...], plan: str) -> dict[str, float]:
    results: dict[str, float] = {}
    model, plain = compiled_pair(Net, *shape, plan=plan)
    backward(model, plain)
    groups = {"all": "*", "up": ["up.*"], "biases": ["*.bias"], "ends": ["up.*", "down.weight"]}
    for p in NORMS:
        before = copy.deepcopy({n: whole(q.grad) for n, q in model.named_parameters()})
        norms = model.grad_norm(p, groups)
        expected = {
            "all": norm_of(plain, "", p),
            "up": norm_of(plain, "up.", p),
            "biases": nn.utils.get_total_norm([q.grad for n, q in plain.named_parameters() if n.endswith("bias")], p),
            "ends": norm_of(plain, ("up.", "down.weight"), p),
        }
        assert list(norms) == list(groups)
        results |= {f"{key} p={p:g}": off(norms[key], expected[key]) for key in groups}
        results[f"scalar p={p:g}"] = off(model.grad_norm(p), expected["all"])
        results[f"untouched p={p:g}"] = max(off(q.grad, before[n]) for n, q in model.named_parameters())
        modules = model.grad_norm(p, "module")
        assert list(modules) == ["up", "norm", "down"]
        results |= {f"module {k} p={p:g}": off(v, norm_of(plain, k, p)) for k, v in modules.items()}
        each = model.grad_norm(p, groups="parameter")
        results |= {f"{n} p={p:g}": off(each[n], norm_of(plain, n, p)) for n, _ in plain.named_parameters()}
    for parameter in model.up.parameters():
        parameter.grad = None
    results["without a gradient"] = model.grad_norm(groups={"up": "up.*"})["up"].item()
    return results


@pytest.mark.wide_where(lambda shape: shape != (2, 2))
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_norms_of_groups_are_those_of_one_process(shape: tuple[int, ...]) -> None:
    for results in run_on_ranks(_groups, shape, MESHES[shape], world_size=math.prod(shape)):
        assert all(far < 1e-9 for far in results.values()), results


LIMITS: dict[str, dict[str, float]] = {
    "two": {"up.*": 0.1, "*": 0.05},
    "the first that matches counts": {"*.bias": 0.01, "up.*": 0.1, "*": 1e9},
    "some have none": {"down.*": 0.02},
    "one is zero": {"norm.*": 0.0, "*": 0.05},
}
PARTS = {
    "two": [("up.",), ("norm.", "down.")],
    "the first that matches counts": [
        ("up.bias", "norm.bias", "down.bias"), ("up.weight",), ("norm.weight", "down.weight")
    ],
    "some have none": [("down.",)],
    "one is zero": [("norm.",), ("up.", "down.")],
}  # fmt: skip


def _limits(shape: tuple[int, ...], plan: str) -> dict[str, float]:
    results: dict[str, float] = {}
    model, plain = compiled_pair(Net, *shape, plan=plan)
    for p in NORMS:
        for case, limits in LIMITS.items():
            backward(model, plain)
            norms = model.clip_grad_norm_(limits, p)
            assert list(norms) == list(limits)
            for part, (key, limit) in zip(PARTS[case], limits.items(), strict=True):
                chosen = [q for n, q in plain.named_parameters() if n.startswith(part)]
                expected = nn.utils.clip_grad_norm_(chosen, limit, p)
                assert limit == 1e9 or expected > limit, "a limit that does not bite shows nothing"
                results[f"{case} {key} p={p:g}"] = off(norms[key], expected)
            results[f"{case} clipped p={p:g}"] = gradients_off(model, plain)
        backward(model, plain)
        groups = [
            ([m.get_submodule(name) for name in names], limit)
            for m in (model, plain)
            for names, limit in ((("up",), 0.1), (("norm",), None), (("down",), 0.02))
        ]
        lists = [{"params": [q for m in some for q in m.parameters()], "max_norm": limit} for some, limit in groups]
        optimizers = [torch.optim.SGD(part, lr=0.1) for part in (lists[:3], lists[3:])]
        norms = model.clip_grad_norm_(optimizers[0], p)
        for norm, group in zip(norms, optimizers[1].param_groups, strict=True):
            limit = INF if group["max_norm"] is None else group["max_norm"]
            expected = nn.utils.get_total_norm([q.grad for q in group["params"]], p)
            if limit != INF:
                assert expected > limit
                nn.utils.clip_grad_norm_(group["params"], limit, p)
            results[f"optimizer p={p:g} {limit}"] = off(norm, expected)
        results[f"optimizer clipped p={p:g}"] = gradients_off(model, plain)
    return results


@pytest.mark.wide_where(lambda shape: shape != (2, 2))
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_limits_of_groups_are_kept_as_in_one_process(shape: tuple[int, ...]) -> None:
    for results in run_on_ranks(_limits, shape, MESHES[shape], world_size=math.prod(shape)):
        assert all(far < 1e-9 for far in results.values()), results


# -------------------------------------------------------------------------------------------- norms that are not finite

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.1}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 0.1, "fused": True}),
    "Adam amsgrad": (torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.1, "amsgrad": True}),
}


def _skip(name: str) -> dict[str, Any]:
    """Steps 0, 1 and 3 are good; in step 2 one rank has a NaN. The plain model leaves step 2 out."""
    results: dict[str, Any] = {}
    make, options = OPTIMIZERS[name]
    for value in (math.nan, INF):
        model, plain = compiled_pair(Net, 2, 2, plan="fsdp")
        mine, theirs = make(model.parameters(), **options), make(plain.parameters(), **options)
        for step in range(4):
            bad = step == 2
            backward(model, plain, step, value if bad else None)
            norm = model.clip_grad_norm_(0.1, nonfinite="skip")
            if value == INF:  # clipping again, now zeros, takes nothing back
                model.clip_grad_norm_(0.1, nonfinite="skip")
            if bad:
                results[f"{value} norm"] = repr(norm.item())
                results[f"{value} zero"] = all(bool((p.grad.to_local() == 0).all()) for p in model.parameters())
                before = copy.deepcopy(_state(mine))
                mine.step()
                results[f"{value} state"] = all(torch.equal(a, b) for a, b in zip(_state(mine), before, strict=True))
                results[f"{value} gradients"] = all(p.grad is not None for p in model.parameters())
            else:
                for _ in range(1 + (value == INF)):
                    nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
                theirs.step(), mine.step()
            results[f"{value} step {step}"] = parameters_off(model, plain)
        results[f"{value} left"] = [k for k in ("found_inf", "grad_scale") if hasattr(mine, k)]
    return results


def _state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    tensors = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    return [whole(t) for t in tensors]


@pytest.mark.slow_where(lambda name: name != "AdamW fused")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_step_changes_nothing(name: str) -> None:
    """Neither weight decay nor momentum nor the count of steps: the run goes on as if the step had not been."""
    for rank in run_on_ranks(_skip, name, world_size=4):
        for value in (math.nan, INF):
            assert rank[f"{value} norm"] in ("nan", "inf")
            assert rank[f"{value} zero"] and rank[f"{value} state"] and rank[f"{value} gradients"], rank
            assert max(rank[f"{value} step {s}"] for s in range(4)) < 1e-9, rank
            assert rank[f"{value} left"] == []


def _fused_skip_reads_nothing() -> list[str]:
    """What an optimizer is given instead of an answer."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Reads(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.found: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "local_scalar_dense" in str(func) or "is_nonzero" in str(func):
                self.found.append(str(func))
            return func(*args, **(kwargs or {}))

    model, _ = compiled_pair(Net, 2, plan="data_parallel", dtype=torch.float32, clip_grad_norm=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x, y = batch(0, dtype=torch.float32)
    model(x, y).backward()
    with Reads() as reads:
        model.clip_grad_norm_(0.1)
        model.clip_grad_norm_({"up.*": 0.1, "*": 0.2}, INF, nonfinite="skip")
        model.grad_norm(groups="module")
        model.clip_grad_value_(0.1)
        optimizer.step()
    with Reads() as control:
        bool(model.grad_norm() > 0)
    assert control.found, "the mode sees reads"
    return reads.found


def test_clipping_and_a_fused_step_look_at_no_value() -> None:
    assert run_on_ranks(_fused_skip_reads_nothing, world_size=2) == [[], []]


def _raise() -> dict[str, Any]:
    model, plain = compiled_pair(Net, 2, 2, plan="fsdp")
    results: dict[str, Any] = {}
    for p in (2.0, INF):
        for options in ({"error_if_nonfinite": True}, {"nonfinite": "raise"}):
            backward(model, plain, value=math.nan)
            before = [whole(q.grad) for q in model.parameters()]
            text = raised(lambda p=p, o=options: model.clip_grad_norm_(0.1, p, **o))
            after = [whole(q.grad) for q in model.parameters()]
            same = all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, after, strict=True))
            results[f"{p:g} {options}"] = (text, same)
    backward(model, plain)
    results["finite"] = off(
        model.clip_grad_norm_(0.1, nonfinite="raise"), nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    )
    return results


def test_raise_is_alike_on_all_ranks_and_leaves_the_gradients() -> None:
    seen = run_on_ranks(_raise, world_size=4)
    assert all(rank == seen[0] for rank in seen)
    assert seen[0].pop("finite") < 1e-9
    for text, same in seen[0].values():
        assert text.startswith("RuntimeError: the global norm of order") and "'skip'" in text and same
