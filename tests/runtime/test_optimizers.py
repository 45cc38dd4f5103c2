"""Every optimizer of `torch.optim` for dense gradients steps on the compiled model as it does on the plain one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.runtime.support import (
    Net,
    batch,
    compiled_pair,
    gradients_off,
    muon_in_the_gradients_dtype,
    parameters_off,
    run_on_ranks,
)

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
    "Adam": {"lr": 0.01, "weight_decay": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01},
    "Adagrad": {"lr": 0.05, "lr_decay": 0.1},
    "RMSprop": {"lr": 0.01, "momentum": 0.5, "centered": True},
    "Adamax": {"lr": 0.01},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
    "Adadelta": {"lr": 0.5},
    "ASGD": {"lr": 0.05, "t0": 1},
    "Rprop": {"lr": 0.01},
    "Adafactor": {"lr": 0.01},
    "LBFGS": {"lr": 0.1, "max_iter": 3},
    "Muon": {"lr": 0.01},
}
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
SINGLE = ("LBFGS", "Muon")  # without a choice of implementations

CASES = {
    f"{name} foreach={flag}": (name, {"foreach": flag})
    for name in OPTIMIZERS
    if name not in SINGLE
    for flag in (False, True)
}
CASES |= {f"{name} fused": (name, {"fused": True}) for name in FUSED}
CASES |= {name: (name, {}) for name in SINGLE}


def _train(shape: tuple[int, ...], plan: str) -> dict[str, float | str]:
    model, plain = compiled_pair(Net, *shape, plan=plan)
    start = copy.deepcopy(plain.state_dict())
    results: dict[str, float | str] = {}
    for case, (name, options) in CASES.items():
        model.load_state_dict(start), plain.load_state_dict(start)
        try:
            with muon_in_the_gradients_dtype():
                results[case] = _three_steps(model, plain, name, {**OPTIMIZERS[name], **options})
        except Exception as error:  # noqa: BLE001 - the case that fails says so
            results[case] = f"{type(error).__name__}: {error}"
    return results


def _three_steps(model: Any, plain: nn.Module, name: str, options: dict[str, Any]) -> float:
    def used(m: nn.Module) -> list[nn.Parameter]:
        return [p for p in m.parameters() if name != "Muon" or p.ndim == 2]

    kind = getattr(torch.optim, name)
    optimizers = [kind(used(m), **options) for m in (model, plain)]
    worst = 0.0
    for step in range(3):
        x, y = batch(step)

        def compute(m: Any, x: Any = x, y: Any = y) -> Any:
            m.zero_grad()
            loss = m(x, y) if m is model else F.mse_loss(m(x), y)
            loss.backward()
            return loss

        for m, optimizer in zip((model, plain), optimizers, strict=True):
            if name == "LBFGS":
                optimizer.step(lambda m=m: compute(m))
            else:
                compute(m)
                optimizer.step()
        if name != "LBFGS":
            worst = max(worst, gradients_off(model, plain))
        worst = max(worst, parameters_off(model, plain))
    return worst


class Partly(Net):
    """A layer that is never used, so that its parameters have no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(4, 4)


def _without_some_gradients(plan: str) -> float:
    model, plain = compiled_pair(Partly, 2, plan=plan)
    return _three_steps(model, plain, "LBFGS", OPTIMIZERS["LBFGS"])


@pytest.mark.wide_where(lambda plan: plan != "fsdp")
@pytest.mark.parametrize("plan", ["fsdp", "tensor_parallel"])
def test_lbfgs_where_a_parameter_has_no_gradient(plan: str) -> None:
    assert max(run_on_ranks(_without_some_gradients, plan, world_size=2)) < 1e-9


@pytest.fixture(scope="module", params=[(2,), (2, 2)], ids=str)
def trained(request) -> list[dict[str, float | str]]:
    return run_on_ranks(_train, request.param, "fsdp", world_size=torch.Size(request.param).numel())


@pytest.mark.slow_where(lambda trained: trained != (2,))
@pytest.mark.parametrize("case", CASES)
def test_three_steps_equal_one_process(case: str, trained) -> None:
    found = [rank[case] for rank in trained]
    for rank, far in enumerate(found):
        assert isinstance(far, float) and far < 1e-9, f"rank {rank}: {far}"
