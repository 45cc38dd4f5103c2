"""Hooks that users register on parameters see complete gradients, once for a step, as in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import autoparallel
from tests.runtime.support import (
    Net,
    batch,
    compiled_pair,
    gradients_off,
    make,
    off,
    parameters_off,
    run_on_ranks,
    whole,
)

PLANS = ["data_parallel", "fsdp", "tensor_parallel"]
Pair = tuple[Any, nn.Module]


class Tied(nn.Module):
    """Two uses of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.back = nn.Linear(8, 8), nn.Linear(8, 8)
        self.back.weight = self.up.weight
        self.down = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.back(torch.tanh(self.up(x))))


def _alone(plan: str, register: Callable[[nn.Module], None], when: str, build: Any = Net, **options: Any) -> Pair:
    """The compiled model and the plain one, on one rank, with the same hooks."""
    plain, model = make(build), make(build)
    register(plain)
    if when == "before":
        register(model)
    compiled = autoparallel.compile(model, loss_fn=F.mse_loss, plan=plan, **options)
    if when == "after":
        register(compiled)
    return compiled, plain


def _step(model: Any, plain: nn.Module, number: int = 0) -> None:
    x, y = batch(number)
    model(x, y).backward()
    F.mse_loss(plain(x), y).backward()


def _clamp(parameters: nn.Module, seen: list[float] | None = None) -> None:
    """Hooks that are not linear, of which one returns nothing and one multiplies by a plain mask."""
    for i, p in enumerate(parameters.parameters()):
        p.register_hook(lambda g: g.clamp(-0.02, 0.02))
        if p.ndim == 2:
            mask = (torch.arange(p.numel()) % 3 == 0).double().view(p.shape)
            p.register_hook(lambda g, mask=mask: g * mask)
        if i == 0 and seen is not None:
            p.register_hook(lambda g: seen.append(float(whole(g).sum())))


@pytest.mark.wide_where(lambda plan: plan != "fsdp")
@pytest.mark.parametrize("build", [Net, Tied])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("plan", PLANS)
def test_hooks_see_and_replace_the_gradient(plan: str, when: str, build: Any) -> None:
    model, plain = _alone(plan, _clamp, when, build)
    for number in range(2):  # the second gradient is added to the first
        _step(model, plain, number)
        assert gradients_off(model, plain) < 1e-12
    unhooked = make(build)
    F.mse_loss(unhooked(batch()[0]), batch()[1]).backward()
    assert gradients_off(unhooked, plain) > 1e-3


@pytest.mark.wide_where(lambda plan: plan != "fsdp")
@pytest.mark.parametrize("plan", PLANS)
def test_a_hook_between_forward_and_backward_and_one_removed(plan: str) -> None:
    handles: list[Any] = []
    model, plain = _alone(
        plan, lambda m: handles.extend(p.register_hook(lambda g: 3 * g) for p in m.parameters()), "before"
    )
    for handle in handles:
        handle.remove()
    x, y = batch()
    losses = model(x, y), F.mse_loss(plain(x), y)
    _clamp(model), _clamp(plain)
    for loss in losses:
        loss.backward()
    assert gradients_off(model, plain) < 1e-12


@pytest.mark.wide_where(lambda plan: plan != "fsdp")
@pytest.mark.parametrize("plan", PLANS)
def test_one_backward_of_two_calls_is_one_gradient(plan: str) -> None:
    seen: tuple[list[float], list[float]] = ([], [])
    calls = iter(seen)
    model, plain = _alone(plan, lambda m: _clamp(m, next(calls)), "after")
    (x, y), (u, v) = batch(0), batch(1)
    (model(x, y) + model(u, v)).backward()
    (F.mse_loss(plain(x), y) + F.mse_loss(plain(u), v)).backward()
    assert gradients_off(model, plain) < 1e-12
    assert len(seen[0]) == len(seen[1]) == 1


@pytest.mark.wide_where(lambda plan: plan != "fsdp")
@pytest.mark.parametrize("plan", PLANS)
def test_under_no_sync_the_last_backward_shows_the_sum(plan: str) -> None:
    model, plain = _alone(plan, _clamp, "after")
    # The second time with gradients that are there, which hooks do not see again.
    for numbers in (range(3), range(3, 6)):
        with model.no_sync():
            for number in numbers[:2]:
                model(*batch(number)).backward()
        model(*batch(numbers[2])).backward()
        total = [F.mse_loss(plain(x), y) for x, y in map(batch, numbers)]
        sum(total[1:], total[0]).backward()
        assert gradients_off(model, plain) < 1e-12


def test_what_hooks_keep_and_what_they_return_stays_as_it_was() -> None:
    seen: list[Tensor] = []
    fixed = torch.ones(4, dtype=torch.float64)

    def register(m: nn.Module) -> None:
        parameters = dict(m.named_parameters())
        parameters["up.weight"].register_hook(seen.append)
        parameters["down.bias"].register_hook(lambda g: fixed)

    model, plain = _alone("data_parallel", register, "after")
    for number in range(3):  # each backward adds to .grad
        _step(model, plain, number)
    assert gradients_off(model, plain) < 1e-12
    model.clip_grad_norm_(1e-3)
    assert len(seen) == 6 and max(off(whole(a), b) for a, b in zip(seen[::2], seen[1::2], strict=True)) < 1e-12
    assert fixed.tolist() == [1.0] * 4
    seen.clear()
    model.zero_grad()
    for window in model.accumulate(2, [batch(n) for n in range(2)]):
        for x, y in window:
            model(x, y).backward()
    kept = whole(seen[0]).clone()
    model.clip_grad_norm_(1e-3)
    assert off(whole(seen[0]), kept) == 0.0 and fixed.tolist() == [1.0] * 4


@pytest.mark.wide_where(lambda plan: plan != "fsdp")
@pytest.mark.parametrize("plan", PLANS)
def test_in_a_window_hooks_come_after_the_division(plan: str) -> None:
    steps: list[Tensor] = []

    def register(m: nn.Module) -> None:
        _clamp(m)
        next(m.parameters()).register_post_accumulate_grad_hook(lambda p: steps.append(whole(p.grad)))

    model, plain = _alone(plan, register, "after")
    for window in model.accumulate(3, [batch(n) for n in range(3)]):
        for x, y in window:
            model(x, y).backward()
    losses = [F.mse_loss(plain(x), y) for x, y in (batch(n) for n in range(3))]
    (sum(losses[1:], losses[0]) / 3).backward()
    assert gradients_off(model, plain) < 1e-12
    assert len(steps) == 2 and off(*steps) < 1e-12


@pytest.mark.wide_where(lambda plan: plan != "fsdp")
@pytest.mark.parametrize("plan", PLANS)
def test_hooks_that_follow_the_accumulation_go_on_from_before_compile(plan: str) -> None:
    handles: list[Any] = []

    def halve(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(0.5)

    def register(m: nn.Module) -> None:
        handles.extend(p.register_post_accumulate_grad_hook(halve) for p in m.parameters())

    model, plain = _alone(plan, register, "before")
    for number in range(2):
        _step(model, plain, number)
        assert gradients_off(model, plain) < 1e-12
    for handle in handles:
        handle.remove()
    _step(model, plain, 2)
    assert gradients_off(model, plain) < 1e-12


def _step_in_backward(parameters: nn.Module) -> None:
    optimizers = {p: torch.optim.AdamW([p], lr=0.1) for p in parameters.parameters()}

    def step(p: Tensor) -> None:
        optimizers[p].step()  # type: ignore[index]
        optimizers[p].zero_grad()  # type: ignore[index]

    for p in parameters.parameters():
        p.register_post_accumulate_grad_hook(step)


@pytest.mark.wide_where(lambda plan: plan != "fsdp")
@pytest.mark.parametrize("build", [Net, Tied])
@pytest.mark.parametrize("plan", PLANS)
def test_an_optimizer_steps_in_the_backward(plan: str, build: Any) -> None:
    model, plain = _alone(plan, _step_in_backward, "after", build)
    for number in range(3):
        _step(model, plain, number)
    assert parameters_off(model, plain) < 1e-12
    assert parameters_off(make(build), plain) > 0.1
    assert all(p.grad is None for p in model.parameters())


def test_an_optimizer_in_the_backward_clips_the_whole_norm() -> None:
    model, plain = _alone("fsdp", lambda m: None, "after", clip_grad_norm=0.01)
    _step_in_backward(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for number in range(3):
        _step(model, plain, number)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    assert parameters_off(model, plain) < 1e-9


def test_a_hook_that_returns_another_shape_is_refused() -> None:
    model, _ = _alone("fsdp", lambda m: None, "after")
    model.up.weight.register_hook(lambda g: g.sum())
    with pytest.raises(RuntimeError, match=r"the hook .*lambda.* on up\.weight .*\(8, 8\).*What to change"):
        model(*batch()).backward()
    model.zero_grad()
    assert not model._store._hooks._complete


def test_hooks_stay_with_parameters_that_are_materialised() -> None:
    with torch.device("meta"):
        model = Net().double()
    calls: list[int] = []
    model.up.weight.register_hook(lambda g: calls.append(1))
    compiled = autoparallel.compile(model, loss_fn=F.mse_loss, plan="fsdp")
    compiled(*batch()).backward()
    assert calls == [1]


# ------------------------------------------------------------------------------------------------------ several ranks


def _on_ranks(plan: str) -> tuple[float, float, float]:
    model, plain = compiled_pair(plan=plan)
    _clamp(model), _clamp(plain)
    for p in (*model.parameters(), *plain.parameters()):  # a sum over the whole gradient, and another layout
        p.register_hook(lambda g: g / (1 + g.square().sum()))
    for p in model.parameters():
        p.register_hook(lambda g: g.redistribute(placements=[Replicate()]) if isinstance(g, DTensor) else g)
        p.register_hook(lambda g: g.full_tensor() * 2)
    for p in plain.parameters():
        p.register_hook(lambda g: g * 2)
    for number in range(2):
        _step(model, plain, number)
    gradients = gradients_off(model, plain)
    model.zero_grad(), plain.zero_grad()
    with model.no_sync():
        model(*batch(3)).backward()
    model(*batch(4)).backward()
    (F.mse_loss(plain(batch(3)[0]), batch(3)[1]) + F.mse_loss(plain(batch(4)[0]), batch(4)[1])).backward()
    accumulated = gradients_off(model, plain)
    with model.no_sync():
        model(*batch(5)).backward()
    model.clip_grad_norm_(1e9)  # completes what no backward has
    F.mse_loss(plain(batch(5)[0]), batch(5)[1]).backward()
    accumulated = max(accumulated, gradients_off(model, plain))
    model.zero_grad(), plain.zero_grad()
    _step_in_backward(model), _step_in_backward(plain)
    for number in range(3):
        _step(model, plain, number)
    return gradients, accumulated, parameters_off(model, plain)


@pytest.mark.wide_where(lambda plan: plan != "fsdp")
@pytest.mark.slow_where(lambda plan: plan == "data_parallel")
@pytest.mark.parametrize("plan", PLANS)
def test_hooks_on_two_ranks(plan: str) -> None:
    for differences in run_on_ranks(_on_ranks, plan, world_size=2):
        assert max(differences) < 1e-9, differences


class Layers(nn.Module):
    """Three layers, to be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.down = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.down(x)


@functools.cache
def _pipeline_mesh() -> Any:
    return init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))


def _in_a_pipeline() -> float:
    plain, model = make(Layers), make(Layers)
    compiled = autoparallel.compile(model, _pipeline_mesh(), loss_fn=F.mse_loss)
    compiled.prepare(*batch())
    _clamp(compiled), _clamp(plain)
    for number in range(2):
        _step(compiled, plain, number)
    theirs = dict(plain.named_parameters())
    held = {n: p for n, p in compiled.named_parameters() if p.grad is not None}
    assert 0 < len(held) < len(theirs)
    return max(off(p.grad.to_local(), theirs[n].grad) for n, p in held.items())


def test_hooks_in_a_pipeline() -> None:
    assert max(run_on_ranks(_in_a_pipeline, world_size=2)) < 1e-9


def _penalty(model: nn.Module) -> Tensor:
    return sum((p.square().sum() for p in model.parameters()), start=torch.zeros((), dtype=torch.float64))


def _beside(plan: str, microbatches: int = 1) -> float:
    """What the loop computes of parameters beside the model, with the model's loss, alone, and under ``no_sync()``."""
    model, plain = compiled_pair(plan=plan, microbatches=microbatches)
    seen: tuple[list[Tensor], list[Tensor]] = ([], [])
    for m, values in zip((model, plain), seen, strict=True):
        _clamp(m)
        for p in m.parameters():
            p.register_post_accumulate_grad_hook(lambda p, values=values: values.append(whole(p.grad)))
    model.prepare(*batch())
    worst = 0.0
    for number in range(2):  # the second is added to the first
        x, y = batch(number)
        (model(x, y) + _penalty(model)).backward()
        (F.mse_loss(plain(x), y) + _penalty(plain)).backward()
        worst = max(worst, gradients_off(model, plain))
        for m in (model, plain):
            _penalty(m).backward()
        worst = max(worst, gradients_off(model, plain))
    taken = [torch.autograd.grad(_penalty(m), [*m.parameters()]) for m in (model, plain)]
    worst = max(worst, *map(off, *taken))
    assert len(seen[0]) == len(seen[1])
    by_sum = [sorted(values, key=lambda v: (v.shape, float(v.sum()))) for values in seen]
    worst = max(worst, *map(off, *by_sum))
    for m in (model, plain):
        m.zero_grad()
    with model.no_sync():
        (model(x, y) + _penalty(model)).backward()
    (model(x, y) + _penalty(model)).backward()
    total = [F.mse_loss(plain(x), y) + _penalty(plain) for _ in range(2)]
    (total[0] + total[1]).backward()
    return max(worst, gradients_off(model, plain))


@pytest.mark.wide_where(lambda plan: plan != "fsdp")
@pytest.mark.parametrize("plan", PLANS)
def test_hooks_see_what_the_loop_computes_of_parameters(plan: str) -> None:
    assert max(run_on_ranks(_beside, plan, world_size=2)) < 1e-12


def test_hooks_see_what_the_loop_computes_beside_microbatches() -> None:
    assert max(run_on_ranks(_beside, "fsdp", 2, world_size=2)) < 1e-12


class Sometimes(Net):
    """A layer that not every call uses."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = nn.Linear(8, 4)

    def forward(self, x: Tensor, use: bool = True) -> Tensor:
        return super().forward(x) + self.beside(x) if use else super().forward(x)


@pytest.mark.wide
def test_hooks_on_what_a_call_leaves_out_are_not_called() -> None:
    seen: tuple[list[str], list[str]] = ([], [])
    calls = iter(seen)

    def register(model: nn.Module) -> None:
        names = next(calls)
        for name, p in model.named_parameters():
            p.register_hook(lambda g, name=name: names.append(name))
            p.register_post_accumulate_grad_hook(lambda p, name=name: names.append(f"after {name}"))

    model, plain = _alone("fsdp", register, "after", Sometimes)
    x, y = batch()
    for use in (True, False):
        model(x, use, y).backward()
        F.mse_loss(plain(x, use), y).backward()
    assert sorted(seen[0]) == sorted(seen[1])
