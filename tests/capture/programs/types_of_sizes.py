"""Python that asks for the type of a size, or of a number that is passed in, which a trace may leave open; and whether
a batch has one row."""

from __future__ import annotations

import math
import numbers as kinds
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.capture.programs.inplace import Two
from tests.capture.registry import program
from tests.capture.runner import numbers


def lengths(step: int) -> tuple[Any, ...]:
    """Rows of two lengths, with a whole number and another."""
    return numbers(4, (3, 5, 6)[step], 8, seed=step), step + 2, 0.5 * step + 0.1


def pair(size: Any) -> Any:
    return (size, size) if isinstance(size, int) else size


def scaled(scale: Any) -> Any:
    return scale if type(scale) in (int, float) else scale[0]


@program(batch=lengths, ranks=True)
class PairsOfSizes(Two):
    def forward(self, x: Tensor, times: int, scale: float) -> Tensor:
        rows, columns = pair(x.shape[1]), pair(times)
        return self.b(self.a(x)) * (rows[0] + columns[1]) * scaled(scale)


@program(batch=lengths)
class AsksForTypes(Two):
    def forward(self, x: Tensor, times: int, scale: float) -> Tensor:
        length = x.shape[1]
        answers = [
            isinstance(length, int | float), isinstance(length, kinds.Integral), isinstance(length / 2, float),
            isinstance(length > 2, bool), isinstance(scale, float), isinstance(scale, int), type(times) is int,
            type(length) in (int, float), issubclass(type(length), int), type(scale) is float, type(Two) is type,
            isinstance(Two, type), isinstance(length, list | tuple), type(length).__name__ == "int",
        ]  # fmt: skip
        weight = sum(2**i for i, answer in enumerate(answers) if answer)
        return self.b(self.a(x)) * weight / 2 ** len(answers) * scale


def one_row_at_last(step: int) -> tuple[Any, ...]:
    return (numbers((4, 2, 1)[step], 8, seed=step),)


@program(batch=one_row_at_last, ranks=True)
class AsksForOneRow(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h - h.mean(0) if x.shape[0] > 1 else h)


@program(batch=one_row_at_last, ranks=True)
class MakesTensorsOfAnswers(Two):
    def forward(self, x: Tensor) -> Tensor:
        more = torch.tensor([x.shape[0] > 2, x.shape[-1] > 2])
        return self.b(self.a(x)) * more.sum() + torch.tensor(x.shape[0] > 1).double()


@program(batch=one_row_at_last)
class RaisesToAPower(Two):
    """``math.pow`` gives a float, also of whole numbers, and no complex number."""

    def forward(self, x: Tensor) -> Tensor:
        squared = math.pow(x.shape[0], 2)
        assert isinstance(squared, float) and isinstance(math.pow(2, 3), float)
        try:
            root = math.pow(-8, 1 / 3)
        except ValueError:
            root = 2.0
        return self.b(self.a(x)) * root + torch.tensor(squared).dtype.itemsize + torch.tensor(squared)


@program(batch=one_row_at_last)
class AsksWhetherRowsAreLeft(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        return h.std(0) if x.size(0) - 1 else h * 3


@program(batch=one_row_at_last, ranks=True)
class DropsItsRow(Two):
    """Where there is one alone."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)).squeeze(0).sum(0).tanh()


@program(batch=one_row_at_last)
class DropsAllThatIsOne(Two):
    def forward(self, x: Tensor) -> Tensor:
        return torch.squeeze(self.b(self.a(x))[:, None]).sum(0)


@program(batch=one_row_at_last)
class CovariancesOfItsRows(Two):
    """Of one row it is a number."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h).sum() * torch.cov(h) + torch.corrcoef(h).sin()


@program(batch=lengths, ranks=True)
class CountsByLen(Two):
    """``len()`` of a tensor is the size of its first dim, and as open as that."""

    def forward(self, x: Tensor, times: int, scale: float) -> Tensor:
        h = self.b(self.a(x))
        rows = h.transpose(0, 1)
        places = torch.arange(len(rows))
        assert isinstance(len(rows), int) and len([*h.shape]) == 3 and f"{len(rows)}".isdigit()
        return (rows * places[:, None, None]).reshape(len(rows) * len(h), -1) / len(rows) * len("abc")


@program(batch=lambda step: (numbers(4, (6, 7, 9)[step], 8, seed=step),), ranks=True)
class ChunksOfLengths(Two):
    """Linear attention in chunks, of which a short sequence has one: the trace finds that late."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x)).transpose(1, 2)
        h = F.pad(h, (0, -h.shape[2] % 8))
        return h.reshape(*h.shape[:2], -1, 8).cumsum(3)


@program(batch=lambda step: (numbers((4, 2, 8)[step], 3, 8, seed=step),))
class DeviationsOfGroups(Two):
    """The discriminator of StyleGAN: a batch in groups of at most four, whose number the trace finds to be one late."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        group = min(h.shape[0], 4)
        spread = (h.view(group, -1, 3, 8).var(0, unbiased=False) + 1e-8).sqrt().mean([1, 2], keepdim=True)
        return self.b(h + spread.repeat(group, 1, 1))
