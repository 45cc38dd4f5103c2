"""``autograd.Function``: backwards that the user wrote."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.registry import program
from tests.capture.runner import STEPS, rows, rows_and_targets


class Round(torch.autograd.Function):
    """Straight-through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@program(ranks=True)
class StraightThrough(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(Round.apply(3 * self.a(x)))


class Reverse(torch.autograd.Function):
    """Gradient reversal, with a strength that is no tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * grad, None


@program(ranks=True)
class DomainAdversarial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features, self.label, self.domain = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.features(x).tanh()
        return self.label(h), self.domain(Reverse.apply(h, 0.3))


def rows_and_strength(step: int) -> tuple[Any, ...]:
    """As the schedule of every such script: ``2 / (1 + np.exp(-10 * p)) - 1``."""
    return (*rows(step), 2 / (1 + np.exp(-10 * step / STEPS)) - 1)


@program(batch=rows_and_strength, ranks=True)
class StrengthsOfNumpy(nn.Module):
    """One is an argument, the other a setting."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.domain, self.strength = nn.Linear(8, 8), nn.Linear(8, 2), np.float32(0.25)

    def forward(self, x: Tensor, strength: float) -> Tensor:
        h = self.features(x).tanh()
        return self.domain(Reverse.apply(Reverse.apply(h, strength), self.strength))


class MySigmoid(torch.autograd.Function):
    """Saves its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.sigmoid()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * y * (1 - y) * 2  # twice what autograd would say


@program(ranks=True)
class SavedOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(MySigmoid.apply(self.a(x)))


class Clipped(torch.autograd.Function):
    """Looks at its gradient's norm: cannot be cut over rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, limit: float = 0.01) -> Tensor:
        ctx.limit = limit
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * (ctx.limit / grad.norm()).clamp(max=1.0), None


@program(ranks=True)
class ClippedGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(Clipped.apply(self.a(x)))


class TwoOutputs(torch.autograd.Function):
    """Two results, one of them not differentiable, and setup_context."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ w
        return y, (y > 0).to(torch.int64)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad @ w.t(), 3 * x.t() @ grad


@program(ranks=True)
class FunctionWithParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.w = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return TwoOutputs.apply(self.a(x), self.w)


class NeedsInputGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return F.linear(x, w)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        gx = grad @ w if ctx.needs_input_grad[0] else None
        gw = (grad.t() @ x).sign() if ctx.needs_input_grad[1] else None
        return gx, gw


@program()
class SignGradient(nn.Module):
    """A weight's gradient is made of signs."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return NeedsInputGrad.apply(NeedsInputGrad.apply(x, self.a.weight), self.a.weight)


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@program(refused="pass the numbers to apply()")
class FunctionThatDraws(nn.Module):
    """Every rank would draw numbers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return Noisy.apply(self.a(x))  # refused


class FocalLoss(torch.autograd.Function):
    """A loss with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return (x - y).square().mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, y = ctx.saved_tensors
        return grad * (x - y).tanh() / x.shape[0], None


@program(batch=rows_and_targets, loss_fn=FocalLoss.apply, ranks=True)
class FunctionAsLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


class Dirty(torch.autograd.Function):
    """Works in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 5 * grad


@program(ranks=True)
class DirtyFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return Dirty.apply(self.a(x).tanh() + 0)


class ReadsBackward(torch.autograd.Function):
    """Its backward writes into a list: what a debugger or a scale's statistics do."""

    seen: ClassVar[list[float]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        ReadsBackward.seen.append(float(grad.sum()))
        return grad


def reset_seen() -> nn.Module:
    ReadsBackward.seen.clear()
    return nn.Sequential(nn.Linear(8, 8), Probe(), nn.Linear(8, 8))


class Probe(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return ReadsBackward.apply(x)


@program(observe=lambda _: list(ReadsBackward.seen), ranks=True)
def backward_that_logs() -> nn.Module:
    return reset_seen()


class OnlyDetached(torch.autograd.Function):
    """Returns no gradient for its first input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad


@program()
class NoneFromBackward(nn.Module):
    """A backward's None leaves a parameter without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return OnlyDetached.apply(self.a(x), self.b(x))


@program()
class FunctionUnderNoGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            codes = Round.apply(4 * self.a(x))
        return self.b(x) * codes


@program()
class FunctionOfModule(nn.Module):
    """Differentiates inside its own backward, as reentrant checkpoints do."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return torch.utils.checkpoint.checkpoint(lambda t: t.tanh() * 2, h, use_reentrant=True)
