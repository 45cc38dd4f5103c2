"""Functions of autograd that change their arguments in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.capture.programs.inplace import Two
from tests.capture.registry import program
from tests.capture.runner import signed


class Sparsemax(torch.autograd.Function):
    """As of pytorch_tabnet, which takes the largest number from its argument itself."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, dim: int = -1) -> Tensor:
        ctx.dim = dim
        input -= input.max(dim=dim, keepdim=True)[0]
        ordered = torch.sort(input, descending=True, dim=dim)[0]
        sums = ordered.cumsum(dim) - 1
        counts = torch.arange(1, input.size(dim) + 1, device=input.device, dtype=input.dtype)
        support = counts * ordered > sums
        size = support.sum(dim=dim).unsqueeze(dim)
        output = torch.clamp(input - sums.gather(dim, size - 1) / size.to(input.dtype), min=0)
        ctx.save_for_backward(size, output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        size, output = ctx.saved_tensors
        grad = grad.clone()
        grad[output == 0] = 0
        mean = grad.sum(dim=ctx.dim) / size.to(output.dtype).squeeze()
        return torch.where(output != 0, grad - mean.unsqueeze(ctx.dim), grad), None


@program(batch=signed, ranks=True)
class ChangesWhatNobodyReads(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * x.abs()
        return self.b(Sparsemax.apply(h, -1)) + Sparsemax.apply(self.b(x), -1)


@program(batch=signed, ranks=True)
class ChangesInLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        prior = torch.ones_like(x)
        for layer in self.layers:
            mask = Sparsemax.apply(layer(x) * prior, -1)
            prior = prior * (1.3 - mask)
            x = x + mask
        return x


class Doubled(torch.autograd.Function):
    """In place, as it says."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        ctx.mark_dirty(x)
        return x.mul_(factor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.factor * 1.5, None  # not what autograd would make


@program(batch=signed, ranks=True)
class ReturnsWhatItChanges(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) + 1
        view = h[:, 2:4]
        out = Doubled.apply(h, 3.0)
        return self.b(out + h) + view.sum(-1, keepdim=True)


@program(batch=signed, ranks=True)
class ReturnsWhatItChangesWithoutABind(Two):
    """The result is not bound, the argument is read."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh() * 2
        Doubled.apply(h, 0.5)
        Doubled.apply(h, 2.5)
        return self.b(h)


class SwapsTwo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.mark_dirty(x)
        x.add_(y)
        return y * 2, x, x * y

    @staticmethod
    def backward(ctx: Any, one: Tensor, other: Tensor, third: Tensor) -> Any:
        return other + third, 2 * one + other - third


@program(batch=signed, ranks=True)
class ChangesOneOfTwo(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 1
        y, z, w = SwapsTwo.apply(h, self.b(x))
        return h + y * z + w


@program(batch=signed, refused="mark_dirty")
class ReadsWhatItChanged(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 1
        out = Sparsemax.apply(h, -1)
        return self.b(out + h)  # refused


@program(batch=signed, refused="mark_dirty")
class ReadsAViewOfWhatItChanged(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 1
        view = h[:, :4]
        out = Sparsemax.apply(h, -1)
        return self.b(out) + view.sum()  # refused


@program(batch=signed, refused="mark_dirty")
class ReturnsWhatItChanged(Two):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.a(x) * 1
        return self.b(Sparsemax.apply(h, -1)), h  # refused


@program(batch=signed, refused="mark_dirty")
class KeepsWhatItChanged(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 1
        self.last = h.detach()
        return self.b(Sparsemax.apply(h, -1))  # refused


@program(batch=signed, refused="mark_dirty")
class ChangesAnInput(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(Sparsemax.apply(x, -1))  # refused


@program(batch=signed, refused="mark_dirty")
class ChangesABuffer(Two):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scores", torch.randn(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) * Sparsemax.apply(self.scores[:2], -1).sum())  # refused


@program(batch=signed, refused="clone")
class GivesOneTwice(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 1
        y, z, w = SwapsTwo.apply(h, h)  # refused
        return self.b(y + z + w)


@program(batch=signed, refused="mark_dirty")
class ReadsWithoutAGradient(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 1
        out = Sparsemax.apply(h, -1)
        with torch.no_grad():
            mean = h.mean()  # refused
        return self.b(out) * mean
