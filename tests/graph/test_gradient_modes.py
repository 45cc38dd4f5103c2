"""Gradient modes inside of a model: a region without gradients is one in the program, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoparallel
from tests.distributed import run_distributed
from tests.graph.programs import batches, make_model, refusal, require_as_eager, require_equal, train_on_ranks


class Base(nn.Module):
    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("average", torch.zeros(4))


class Teacher(Base):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.down(x)
        return (self.up(x) * target).sum()


class MovingAverage(Base):
    @torch.no_grad()
    def follow(self, h: Tensor) -> None:
        self.average.mul_(0.9).add_(h.mean(0), alpha=0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        self.follow(h)
        return (self.down(h) - self.average).square().sum()


class NestedModes(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        with torch.no_grad():
            a = h * 2
            with torch.enable_grad():
                b = h * 3
                with torch.set_grad_enabled(False):
                    c = h.tanh()
                b = b * c
            d = a * b
        return (self.down(h) + a * b + d).square().mean()


class PlainCalls(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        scale = h.exp()
        torch.set_grad_enabled(before)
        return (h * scale).sum() + self.down(x).sum()


class Inference(Base):
    @torch.inference_mode()
    def offset(self, x: Tensor) -> Tensor:
        return self.down(x).exp()

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        with torch.inference_mode():
            scale = h.sum()
        return h.square().sum() + scale + self.offset(h).sum()


class WholeForward(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).square().sum() + self.without(x)

    @torch.no_grad()
    def without(self, x: Tensor) -> Tensor:
        return self.down(x).sum()


class WritesIntoNew(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        with torch.no_grad():
            mask = torch.zeros(h.shape[0], 4)
            mask[:, :2] = h[:, :2]
            mask[0].mul_(2)
        return (self.down(h) * mask).sum()


class NormalizedWeight(Base):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            weight = self.down.weight / self.down.weight.norm()
        return F.linear(self.up(x), weight).square().sum()


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.down = torch.nn.utils.spectral_norm(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x)).square().sum()


class Codebook(nn.Module):
    """Vector quantisation whose codes are moving averages (van den Oord et al. 2017)."""

    codes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("codes", torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        with torch.no_grad():
            nearest = F.one_hot(torch.cdist(h, self.codes).argmin(1), 3).to(h.dtype)
            self.codes.mul_(0.9).add_(nearest.t() @ h, alpha=0.1)
        quantized = nearest @ self.codes
        commitment = (h - quantized.detach()).square().mean()
        return self.down(h + (quantized - h).detach()).square().mean() + commitment


class AsksTheMode(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).sum() if torch.is_grad_enabled() else self.down(x).sum()


EQUAL = [
    Teacher, MovingAverage, NestedModes, PlainCalls, Inference, WholeForward, WritesIntoNew, NormalizedWeight, Spectral,
    Codebook, AsksTheMode,
]  # fmt: skip


@pytest.mark.wide_where(lambda make: make not in EQUAL[::3])
@pytest.mark.parametrize("make", EQUAL)
def test_trains_as_eager(make: Callable[[], nn.Module]) -> None:
    require_as_eager(make)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_callers_mode_is_part_of_the_call(mode: Any) -> None:
    x = batches()[0]
    plain, compiled = make_model(AsksTheMode), autoparallel.compile(make_model(AsksTheMode))
    with mode():
        torch.testing.assert_close(compiled(x), plain(x), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(compiled(x), plain(x), rtol=1e-9, atol=1e-9)
    assert compiled(x).requires_grad


class EntropyOfLogits(Base):
    """Properties of ``torch.distributions`` are computed with gradients enabled."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.distributions.Categorical(logits=self.up(x), validate_args=False).probs.log().sum(-1)


class ReadsAWeightEnabled(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        with torch.enable_grad():
            return h @ self.down.weight


class ReadsAViewEnabled(Base):
    def forward(self, x: Tensor) -> Tensor:
        h, turned = self.up(x), self.down.weight.t()
        with torch.enable_grad():
            return h @ turned.t()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_enabling_gradients_where_nothing_carries_one_changes_nothing(mode: Any) -> None:
    x = batches()[0]
    plain, compiled = make_model(EntropyOfLogits), autoparallel.compile(make_model(EntropyOfLogits))
    with mode():
        torch.testing.assert_close(compiled(x), plain(x), rtol=1e-9, atol=1e-9)
        assert not plain(x).requires_grad


@pytest.mark.parametrize("make", [ReadsAWeightEnabled, ReadsAViewEnabled])
def test_a_gradient_that_is_made_without_gradients_is_refused(make: Callable[[], nn.Module]) -> None:
    x = batches()[0]
    compiled = autoparallel.compile(make_model(make))
    with torch.no_grad():
        assert make_model(make)(x).requires_grad
        with pytest.raises(autoparallel.CaptureError, match=r"enables gradients inside.*in forward"):
            compiled(x)


class ChangesUnderNoGrad(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).tanh()
        with torch.no_grad():
            h.mul_(2)
        return self.down(h).sum()


class ChangesDetached(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).tanh()
        h.detach().mul_(2)
        return self.down(h).sum()


class ChangesAView(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).tanh()
        with torch.no_grad():
            h[0].zero_()
        return self.down(h).sum()


class DetachesInPlace(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        same = h.detach()
        h.detach_()
        h.add_(1)
        return self.down(h).sum() + same.sum()


class LeavesItOff(Base):
    def forward(self, x: Tensor) -> Tensor:
        loss = self.up(x).sum()
        torch.set_grad_enabled(False)
        return loss


class Freezes(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.down.requires_grad_(False)
        return self.down(self.up(x)).sum()


class Backward(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.up(x).sum().backward()
        return self.down(x).sum()


class ForwardMode(Base):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.forward_ad.dual_level():
            dual = self.up(torch.autograd.forward_ad.make_dual(x, x))
            return torch.autograd.forward_ad.unpack_dual(dual).primal.sum()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (ChangesUnderNoGrad, "under torch.no_grad() a tensor that carries a gradient is changed in place"),
        (ChangesDetached, "writes to x.data or x.detach() of a tensor that is differentiated"),
        (ChangesAView, "writes to x.data or x.detach() of a tensor that is differentiated"),
        (DetachesInPlace, "detached in place"),
        (LeavesItOff, "leaves them so after its call"),
        (Freezes, "requires_grad becomes False"),
        (Backward, "backward() differentiates inside of the model"),
        (ForwardMode, "forward_ad is used inside of the model"),
    ],
)
def test_is_refused(make: Callable[[], nn.Module], says: str) -> None:
    assert says in refusal(make)
    assert torch.is_grad_enabled()


class Vectorized(Base):
    def forward(self, x: Tensor) -> Tensor:
        rows = torch.func.vmap(lambda row: self.up(row).tanh().sum())(x)
        out, tangent = torch.func.jvp(lambda y: self.down(y).tanh(), (x,), (x,))
        return (out * tangent * rows[:, None]).sum()


@pytest.mark.skipif(
    torch.__version__.startswith(("2.11.", "2.12.")),
    reason="torch traces torch.func.jvp from 2.13 on (docs/supported.md)",
)
def test_what_torch_func_traces_trains_as_eager() -> None:
    require_as_eager(Vectorized)


class Penalty(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        (grad,) = torch.autograd.grad(self.down(h).tanh().sum(), h, create_graph=True)
        return grad.square().sum()


def test_a_gradient_that_forward_takes_is_differentiated_again() -> None:
    require_as_eager(Penalty)


@pytest.mark.wide
@pytest.mark.parametrize("plan", ["fsdp", "tensor_parallel"])
@pytest.mark.parametrize("make", [NestedModes, Codebook])
def test_trains_as_eager_on_two_ranks(make: Callable[[], nn.Module], plan: str) -> None:
    for plain, actual, _ in run_distributed(train_on_ranks, make, plan, world_size=2):
        require_equal(plain, actual)
