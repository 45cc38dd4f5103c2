"""``compile(..., clip_grad_norm=...)``: clipping in the optimizer's step, against one process; every limit bites."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.runtime.support import Net, batch, compiled_pair, gradients_off, off, parameters_off, raised, run_on_ranks
from tests.runtime.test_clipping import MESHES, backward

STEPPING: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9}),
    "SGD foreach": (torch.optim.SGD, {"lr": 0.5, "foreach": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.1, "eps": 0.1}),  # a large eps, so that the coefficient shows
    "AdamW fused": (torch.optim.AdamW, {"lr": 0.1, "eps": 0.1, "fused": True}),
}


def _step(shape: tuple[int, ...], plan: str, dtype: torch.dtype) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for limit in (0.05, {"up.*": 0.05, "*": 0.02}):
        model, plain = compiled_pair(Net, *shape, plan=plan, dtype=dtype, clip_grad_norm=limit)
        results[f"{limit} before"] = model.last_grad_norm is None
        start = copy.deepcopy(plain.state_dict())
        for name, (make, options) in STEPPING.items():
            model.load_state_dict(start), plain.load_state_dict(start)
            mine, theirs = make(model.parameters(), **options), make(plain.parameters(), **options)
            for step in range(3):
                x, y = batch(step, dtype=dtype)
                for m in (model, plain):
                    m.zero_grad()
                with model.no_sync():
                    (model(x, y) / 2).backward()
                if step < 2:
                    (model(x, y) / 2).backward()  # the last window is left to the step to reduce
                (F.mse_loss(plain(x), y) * (0.5 if step == 2 else 1.0)).backward()
                if isinstance(limit, dict):
                    expected = [
                        nn.utils.clip_grad_norm_([q for n, q in plain.named_parameters() if n.startswith(part)], bound)
                        for part, bound in ((("up.",), 0.05), (("norm.", "down."), 0.02))
                    ]
                else:
                    expected = [nn.utils.clip_grad_norm_(plain.parameters(), limit)]
                assert all(e > 0.05 for e in expected)
                mine.step(), theirs.step()
                found = model.last_grad_norm
                found = list(found.values()) if isinstance(found, dict) else [found]
                key = f"{limit} {name} {step}"
                results[f"{key} norm"] = max(off(a, b) for a, b in zip(found, expected, strict=True))
                results[f"{key} parameters"] = parameters_off(model, plain)
                results[f"{key} gradients"] = gradients_off(model, plain)
            results[f"{limit} {name} left"] = not hasattr(mine, "grad_scale")
    return results


@pytest.mark.slow_where(lambda shape: shape != (2,))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_a_step_clips_as_one_process_does(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """In float32 the fused optimizer divides the gradients itself; in float64 its float32 scale would be too coarse."""
    tolerance = 1e-9 if dtype == torch.float64 else 1e-5
    for results in run_on_ranks(_step, shape, MESHES[shape], dtype, world_size=math.prod(shape)):
        wrong = {k: v for k, v in results.items() if not (v is True or (v is not False and v < tolerance))}
        assert not wrong, wrong


def _folded() -> dict[str, Any]:
    """Who multiplies the gradients."""
    results: dict[str, Any] = {}
    for dtype in (torch.float32, torch.float64):
        model, _ = compiled_pair(Net, 2, plan="data_parallel", dtype=dtype, clip_grad_norm=0.05)
        every, some = list(model.parameters()), list(model.up.parameters())
        for name, optimizer in {
            "fused": torch.optim.AdamW(every, fused=True),
            "foreach": torch.optim.AdamW(every, foreach=True),
            "fused, of a part": torch.optim.AdamW(some, fused=True),
        }.items():
            x, y = batch(0, dtype=dtype)
            model.zero_grad()
            model(x, y).backward()
            scales: list[bool] = []
            _spy(optimizer, scales)
            optimizer.step()
            results[f"{dtype} {name}"] = scales
    return results


def _spy(optimizer: Any, scales: list[bool]) -> None:
    """Notes whether a scale is there when the gradients are looked for."""
    original = optimizer._init_group

    def init_group(*args: Any, **kwargs: Any) -> Any:
        scales.append(getattr(optimizer, "grad_scale", None) is not None)
        return original(*args, **kwargs)

    optimizer._init_group = init_group


def test_the_coefficient_is_folded_into_a_fused_step() -> None:
    for found in run_on_ranks(_folded, world_size=2):
        assert found == {
            "torch.float32 fused": [True],
            "torch.float32 foreach": [False],
            "torch.float32 fused, of a part": [False],
            "torch.float64 fused": [False],
            "torch.float64 foreach": [False],
            "torch.float64 fused, of a part": [False],
        }


def _two_optimizers_and_closures() -> dict[str, Any]:
    import autoparallel

    results: dict[str, Any] = {}
    model, plain = compiled_pair(Net, 2, 2, plan="fsdp", clip_grad_norm=0.05)
    pairs = [
        [torch.optim.SGD(m.up.parameters(), lr=0.5), torch.optim.SGD([*m.norm.parameters(), *m.down.parameters()], 0.3)]
        for m in (model, plain)
    ]
    for step in range(2):
        backward(model, plain, step)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        with autoparallel.count_traffic() as sent:
            pairs[0][0].step(), pairs[0][1].step()
        pairs[1][0].step(), pairs[1][1].step()
        results[f"one norm for both {step}"] = float(sent.total_collectives != 1)
        results[f"norm {step}"] = off(model.last_grad_norm, expected)
        results[f"parameters {step}"] = parameters_off(model, plain)
    for name, make in {
        "SGD": lambda q: torch.optim.SGD(q, lr=0.5),
        "LBFGS": lambda q: torch.optim.LBFGS(q, lr=0.1, max_iter=3),
    }.items():
        mine, theirs = make(model.parameters()), make(plain.parameters())
        for step in range(2):
            x, y = batch(step)

            def theirs_closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                plain.zero_grad()
                loss = F.mse_loss(plain(x), y)
                loss.backward()
                nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
                return loss

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                model.zero_grad()
                loss = model(x, y)
                loss.backward()
                return loss

            if step:
                mine.step(closure=closure), theirs.step(closure=theirs_closure)
            else:
                mine.step(closure), theirs.step(theirs_closure)
            results[f"{name} closure {step}"] = parameters_off(model, plain)
    return results


def test_two_optimizers_share_one_norm_and_closures_are_clipped() -> None:
    for results in run_on_ranks(_two_optimizers_and_closures, world_size=4):
        assert all(far < 1e-9 for far in results.values()), results


def _scaled() -> dict[str, float]:
    """A fused optimizer under a gradient scaler's attributes, as torch.amp.GradScaler sets them."""
    results: dict[str, float] = {}
    model, plain = compiled_pair(Net, 2, plan="data_parallel", dtype=torch.float32, clip_grad_norm=0.05)
    mine, theirs = (torch.optim.AdamW(m.parameters(), lr=0.1, eps=0.1, fused=True) for m in (model, plain))
    for found in (0.0, 1.0):
        x, y = batch(0, dtype=torch.float32)
        model.zero_grad(), plain.zero_grad()
        (model(x, y) * 1024.0).backward()
        F.mse_loss(plain(x), y).backward()
        mine.grad_scale, mine.found_inf = torch.tensor(1024.0), torch.tensor(found)
        mine.step()
        results[f"kept {found}"] = float(not (mine.grad_scale.item() == 1024.0 and mine.found_inf.item() == found))
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        if not found:
            theirs.step()
        results[f"norm {found}"] = off(model.last_grad_norm, expected)
        results[f"parameters {found}"] = parameters_off(model, plain)
    return results


def test_the_norm_is_unscaled_under_a_gradient_scaler() -> None:
    for results in run_on_ranks(_scaled, world_size=2):
        assert all(far < 1e-5 for far in results.values()), results


def _other_norms() -> dict[str, float]:
    from autoparallel import ClipGradNorm

    results: dict[str, float] = {}
    for p in (1.0, 3.0, math.inf):
        model, plain = compiled_pair(Net, 2, plan="fsdp", clip_grad_norm=ClipGradNorm(0.01, norm_type=p))
        mine, theirs = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, plain))
        backward(model, plain, 0)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.01, norm_type=p)
        assert expected > 0.01
        mine.step(), theirs.step()
        results[f"norm {p}"] = off(model.last_grad_norm, expected)
        results[f"parameters {p}"] = parameters_off(model, plain)
    return results


def test_a_step_clips_by_other_norms() -> None:
    for results in run_on_ranks(_other_norms, world_size=2):
        assert all(far < 1e-9 for far in results.values()), results


def _not_finite(policy: str, fused: bool) -> dict[str, Any]:
    from autoparallel import ClipGradNorm

    results: dict[str, Any] = {}
    limits = ClipGradNorm(0.05, nonfinite=policy)  # type: ignore[arg-type]
    model, plain = compiled_pair(Net, 2, plan="data_parallel", dtype=torch.float32, clip_grad_norm=limits)
    mine, theirs = (torch.optim.AdamW(m.parameters(), lr=0.1, eps=0.1, fused=fused) for m in (model, plain))
    for step in range(3):
        model.zero_grad(), plain.zero_grad()
        x, y = batch(step, dtype=torch.float32)
        if step == 1:
            x[0, 0] = math.nan
            model(x, y).backward()
            results["error"] = raised(mine.step)
        else:
            model(x, y).backward()
            F.mse_loss(plain(x), y).backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
            mine.step(), theirs.step()
        results[f"parameters {step}"] = parameters_off(model, plain)
    return results


@pytest.mark.slow_where(lambda policy, fused: fused == (policy == "skip"))
@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_a_step_on_what_is_not_finite_changes_nothing(policy: str, fused: bool) -> None:
    for results in run_on_ranks(_not_finite, policy, fused, world_size=2):
        error = results.pop("error")
        assert ("nan" in error) == (policy == "raise") == bool(error), error
        assert all(far < 1e-5 for far in results.values()), results


def _on_the_way() -> dict[str, float]:
    """How many elements are looked at when a step clips, and whether what was written to is measured again."""
    results: dict[str, float] = {}
    for plan in ("data_parallel", "fsdp"):
        model, plain = compiled_pair(Net, 2, plan=plan, clip_grad_norm=0.05)
        mine, theirs = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, plain))
        for changed in (False, True):
            model.zero_grad(), plain.zero_grad()
            for window in model.accumulate(2, [batch(0), batch(1)]):
                for x, y in window:
                    model(x, y).backward()
            for i in range(2):
                (F.mse_loss(plain(batch(i)[0]), batch(i)[1]) / 2).backward()
            if changed:
                for m in (model, plain):
                    m.up.weight.grad.mul_(3)
            expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
            looked = _elements_looked_at(model._clipper)
            mine.step(), theirs.step()
            held = sum(p.to_local().numel() for p in model.parameters())
            results[f"{plan} {changed} looked at"] = float(looked != [held * changed])
            results[f"{plan} {changed} norm"] = off(model.last_grad_norm, expected)
            results[f"{plan} {changed} parameters"] = parameters_off(model, plain)
    return results


def _elements_looked_at(clipper: Any) -> list[int]:
    """Notes from now on how many elements have a norm that is known already, and how many are looked at."""
    looked: list[int] = []
    known = type(clipper)._known_norms

    def note(grads: Any, p: float) -> Any:
        found = known(clipper, grads, p)
        looked.append(sum(g.to_local().numel() for g in grads.values()) - sum(size for _, size, _ in found))
        return found

    clipper._known_norms = note
    return looked


def test_norms_are_taken_on_the_way() -> None:
    for results in run_on_ranks(_on_the_way, world_size=2):
        assert all(far < 1e-9 for far in results.values()), results
