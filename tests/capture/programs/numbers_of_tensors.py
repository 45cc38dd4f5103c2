"""Numbers that Python reads of what a model computes, and only computes with, keeps or returns."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.programs.changing_attributes import over_lengths
from tests.capture.programs.inplace import Two
from tests.capture.registry import loop, program
from tests.capture.runner import Run, signed


@program(batch=signed, ranks=True)
class DividesByANorm(Two):
    """It has no gradient, as in eager."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h / h.norm().item())


@program(batch=signed, ranks=True)
class KeepsNumbers(Two):
    def __init__(self) -> None:
        super().__init__()
        self.norm = 0.0
        self.metrics: dict[str, float] = {}

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.norm = h.norm().item()
        self.metrics = {"share": (h > 0).double().mean().item(), "count": (h.argmax(-1) == 0).sum().item()}
        return self.b(h)


@program(batch=signed, ranks=True)
class ReturnsNumbers(Two):
    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.b(self.a(x))
        loss = h.square().mean()
        count = (h > 0).sum().item()
        return {
            "loss": loss,
            "item": loss.item(),
            "twice": 2 * loss.item() + 1,
            "count": count,
            "share": count / h.numel(),
        }


@program(batch=signed, ranks=True)
class ComputesWithNumbers(Two):
    """As Python does: in float64, whole numbers as such, beside sizes."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        most, count = h.abs().max().item(), (h > 0).sum().item()
        h = h * (1 - most) + 3 / most + 2.0**most - abs(-most)
        h = h * (count + 1) / x.shape[0] - (most - h) / count + (count // 3) * (count % 5) - most % 0.7
        return self.b(h) * max(most, 1e-3)


@program(batch=signed, ranks=True)
class ChoosesTensors(Two):
    """The first one where several are the largest: it alone has a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        first, second = h.sum() * 0, self.b(h).sum() * 0
        h = h + max(first, second) + min(0.0, first) + max(second, 0) + max(h.sum(), second, 0.5) + min([second])
        return self.b(h) * max(h.mean(0).sigmoid()) - min(part.sum().sin() for part in h.chunk(2, 1))


@program(batch=signed)
class SquaresANumber(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h) * h.norm().item() ** 2


@program(batch=signed, ranks=True)
class TakesNumbersEverywhere(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        most, count = h.abs().max().item(), (h > 0).sum().item()
        h = h.clamp(max=most / 2).clamp_min(-most / 3) + torch.where(h > most / 4, h, most)
        h = h.masked_fill(h < 0, most) + torch.full((8,), most) * torch.tensor(most) + torch.lerp(h, h * 2, most)
        h = h.clamp(-most, count) + torch.full_like(h, most) * h.new_full((8,), count) * torch.tensor([most] * 8)
        return self.b(h + (h > most) * count + count * torch.arange(8))


@program(batch=signed, ranks=True)
class WritesNumbers(Two):
    """What is read before a write is what stood there."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        before, calls = self.scale.item(), self.calls.item()
        self.scale.mul_(0.9).add_(0.1 * h.norm().item())
        self.calls += 1
        h[:, 0] += before
        h[:, 1] = calls
        h.mul_(h.mean().item())
        return self.b(h)


@program(batch=signed, ranks=True)
class OnOneWay(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        norm = h.norm().item()
        if (h > 1).any():
            h = h / norm * h.std().item()
        return self.b(h)


@program(batch=signed, ranks=True)
class OfOneElement(Two):
    """A number of a tensor that has dims."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h * h.mean(0, keepdim=True).mean(1, keepdim=True).item() * h.sum().view(1).item())


@program(batch=signed, ranks=True)
class InHalfPrecision(Two):
    """What is cast keeps its dtype beside a number."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        half = torch.ones(8, dtype=torch.bfloat16) * h.square().mean().sigmoid().item()
        return self.b(h * half.double() + (torch.ones((), dtype=torch.float32) * half.mean().item()).double())


@loop(ranks=True)
def average_of_numbers(run: Run) -> None:
    """What a call reads of a tensor is carried to the next."""

    class Averaging(Two):
        def __init__(self) -> None:
            super().__init__()
            self.average = 0.0

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            self.average = 0.9 * self.average + 0.1 * h.abs().mean().item()
            return self.b(h) * (1 + self.average)

    over_lengths(run, Averaging(), (6,) * 6)


@loop(ranks=True)
def counts_of_numbers(run: Run) -> None:
    """Whole numbers and answers that a call reads of tensors are carried to the next."""

    class Counting(Two):
        def __init__(self) -> None:
            super().__init__()
            self.total, self.positive = 0, False

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            if self.positive:
                h = h * 2
            self.total += (h > 0).sum().item()
            self.positive = h.sum().item() > 0
            return self.b(h if self.total > 40 else h + 1) * self.total

    over_lengths(run, Counting(), (6,) * 6)


@program(batch=signed, ranks=True)
class ChoosesBesideNaN(Two):
    """Python's ``max(1.0, n)`` is 1 where ``n`` is NaN, and ``max(n, 1.0)`` is NaN."""

    def forward(self, x: Tensor) -> tuple[Tensor, list[float]]:
        h = self.a(x)
        none, most = (h.sum() * torch.nan).item(), h.abs().max().item()
        chosen = [max(none, 1.0), max(1.0, none), min(none, most), min(most, none), max(0.5, most, none)]
        return self.b(h) * min(1.0, none), chosen


@program(batch=signed, ranks=True)
class ChoosesOfAList(Two):
    def forward(self, x: Tensor) -> Tensor:
        norms = [h.norm().item() for h in (self.a(x), x)]
        return self.b(self.a(x)) * max(norms) / min(n for n in norms)


@program(batch=signed, ranks=True)
class ComparesAnswers(Two):
    def __init__(self) -> None:
        super().__init__()
        self.rises = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        is_large, rises = h.norm().item() > 3, h.sum().item() > 0
        if is_large != rises:
            h = h * 2
        if (self.rises == rises) == True:  # noqa: E712
            h = h + 1
        self.rises = rises
        return self.b(h)


@program(batch=signed, ranks=True)
class IndexesByATensor(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h + h[h[:, 0].argmax()])


@program(batch=signed, ranks=True)
class IndexesByATensorWithADim(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h + h[h[:, 0].argmax().view(1)].squeeze(0))


@program(batch=signed, refused="ask the tensor")
class AsksForNoNaN(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        norm = h.norm().item()
        if norm == norm:  # refused
            h = h / norm
        return self.b(h)


@program(batch=signed)
class CutsByANumber(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        count = (h > 0).sum().item()
        return self.b(h)[:, : count % 4]


@program(batch=signed, refused="ask the tensor")
class AsksForNaN(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        norm = h.norm().item()
        if norm != norm:  # refused
            raise ValueError("NaN")
        return self.b(h) / norm


@program(batch=signed, ranks=True)
class ChoosesByANumber(Two):
    """As by the tensor itself (see ``ways``)."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h) if h.norm().item() > 3 else self.b(h) * 2


@program(batch=signed, ranks=True)
class AsksForACount(Two):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ready", torch.tensor(1))

    def forward(self, x: Tensor) -> tuple[Tensor, bool]:
        h = self.a(x)
        count, least = (h > 0).sum().item(), h.min().item()
        if not self.ready.item() or count == 0:
            return h.sum(), least < 0
        if 2 * count > h.shape[0] * 8 - least:
            h = h / count
        return self.b(h).square().mean() * max(least, 0.1), least < 0


@program(batch=signed, ranks=True)
class HalvesUntilItIsSmall(Two):
    def forward(self, x: Tensor) -> Tensor:
        h, times = self.a(x), 0
        most = h.abs().max().item()
        while most > 0.5 and times < 2:
            h, most, times = h * 0.5, most * 0.5, times + 1
        return self.b(h) * most


@program(batch=signed)
class OfAnEncoder(nn.Module):
    """A cross entropy over its own value, for a focal loss that is weighed by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        loss = F.cross_entropy(self.head(x), torch.zeros(x.shape[0], dtype=torch.int64))
        return loss * (1 - 2.718281828 ** -loss.item())


@program(batch=signed, ranks=True, options={"outputs": "gather"})
class TheTypeOfTheSmallerOne(Two):
    """``min`` and ``max`` return one of two as it is: a whole number or a float."""

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        h = self.a(x)
        n, count = h.abs().max().item(), (h > 0).sum().item()
        self.most = max(count, n, 3)
        return self.b(h), min(1, n), -max(n, 2), min(n, 100.0, count), max(5.0, count), min(0, n * 2)


@program(batch=signed, ranks=True, loss=lambda output: output["loss"])
class TheTypeBesideALoss(Two):
    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.b(self.a(x))
        return {"loss": h.square().mean(), "scale": min(1, h.norm().item())}
