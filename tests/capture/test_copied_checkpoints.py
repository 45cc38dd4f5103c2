"""Checkpointing that a repository has written itself, known by its source."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoparallel
from autoparallel.capture.tracing import copied_checkpoints
from autoparallel.graph.errors import CaptureError
from tests.runtime.support import gradients_off, make, off


class Again(torch.autograd.Function):
    """Runs a function once more in its backward."""

    @staticmethod
    def forward(ctx: Any, run: Any, count: int, *tensors: Tensor) -> Tensor:
        ctx.run, ctx.count, ctx.tensors = run, count, tensors
        return run(*tensors[:count])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        inputs = [x.detach().requires_grad_() for x in ctx.tensors[: ctx.count]]
        with torch.enable_grad():
            out = ctx.run(*inputs)
        wanted = (*inputs, *ctx.tensors[ctx.count :])
        return None, None, *torch.autograd.grad(out, wanted, grad, allow_unused=True)


class Scaled(Again):
    """Another one: its backward is its own."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return tuple(None if x is None else 2 * x for x in Again.backward(ctx, grad))


class Model(nn.Module):
    function: type[torch.autograd.Function] = Again

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = (nn.Linear(8, 8) for _ in range(3))

    def inner(self, x: Tensor) -> Tensor:
        return self.b(F.dropout(torch.tanh(self.a(x)), 0.0))

    def given(self) -> list[nn.Parameter]:
        return [*self.a.parameters(), *self.b.parameters()]

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        return (h + self.function.apply(self.inner, 1, h, *self.given())).square().mean()


class LeavesOut(Model):
    def given(self) -> list[nn.Parameter]:
        return [*self.a.parameters()]


class OfAnother(Model):
    function = Scaled


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    digest = copied_checkpoints._digest_of(Again)
    monkeypatch.setattr(copied_checkpoints, "_DIGESTS", frozenset({digest}))
    copied_checkpoints.is_copied_checkpoint.cache_clear()
    yield
    copied_checkpoints.is_copied_checkpoint.cache_clear()


def test_its_gradients_are_those_of_what_it_runs() -> None:
    plain = make(Model)
    model: Any = autoparallel.compile(copy.deepcopy(plain))
    x = torch.randn(4, 8, dtype=torch.float64)
    ours, theirs = model(x), plain(x)
    ours.backward(), theirs.backward()
    assert off(ours, theirs) < 1e-9 and gradients_off(model, plain) < 1e-9
    assert float(plain.a.weight.grad.norm()) > 1e-3
    with torch.no_grad():
        assert off(model(x), plain(x)) < 1e-9


@pytest.mark.parametrize(
    ("build", "words"),
    [(LeavesOut, "that the checkpoint is not given"), (OfAnother, "is given an object of type")],
)
def test_what_is_no_checkpoint_of_all_that_it_reads_is_refused(build: type[nn.Module], words: str) -> None:
    with pytest.raises(CaptureError, match=words):
        autoparallel.compile(make(build))(torch.randn(4, 8, dtype=torch.float64))
