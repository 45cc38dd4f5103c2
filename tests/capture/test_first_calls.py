"""A call that fills what is empty: the calls after it have its program where that is theirs, and no other."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoparallel


class Config:
    """Holds what nobody has set yet."""

    kind: str | None
    limit: int | None

    def __init__(self) -> None:
        self.kind = self.limit = None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.factor, self.config = nn.Linear(4, 4, dtype=torch.float64), 1.0, Config()


class Classifier(Model):
    """Fills two values; what it computes is the same."""

    def forward(self, x: Tensor) -> Tensor:
        if self.config.kind is None:
            self.config.kind, self.config.limit = "regression", 3
        return self.linear(x).clamp(max=self.config.limit).mean()


class ReadsNoLimit(Model):
    """The later calls leave as it is what the first one has set beside."""

    def forward(self, x: Tensor) -> Tensor:
        if self.config.kind is None:
            self.config.kind, self.config.limit = "regression", 3
        return self.linear(x).mean()


class KeepsATensor(Model):
    mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.config.kind is None:
            self.config.kind, self.mask = "regression", torch.arange(4, dtype=x.dtype)
        return (self.linear(x) * self.mask).mean()


class ComputesAnother(Model):
    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        if self.config.kind is None:
            self.config.kind = "regression"
            h = 2 * h
        return h.square().mean()


class UsesAnother(Model):
    """The same operators, of another parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        linear = self.linear if self.config.kind is None else self.other
        self.config.kind = "regression"
        return linear(x).square().mean()


class WithoutGradients(Model):
    """The same operators, where no gradients are made."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        with torch.set_grad_enabled(self.config.kind is not None):
            weights = h.softmax(-1)
        self.config.kind = "regression"
        return (h * weights).square().mean()


class ReadsMore(Model):
    """What only the later calls read belongs to all of them."""

    def forward(self, x: Tensor) -> Tensor:
        factor = 1.0 if self.config.kind is None else self.factor
        self.config.kind = "regression"
        return (self.linear(x) * factor).square().mean()


class Gain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: float) -> Tensor:
        ctx.gain = gain
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad * ctx.gain, None


class AnotherBackward(Model):
    def forward(self, x: Tensor) -> Tensor:
        gain = 1.0 if self.config.kind is None else 2.0
        self.config.kind = "regression"
        return Gain.apply(self.linear(x), gain).square().mean()


class SetsAnother(Model):
    """Another attribute follows from it."""

    last: str

    def forward(self, x: Tensor) -> Tensor:
        self.last = "none" if self.config.kind is None else self.config.kind
        self.config.kind = "regression"
        return self.linear(x).square().mean()


def _double(model: Any, step: int) -> None:
    model.factor = 1.0 + step // 2


def _limit(model: Any, step: int) -> None:
    if step == 2:
        model.config.limit = 7


def _empty(model: Any, step: int) -> None:
    if step == 2:
        model.config.kind = model.config.limit = None


@pytest.mark.wide_where(lambda make, between: make not in (Classifier, KeepsATensor, SetsAnother) or between is _limit)
@pytest.mark.parametrize(
    ("make", "between", "kinds"),
    [
        (Classifier, None, 1),
        (Classifier, _empty, 1),
        (Classifier, _limit, 2),
        (ReadsNoLimit, None, 1),
        (ReadsNoLimit, _limit, 2),
        (KeepsATensor, None, 2),
        (ComputesAnother, None, 2),
        (UsesAnother, None, 2),
        (WithoutGradients, None, 2),
        (ReadsMore, None, 1),
        (ReadsMore, _double, 2),
        (AnotherBackward, None, 2),
        (SetsAnother, None, 2),
    ],
)
def test_the_next_call_has_its_program(
    make: type[Model], between: Callable[[Any, int], None] | None, kinds: int
) -> None:
    torch.manual_seed(0)
    plain = make()
    compiled: Any = autoparallel.compile(copy.deepcopy(plain))
    for step in range(4):
        x = torch.randn(6 + 2 * (step % 2), 4, dtype=torch.float64)
        for model in (plain, compiled):
            if between is not None:
                between(model, step)
            model.zero_grad()
            model(x).backward()
        for ours, theirs in zip(compiled.parameters(), plain.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if theirs.grad is not None:
                torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-12, atol=1e-12)
        assert vars(compiled.config) == vars(plain.config)
        assert getattr(compiled, "last", None) == getattr(plain, "last", None)
    assert len(compiled._kinds) == kinds


def test_a_kind_that_is_prepared_serves_both_calls() -> None:
    model: Any = autoparallel.compile(Classifier())
    x = torch.randn(6, 4, dtype=torch.float64)
    model.prepare(x)
    assert model.config.kind is None
    for _ in range(2):
        model(x)
        assert model.config.kind == "regression" and len(model._kinds) == 1
