"""Optimizers that were made before `compile()`, as scripts that come from `torch.compile` or DDP make them, follow."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import autoparallel
from tests.runtime.support import (
    batch,
    gradients_off,
    make,
    mesh_of,
    muon_in_the_gradients_dtype,
    parameters_off,
    raised,
    run_on_ranks,
)


def _by_decay(model: nn.Module) -> list[dict[str, Any]]:
    """Groups as nanoGPT makes them: matrices decay, vectors do not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim > 1]


class _Own(torch.optim.Optimizer):
    """What nobody knows: a state as large as the parameter, one as large as its gradient's sum over rows, a number."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state, row = self.state[p], p.grad.sum(0, keepdim=True)
                if not state:
                    state.update(momentum=torch.zeros_like(p), row=torch.zeros_like(row), step=0)
                state["step"] += 1
                state["row"] = state["row"] * 0.5 + row
                state["momentum"].mul_(0.9).add_(p.grad).add_(state["row"], alpha=0.1)
                p.add_(state["momentum"], alpha=-group["lr"])


MADE: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW, groups": lambda m: torch.optim.AdamW(_by_decay(m), lr=0.01),
    "AdamW, fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.01),
    "Muon": lambda m: torch.optim.Muon(_matrices(m), lr=0.01),
    "one's own": lambda m: _Own(m.parameters()),
}


def _step(model: Any, plain: bool, optimizer: torch.optim.Optimizer, number: int) -> float:
    """A step of an ordinary loop; the norm, by parameters that the optimizer names."""
    x, y = batch(number)
    optimizer.zero_grad()
    (F.mse_loss(model(x), y) if plain else model(x, y)).backward()
    norm = nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.1)
    optimizer.step()
    return float(norm)


def _train(shape: tuple[int, ...], plan: str, stepped: bool) -> dict[str, float | str]:
    results: dict[str, float | str] = {}
    for case, made in MADE.items():
        source = make()
        plain = copy.deepcopy(source)
        optimizers = [made(source), made(plain)]
        schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in optimizers]
        with muon_in_the_gradients_dtype():
            if stepped:
                for m, o in zip((source, plain), optimizers, strict=True):
                    _step(m, True, o, 0)
            model = autoparallel.compile(source, mesh_of(*shape), loss_fn=F.mse_loss, plan=plan)
            worst = gradients_off(model, plain)  # those of the step before are there
            for number in range(1, 4):
                norms = [_step(m, m is plain, o, number) for m, o in zip((model, plain), optimizers, strict=True)]
                assert norms[1] > 0.1, "nothing is clipped"
                worst = max(worst, abs(norms[0] - norms[1]), gradients_off(model, plain), parameters_off(model, plain))
                [scheduler.step() for scheduler in schedulers]
        results[case] = worst
    return results


@pytest.mark.wide_where(lambda stepped: not stepped)
@pytest.mark.slow_where(lambda plan, stepped: plan == "tensor_parallel" and not stepped)
@pytest.mark.parametrize("stepped", [False, True], ids=["new", "stepped before"])
@pytest.mark.parametrize(
    ("shape", "plan"),
    [((2,), "fsdp"), pytest.param((2, 2), "tensor_parallel", marks=pytest.mark.wide)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_they_step_as_in_one_process(shape: tuple[int, ...], plan: str, stepped: bool) -> None:
    for rank in run_on_ranks(_train, shape, plan, stepped, world_size=torch.Size(shape).numel()):
        assert rank == dict.fromkeys(MADE, pytest.approx(0.0, abs=1e-9)), rank


def _accumulated() -> list[Any]:
    source = make()
    plain = copy.deepcopy(source)
    optimizer, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (source, plain))
    x, y = batch()
    for m in (source, plain):
        F.mse_loss(m(x), y).backward()
    model = autoparallel.compile(source, mesh_of(2), loss_fn=F.mse_loss, plan="fsdp")
    x, y = batch(1)
    model(x, y).backward(), F.mse_loss(plain(x), y).backward()
    off = [gradients_off(model, plain)]
    optimizer.step(), theirs.step()
    off.append(parameters_off(model, plain))
    optimizer.zero_grad()
    return [*off, all(p.grad is None for p in model.parameters())]


def test_gradients_of_the_plain_model_are_added_to() -> None:
    for gradients, parameters, none in run_on_ranks(_accumulated, world_size=2):
        assert gradients < 1e-12 and parameters < 1e-12 and none


def _kept() -> list[str]:
    messages = []
    for hide in (False, True):
        source = make()
        kept = list(source.parameters())
        optimizer = torch.optim.SGD(kept, lr=0.1)
        if hide:
            gc.freeze()
        model: Any = autoparallel.compile(source, mesh_of(2), loss_fn=F.mse_loss, plan="fsdp")
        gc.unfreeze()
        if not hide:
            optimizer = torch.optim.SGD(kept, lr=0.1)
        model(*batch()).backward()
        for action in (optimizer.step, lambda kept=kept: nn.utils.clip_grad_norm_(kept, 1.0)):
            try:
                action()
            except RuntimeError as error:
                messages.append(str(error))
    return messages


def test_those_that_cannot_follow_are_refused() -> None:
    """One that Python does not look at, and one that is made of the plain parameters afterwards; and clipping these,
    which have no gradients."""
    for messages in run_on_ranks(_kept, world_size=2):
        assert len(messages) == 4
        for message in messages:
            assert "model.parameters()" in message
        assert all("the optimizer holds a plain parameter" in message for message in messages[::2])
        assert all("the plain parameter up.weight is used" in message for message in messages[1::2])


class _Unfinished(torch.optim.SGD):
    def __init__(self) -> None:
        self.itself = self  # garbage that only a collection of cycles frees
        raise ValueError("no optimizer")


class _Wrapper(torch.optim.SGD):
    def __init__(self) -> None:
        pass

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        raise RuntimeError("nothing is wrapped yet")


def _beside_others() -> float:
    with contextlib.suppress(ValueError):
        _Unfinished()
    source = make()
    wrapper, plain = _Wrapper(), copy.deepcopy(source)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (source, plain)]
    model = autoparallel.compile(source, mesh_of(2), loss_fn=F.mse_loss, plan="fsdp")
    for m, optimizer in zip((model, plain), optimizers, strict=True):
        _step(m, m is plain, optimizer, 0)
    del wrapper
    return parameters_off(model, plain)


def test_optimizers_without_groups_are_left_alone() -> None:
    """Such as one whose constructor raised, which a traceback or a cycle keeps: it may be another model's."""
    for difference in run_on_ranks(_beside_others, world_size=2):
        assert difference < 1e-12


def _lbfgs(loaded: bool) -> float:
    """How far a run by LBFGS is off, whose states, one vector of all parameters, are from before ``compile()``."""
    source = make()
    plain = copy.deepcopy(source)

    def step(m: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
        x, y = batch(number)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(m(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)

    mine, theirs = (torch.optim.LBFGS(m.parameters(), lr=0.3, max_iter=3) for m in (source, plain))
    step(source, mine, 0), step(plain, theirs, 0)
    model: Any = autoparallel.compile(source, mesh_of(2), plan="fsdp")
    if loaded:
        mine = torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=3)
        mine.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for number in (1, 2):
        step(model, mine, number), step(plain, theirs, number)
    return parameters_off(model, plain)


@pytest.mark.parametrize("loaded", [False, True], ids=["stepped before", "loaded"])
def test_states_of_one_process_are_laid_out(loaded: bool) -> None:
    for difference in run_on_ranks(_lbfgs, loaded, world_size=2):
        assert difference < 1e-9


def _dealt_out() -> list[str]:
    messages = []
    for early in (True, False):
        source = make()
        optimizer = ZeroRedundancyOptimizer(source.parameters(), torch.optim.Adam, lr=0.01) if early else None
        model: Any = autoparallel.compile(source, mesh_of(2), loss_fn=F.mse_loss, plan="fsdp")
        optimizer = optimizer or ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
        model(*batch()).backward()
        messages.append(raised(optimizer.step))
    return messages


@pytest.mark.wide
def test_optimizers_that_deal_out_states_are_refused() -> None:
    for messages in run_on_ranks(_dealt_out, world_size=2):
        assert len(messages) == 2
        for message in messages:
            assert "ZeroRedundancyOptimizer deals parameters" in message and "the optimizer that it is given" in message


class _Masters(torch.optim.Optimizer):
    """Keeps parameters of half precision in float32, beside them."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.001})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                master = self.state[p].setdefault("master", p.float().clone())
                p.copy_(master.sub_(p.grad.float(), alpha=group["lr"]))


def _masters_of(registered: bool) -> tuple[torch.dtype, float]:
    """The dtype of such a state after steps before and after ``compile()``, and how far it is from one process's."""
    if registered:
        autoparallel.register_optimizer(_Masters, per="element")
    torch.manual_seed(0)
    plain = nn.Linear(8, 4, dtype=torch.bfloat16)
    model = copy.deepcopy(plain)
    optimizers = [_Masters(m.parameters()) for m in (plain, model)]
    x = torch.randn(8, 8, dtype=torch.bfloat16)

    def step(m: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        m(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for pair in zip((plain, model), optimizers, strict=True):
        step(*pair)
    compiled = autoparallel.compile(model, mesh_of(2), plan="fsdp")
    for _ in range(2):
        for pair in zip((plain, compiled), optimizers, strict=True):
            step(*pair)
    theirs, ours = (next(iter(optimizer.state.values()))["master"] for optimizer in optimizers)
    return ours.dtype, float((ours.full_tensor() - theirs).abs().max())


def _masters() -> list[tuple[torch.dtype, float]]:
    return [_masters_of(registered) for registered in (False, True)]


def test_states_keep_their_dtype() -> None:
    for result in run_on_ranks(_masters, world_size=2):
        assert all(dtype == torch.float32 and distance < 1e-5 for dtype, distance in result), result
