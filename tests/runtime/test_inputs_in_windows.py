"""What goes in and out of calls in a window of `accumulate()`: gradients of inputs, and those that hooks are given."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autoparallel
from tests.runtime.support import gradients_off, make, off, run_on_ranks


class Halves(nn.Module):
    """Two calls a microbatch, the second of what the first one makes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 4)

    def encode(self, x: Tensor) -> Tensor:
        return self.up(x).tanh()

    def forward(self, z: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.down(z), target, ignore_index=-1)


class Around(nn.Module):
    """A state that goes through the model twice."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.step(x).tanh()


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    """Four rows each, with labels of which more and more are ignored."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for i in range(count):
        x = torch.randn(4, 6, generator=generator, dtype=torch.float64)
        target = torch.randint(0, 4, (4,), generator=generator)
        target[: min(i, 3)] = -1
        made.append((x, target))
    return made


def _two_calls(plan: str) -> float:
    """A full window and one that ends early."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = autoparallel.compile(make(Halves), mesh, plan=plan, forward_methods=("encode",))
    plain, worst = make(Halves), 0.0
    for window in model.accumulate(3, batches(5), weights="equal"):
        seen = []
        for x, target in window:
            model(model.encode(x) * 2, target).backward()
            seen.append((x, target))
        for x, target in seen:
            (plain(plain.encode(x) * 2, target) / len(seen)).backward()
        worst = max(worst, gradients_off(model, plain))
        model.zero_grad(), plain.zero_grad()
    return worst


@pytest.mark.parametrize("plan", ["data_parallel", "fsdp"])
def test_a_call_of_what_another_makes_is_weighed_once(plan: str) -> None:
    assert max(run_on_ranks(_two_calls, plan, world_size=2)) < 1e-9


def _around() -> float:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model, plain = autoparallel.compile(make(Around), mesh, plan="fsdp"), make(Around)
    for window in model.accumulate(3, batches(3), weights="equal"):
        for x, _ in window:
            model(model(model(x))).square().mean().backward()
    for x, _ in batches(3):
        (plain(plain(plain(x))).square().mean() / 3).backward()
    return gradients_off(model, plain)


def test_a_state_that_goes_around_is_weighed_once() -> None:
    assert max(run_on_ranks(_around, world_size=2)) < 1e-9


def _inputs(weights: str) -> tuple[float, float]:
    """How far the gradients of inputs are off those of a plain loop, and the model's off those of one batch."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model, plain = autoparallel.compile(make(Halves), mesh, plan="fsdp"), make(Halves)
    inputs = [(torch.cat([x, x[:, :2]], 1).requires_grad_(), target) for x, target in batches(3)]
    copies = [x.detach().clone().requires_grad_() for x, _ in inputs]
    for window in model.accumulate(3, inputs, weights=weights):
        for z, target in window:
            model(z, target).backward()
    for copy, (_, target) in zip(copies, inputs, strict=True):
        plain(copy, target).backward()
    worst = max(off(z.grad, copy.grad) for (z, _), copy in zip(inputs, copies, strict=True))  # type: ignore[arg-type]
    plain.zero_grad()
    if weights == "equal":
        (sum(plain(z.detach(), target) for z, target in inputs) / 3).backward()  # type: ignore[union-attr]
    else:
        plain(*(torch.cat(parts).detach() for parts in zip(*inputs, strict=True))).backward()
    return worst, gradients_off(model, plain)


@pytest.mark.parametrize("weights", ["loss", "equal"])
def test_inputs_have_the_gradients_of_the_loss(weights: str) -> None:
    for inputs, parameters in run_on_ranks(_inputs, weights, world_size=2):
        assert inputs < 1e-9 and parameters < 1e-9


class Hooked(Halves):
    """A hook that is not linear."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = self.up(x)
        if h.requires_grad:
            h.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        return F.cross_entropy(self.down(h.tanh()), target, ignore_index=-1)


def _hooked() -> tuple[str, float]:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    model, plain, message = autoparallel.compile(make(Hooked), mesh, plan="fsdp"), make(Hooked), ""

    def go(weights: str) -> None:
        for window in model.accumulate(3, batches(3), weights=weights):
            for x, target in window:
                model(x, target).backward()

    try:
        go("loss")
    except ValueError as error:
        message = str(error)
    model.zero_grad()
    go("equal")
    for x, target in batches(3):
        (plain(x, target) / 3).backward()
    return message, gradients_off(model, plain)


def test_a_hook_is_given_what_a_loop_by_hand_gives_it() -> None:
    ((message, off_by),) = run_on_ranks(_hooked, world_size=1)
    assert "a hook at" in message and "test_inputs_in_windows.py" in message and "What to change" in message
    assert off_by < 1e-9
