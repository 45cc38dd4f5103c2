"""Texts of values: those that only people read may be a stand-in's, all others decide about what is computed."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from tests.capture.registry import program
from tests.capture.runner import numbers

LOGGER = logging.getLogger(__name__)
FACTORS = {"3": 2.0, "4": 5.0, "tensor(3)": 0.5, "True": 0.25, "6.0": 3.0}


def counted(step: int) -> tuple[Any, ...]:
    """Four rows, and a number: another in the second step."""
    return numbers(4, 8, seed=step), torch.tensor((3, 4, 3)[step])


class Talker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        h = self.a(x).tanh()
        return self.b(h).square().mean() * self.factor(h, n)

    def factor(self, h: Tensor, n: Tensor) -> float:
        raise NotImplementedError

    def check(self, holds: Tensor, message: str) -> None:
        if not holds:
            raise ValueError(message)

    def pick(self, message: str) -> float:
        LOGGER.debug(message)
        return FACTORS.get(message, 7.0)


@program(batch=counted, ranks=True)
class LooksUpTheText(Talker):
    def factor(self, h: Tensor, n: Tensor) -> float:
        return FACTORS.get(f"{n}", 7.0) + FACTORS.get(f"{n:d}", 13.0)


@program(batch=counted, ranks=True, device="cpu")
class LooksUpTheTextOfATensor(Talker):
    """On another device it says on which, and is refused."""

    def factor(self, h: Tensor, n: Tensor) -> float:
        return FACTORS.get(str(n), 11.0)


@program(batch=counted)
class ComparesTheText(Talker):
    def factor(self, h: Tensor, n: Tensor) -> float:
        text = "n is {}".format(n + 1)  # noqa: UP032
        return 2.0 if text == "n is 4" else 3.0 if text.endswith("5") else 7.0


@program(batch=counted)
class GivesTheTextToAFunction(Talker):
    def factor(self, h: Tensor, n: Tensor) -> float:
        return self.pick(f"{n}") + self.pick(message=f"{n * 1}")


@program(batch=counted)
class LooksUpTheTextOfSizes(Talker):
    def factor(self, h: Tensor, n: Tensor) -> float:
        return FACTORS.get(f"{h.shape[0] > 3}", 7.0) + FACTORS.get(f"{h.shape[0] * 1.5}", 7.0)


@program(batch=counted, refused=r"int\(n\)")
class LooksUpTheTextOfAResult(Talker):
    def factor(self, h: Tensor, n: Tensor) -> float:
        return FACTORS.get(f"{(h > 0).sum()}", 7.0)  # refused


@program(batch=counted, refused=r"int\(n\)")
class LooksUpTheTextOfAParameter(Talker):
    def factor(self, h: Tensor, n: Tensor) -> float:
        return 2.0 if "requires_grad" in str(self.a.bias) else 7.0  # refused


@program(batch=counted, refused="keep it a tensor")
class LooksUpTheTextOfANumber(Talker):
    def factor(self, h: Tensor, n: Tensor) -> float:
        return FACTORS.get(f"{h.sum().item()}", 7.0)  # refused


@program(batch=counted, refused=r"int\(n\)")
class GivesTheTextOfAResultToAFunction(Talker):
    def factor(self, h: Tensor, n: Tensor) -> float:
        return self.pick(f"{(h > 0).sum()}")  # refused


@program(batch=counted, refused=r"int\(n\)")
class SortsByTexts(Talker):
    def factor(self, h: Tensor, n: Tensor) -> float:
        parts = [*h.sum(0)]
        parts.sort(key=str)  # refused
        return parts[0].item()


@program(batch=counted, ranks=True)
class TellsPeople(Talker):
    """What is printed, logged, warned of, or raised."""

    def factor(self, h: Tensor, n: Tensor) -> float:
        count = (h > 2).sum()
        print(f"{count} of {n}", h.mean())
        LOGGER.info("the mean is %s", h.mean())
        LOGGER.info(f"the mean is {h.mean():.3f}, of {count}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.warn("there are " + str(count), stacklevel=1)
        if count > 0:
            raise ValueError(f"{count} are too large")
        assert not h.isnan().any(), f"{h} is not a number"
        message = f"{count} are too large"
        message += f", the largest is {h.max()}"
        if h.shape[0] > 100:
            raise ValueError(message)
        return 2.0


@program(batch=counted, ranks=True)
class TellsByFunctionsOfItsOwn(Talker):
    def factor(self, h: Tensor, n: Tensor) -> float:
        def count() -> str:
            return f"{(h > 2).sum()} of {h.numel()}"

        self.check(h.max() < 2, message=f"{h.max()} is too large")
        self.check((h > -2).all(), f"{h.min()} is too small")
        check(h.shape[0] > 0, f"no rows of {h}")
        LOGGER.info(count())
        mean = lambda: f"mean {h.mean()}"  # noqa: E731
        print(mean())
        torch._check(h.shape[1] > 0, lambda: f"no columns of {h}")
        return 2.0


def check(holds: bool, message: str) -> None:
    """As torch's checks are wrapped."""

    def made() -> str:
        return message

    torch._check(holds, made if not callable(message) else message)


@program(batch=counted, ranks=True)
class TellsHowManyItSelects(Talker):
    def factor(self, h: Tensor, n: Tensor) -> Any:
        rows = h[h > 0]
        check(rows.numel() > 0, f"{rows.shape[0]} of {h.shape} are left")
        return rows.sum() / h.numel()


@program(batch=counted, ranks=True)
class TellsWhatItHolds(Talker):
    """Texts of objects that hold tensors."""

    def factor(self, h: Tensor, n: Tensor) -> float:
        LOGGER.debug({"h": h, "n": (n, n)})
        print([h, n], self.a.bias, torch.distributions.Normal(h.mean(), 1.0))
        return 2.0


@program(batch=counted)
class LooksUpTheFormattedSize(Talker):
    def factor(self, h: Tensor, n: Tensor) -> float:
        return {"004": 3.0, "6.00": 5.0}.get(f"{h.shape[0]:03d}", 7.0) + len(f"{h.shape[0] * 1.5:.2f}")
