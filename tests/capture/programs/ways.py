"""Python that goes one way or the other by a tensor's value: each is taken in one of the steps at least."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.programs.inplace import Two
from tests.capture.registry import program
from tests.capture.runner import numbers, signed


@program(batch=signed, ranks=True)
class ClampsWhatIsLarge(Two):
    """As DETR does, behind each of two layers."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.a, self.b):
            x = layer(x)
            if not torch.isfinite(x / x.relu().amax()).all() or x.abs().max() > 0.7:
                limit = torch.finfo(x.dtype).max - 1000
                x = torch.clamp(x, min=-limit, max=0.5)
        return x.tanh()


@program(batch=signed, ranks=True)
class OneOfTwoValues(Two):
    """What both ways choose from is computed in any case."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.a(x), self.b(x)
        y = first if (x > 0).any() else second
        return y.sin()


@program(batch=signed, ranks=True)
class AsksWhatEqualNumbersDecide(Two):
    """Two constants before the question are of one number."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * torch.tensor(0.5, dtype=x.dtype)
        if h.sum() * torch.tensor(0.5, dtype=x.dtype) > 0:
            h = self.b(h)
        return h.tanh()


@program(batch=signed, ranks=True)
class AsksWhatIsIn(Two):
    """By ``in`` and by ``is_nonzero``."""

    def forward(self, x: Tensor) -> Tensor:
        signs = x.detach().sum().sign().long()
        if 1 in signs:
            x = self.a(x)
        y = x.sin() if -1 not in signs.expand(3) else x
        return self.b(y) if torch.is_nonzero(signs + 1) else y.cos() + self.a(y)


@program(batch=signed, ranks=True)
class OneOfTwoWeights(Two):
    def forward(self, x: Tensor) -> Tensor:
        layer = self.a if x.sum() > 0 else self.b
        return F.linear(x, layer.weight, self.a.bias).tanh()


@program(batch=signed, ranks=True)
class WaysWithinWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d = self.layers
        if x.amax() > 0:
            h = a(x)
            h = b(h) if h.sum() > 0 else h.exp()
        else:
            h = c(x)
            if (x < -1).any():
                h = h * 2
        return d(h)


@program(batch=signed, ranks=True)
class InPlaceOnOneWay(Two):
    """Slices, masks and the whole are written on one way, and a constant of its own is read on each."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        view = h[:, 2:4]
        if x.min() > 0:
            h.mul_(torch.tensor(0.5, dtype=h.dtype))
            h[:, 0] = 1.0
            h[h > 0.3] = 0.25
        else:
            h = h + torch.tensor([1.5] * 8, dtype=h.dtype)
        return self.b(h).sum(-1) + view.sum(-1)


@program(batch=signed, ranks=True)
class CountsInABuffer(Two):
    """Two buffers, each of which one way writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("missed", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if x.mean() > 0:
            self.seen += 1
        else:
            self.missed.lerp_(h.detach().mean(0), 0.5)
        return self.b(h) * (self.seen + 1) - self.missed


@program(batch=lambda step: (numbers(4, 8, seed=step).abs() * (step != 1),), ranks=True)
class KeepsAwayFromInfinity(Two):
    """The way that is not taken would have no number as a gradient: of x.norm() at zero, and of a division by it."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * x.sum()
        if h.abs().max() > 0:
            h = h / h.norm() + h.square().sum(-1, keepdim=True).sqrt()
        return self.b(h)


@program(batch=signed, ranks=True)
class WithoutGradientOnOneWay(Two):
    """One way stops the gradient, and what it gives needs none."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if x.sum() < 0:
            with torch.no_grad():
                h = self.a(x).square()
        return self.b(h)


def loss_of_large(output: Tensor, target: Tensor) -> Tensor:
    error = (output - target).abs()
    if error.max() > 1.2:
        return error.clamp(max=1.2).mean()
    return error.square().mean()


@program(
    batch=lambda step: (*signed(step), numbers(4, 8, seed=step + 50) * (0.1 + 9 * (step % 2))),
    loss_fn=loss_of_large,
    ranks=True,
)
class LossThatAsks(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh()) / 10


@program(batch=lambda step: (*signed(step), step > 1), ranks=True)
class AsksWithANumber(Two):
    """Flags of one element, of any dtype and with dims."""

    def forward(self, x: Tensor, flag: Any) -> Tensor:
        h = self.a(x)
        if x[:1, :1] > 0:
            h = h * 2
        if (x > 0).sum():
            h = self.b(h)
        if flag:
            h = h.sin()
        return h


@program(batch=signed, ranks=True)
class JoinsLate(Two):
    """The ways make values of different sizes, of which both make one of the same size."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if x.sum() > 0:
            h = torch.cat([h, self.b(x)], -1)
        return h.square().mean(-1)


@program(batch=signed)
class SetsATensorOnBothWays(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if x.sum() > 0:
            h = h.relu()
            self.last = h.detach().sum()
        else:
            self.last = h.detach().mean()
        return self.b(h)


@program(batch=signed, refused="torch.where")
class SetsANumberOnOneWay(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if h.sum() > 0:  # refused
            self.last = 1.0
        return self.b(h)


@program(batch=signed, refused="torch.where")
class DrawsOnOneWay(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if h.sum() > 0:  # refused
            h = F.dropout(h, 0.5)
        return self.b(h)


@program(batch=signed, refused="torch.where")
class ReturnsMoreOnOneWay(Two):
    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        if h.sum() > 0:  # refused
            return h, self.b(h)
        return h


@program(batch=signed, refused="torch.where", loss=torch.sum)
class ReturnsAnotherShape(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if h.sum() > 0:  # refused
            return h
        return h.sum(-1)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


@program(batch=signed, refused="torch.where")
class FunctionOnOneWay(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if h.sum() > 0:  # refused
            h = Doubled.apply(h)
        return self.b(h)


@program(batch=signed, ranks=True)
class FunctionBesideTheWays(Two):
    """Before and after: it runs once."""

    def forward(self, x: Tensor) -> Tensor:
        h = Doubled.apply(self.a(x))
        if x.sum() > 0:
            h = h.sin()
        return Doubled.apply(self.b(h))


@program(batch=signed, ranks=True, random=True)
class DrawsBesideTheWays(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.a(x), 0.3)
        if x.sum() > 0:
            h = h.sin()
        return F.dropout(self.b(h), 0.3)


@program(batch=signed, refused="torch.where")
class WhileAValueIsLarge(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        while h.norm() > 0.1:  # refused
            h = h / 2
        return self.b(h)


@program(batch=signed, ranks=True)
class LoopsWhileAValueIsLarge(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        for _ in range(3):
            if x.sum() < 0:
                break
            h = torch.tanh(self.b(h))
        return h


@program(batch=signed, ranks=True)
class CondBesideTheWays(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.cond(x.sum() > 1, lambda t: t.sin(), lambda t: t.cos(), (self.a(x),))
        if x.sum() > 0:
            h = h.exp()
        return torch.cond(x.sum() < 1, lambda t: t.sin(), lambda t: t.cos(), (self.b(h),))


@program()
class CreatesATensorOnOneWay(Two):
    """Which planning makes without data, as it does operands."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if h.sum() > 0:
            h = h + torch.ones(8).cumsum(0)
        return self.b(h)


class SetUp(Two):
    """The first call draws numbers, and says so in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ready", torch.tensor(0))
        self.register_buffer("noise", torch.zeros(8, dtype=torch.float64))

    def set_up(self, h: Tensor) -> None:
        self.noise.copy_(torch.rand_like(h[0]) * h.detach().std(0))
        self.ready.fill_(1)


@program(batch=signed, ranks=True, random=True)
class SetsItselfUp(SetUp):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if not self.ready.item():
            self.set_up(h)
        return self.b(h + self.noise) if self.ready else self.b(h)


@program(batch=lambda step: (), ranks=True)
class SetsItselfUpWithoutInputs(SetUp):
    """As an equation at points of its own may."""

    def forward(self) -> Tensor:
        if not self.ready:
            with torch.no_grad():
                self.b.bias.copy_(self.a.weight.std(0))
            self.ready.fill_(1)
        return self.b(self.a.weight)  # type: ignore[no-any-return]


@program(batch=signed, refused="torch.where")
class CountsAndDraws(SetUp):
    """No flag: each count would be a trace of its own."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.ready.add_(2)
        if self.ready.item() % 4:  # refused
            self.noise.copy_(torch.rand_like(self.noise))
        return self.b(h + self.noise)


LOGGER = logging.getLogger(__name__)
DEBUG = False


@program(batch=signed, ranks=True)
class AsksOnlyToTell(Two):
    """More often than ways may be: nothing but what is shown follows from it."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.a(x)
        results = {"a": h, "b": self.b(h), "c": h.tanh(), "d": x.exp()}
        for name in results:
            if (torch.isnan(results[name]).any() or torch.isinf(results[name]).any()) and DEBUG:
                print(f"{name} has nan or inf")
        if not h.isfinite().all():
            warnings.warn("not finite", stacklevel=2)
        if h.norm() < 100 and h.abs().max() < 100:
            LOGGER.debug("small: %s", h.mean())
        return results


@program(batch=signed)
class TellsAndComputes(Two):
    """A test that changes something, a call of the user's, or a second statement is a way."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("asked", torch.zeros(()))

    def count(self, x: Tensor) -> Tensor:
        self.asked += 1
        return x

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if (h > 0).all() or self.count(h).amin() > 100:
            LOGGER.debug("positive")
        if h.sum() > 0:
            h = h * 2
            LOGGER.debug("doubled")
        return self.b(h)
