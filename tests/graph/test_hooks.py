"""Hooks of tensors and modules: they run in the backward, in their order, on whole gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoparallel
from tests.distributed import run_distributed
from tests.graph.programs import batches, make_model, refusal, require_as_eager, require_equal, train, train_on_ranks

LOG: list[Any] = []


class Base(nn.Module):
    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("average", torch.zeros(4))
        self.factor = 2.0


def _unit(grad: Tensor) -> Tensor:
    """Not linear in the gradient: what it makes of summands does not add up."""
    LOG.append(float(grad.norm()))
    return grad / grad.norm()


class InOrder(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h.register_hook(lambda grad: grad + 1)
        h.register_hook(_unit)
        h.register_hook(lambda grad: None)
        return self.down(h).square().sum()


class ReadByAll(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        before = h * 3
        h.register_hook(lambda grad: grad * (before > 0))
        return (self.down(h) + before).square().sum()


class OfTheModule(Base):
    def scaled(self, grad: Tensor) -> Tensor:
        return grad * self.factor

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        rows, weight = x.shape[0], self.average + 1
        h.register_hook(self.scaled)
        h.register_hook(lambda grad, weight=weight: grad / rows * weight)
        h.register_hook(partial(torch.mul, other=2))
        return self.down(h).square().sum()


class ChangedLater(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h.register_hook(lambda grad: grad * 2)
        h = h.add_(1).exp()
        h.register_hook(lambda grad: grad + 1)
        return self.down(h).square().sum()


class OfAPart(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        left, right = h.chunk(2, -1)
        with torch.no_grad():
            left.register_hook(lambda grad: grad * 5)
        return self.down(h).sum() + (left * right).square().sum()


@pytest.mark.wide_where(lambda make: make not in (InOrder, ReadByAll))
@pytest.mark.parametrize("make", [InOrder, ReadByAll, OfTheModule, ChangedLater, OfAPart])
def test_a_tensors_hooks_run_as_in_eager(make: Callable[[], nn.Module]) -> None:
    LOG.clear()
    require_as_eager(make)
    assert LOG[: len(LOG) // 2] == pytest.approx(LOG[len(LOG) // 2 :])
    assert len(LOG) == (6 if make is InOrder else 0)


def test_the_comparison_sees_a_dropped_hook() -> None:
    class Plain(Base):
        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(x)).square().sum()

    with pytest.raises(AssertionError):
        require_equal(train(make_model(InOrder), batches()), train(make_model(Plain), batches()))


class OnAParameter(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.up.weight.register_hook(lambda grad: grad * 2)
        return self.up(x).sum()


class Removed(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h.register_hook(lambda grad: grad * 2).remove()
        return h.sum()


class Retained(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h.retain_grad()
        return h.sum()


class OfTheGraph(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h.grad_fn.register_hook(lambda *grads: None)  # type: ignore[union-attr]
        return h.sum()


class OfSeveral(Base):
    def forward(self, x: Tensor) -> Tensor:
        h, g = self.up(x), self.down(x)
        torch.autograd.graph.register_multi_grad_hook((h, g), LOG.append)
        return (h * g).sum()


class WithoutGradient(Base):
    def forward(self, x: Tensor) -> Tensor:
        x.detach().register_hook(lambda grad: grad)
        return self.up(x).sum()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (OnAParameter, "a hook is registered on a parameter or an input"),
        (Removed, "a tensor's hook is removed inside of forward"),
        (Retained, "(retain_grad)"),
        (OfTheGraph, "the graph of autograd is read (grad_fn)"),
        (OfSeveral, "torch hooks several tensors at once"),
        (WithoutGradient, "cannot register a hook on a tensor that doesn't require gradient"),
    ],
)
def test_is_refused(make: Callable[[], nn.Module], says: str) -> None:
    message = refusal(make)
    assert says in message
    assert "test_hooks.py" in message


# ------------------------------------------------------------------------------------------ modules' backward hooks


def _double(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
    LOG.append(float(grad_output[0].norm()))
    return tuple(None if g is None else g * 2 for g in grad_input)


def _unit_before(module: nn.Module, grad_output: Any) -> Any:
    return tuple(None if g is None else g / g.norm() for g in grad_output)


class Plain(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh()).square().sum()


def _hooked() -> nn.Module:
    model = Plain()
    model.down.register_full_backward_hook(_double)
    model.down.register_full_backward_pre_hook(_unit_before)
    model.up.register_full_backward_hook(_double_nothing)
    return model


def _double_nothing(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
    assert grad_input == (None,)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, a: Tensor, b: Tensor, places: Tensor, flag: bool = True) -> Any:
        return a * self.weight + b, b.detach(), places + 1, None


class WithMixed(Base):
    def __init__(self) -> None:
        super().__init__()
        self.mixed = Mixed()

    def forward(self, x: Tensor) -> Tensor:
        a, b, places, _ = self.mixed(self.up(x), x, torch.arange(4))
        return (self.down(a) * b + places).square().sum()


def _several() -> nn.Module:
    model = WithMixed()
    model.mixed.register_full_backward_hook(lambda m, i, o: tuple(None if g is None else g.clamp(-1, 1) for g in i))
    model.mixed.register_full_backward_pre_hook(_unit_before)
    return model


def _transforming() -> nn.Module:
    model = Plain()
    model.up.register_forward_hook(lambda m, args, out: out * 2)
    model.down.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    return model


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("make", [_hooked, _several, _transforming])
def test_a_modules_hooks_run_as_in_eager(make: Callable[[], nn.Module]) -> None:
    LOG.clear()
    require_as_eager(make)
    assert LOG[: len(LOG) // 2] == pytest.approx(LOG[len(LOG) // 2 :])


def test_a_hook_is_given_the_users_module() -> None:
    model = make_model(Plain)
    seen: list[nn.Module] = []
    model.down.register_full_backward_hook(lambda module, i, o: seen.append(module))
    autoparallel.compile(model)(batches()[0]).backward()
    assert seen == [model.down]
    assert type(seen[0]) is nn.Linear


def test_hooks_that_come_and_go_are_seen() -> None:
    plain = make_model(Plain)
    compiled = autoparallel.compile(copy.deepcopy(plain))
    require_equal(train(plain, batches()), train(compiled, batches()))
    handles = [m.down.register_full_backward_hook(_double) for m in (plain, compiled)]  # type: ignore[union-attr]
    require_equal(train(plain, batches()), train(compiled, batches()))
    assert len(compiled._kinds) == 2
    for handle in handles:
        handle.remove()
    require_equal(train(plain, batches()), train(compiled, batches()))
    assert len(compiled._kinds) == 2


def test_a_hook_of_the_old_kind_is_refused() -> None:
    def make() -> nn.Module:
        model = Plain()
        model.down.register_backward_hook(_double)
        return model

    assert "down has a hook of register_backward_hook" in refusal(make)


@pytest.mark.wide_where(lambda make, plan: (make, plan) != (_hooked, "fsdp"))
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("plan", ["fsdp", "tensor_parallel"])
@pytest.mark.parametrize("make", [InOrder, _hooked])
def test_runs_as_in_eager_on_two_ranks(make: Callable[[], nn.Module], plan: str) -> None:
    for plain, actual, _ in run_distributed(train_on_ranks, make, plan, world_size=2):
        require_equal(plain, actual)
