"""Python that asks again and again: ways that meet before the end are traced once for each question, not for each set
of answers."""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tests.capture.registry import program
from tests.capture.runner import Run, numbers, sgd


def eight_steps(run: Run) -> None:
    model = run.start()
    optimizer = sgd(model, lr=0.01)
    for step in range(8):
        run.step(model, optimizer, step)


def flags(step: int) -> tuple[Any, ...]:
    """Four rows of eight numbers, and five flags: each pair of them has all four values in these steps."""
    patterns = torch.tensor([0b11111, 0b00000, 0b10101, 0b01010, 0b01101, 0b11000, 0b00111, 0b10010])
    return numbers(4, 8, seed=step), (patterns[step] >> torch.arange(5)) % 2 - numbers(5, seed=step).sigmoid()


def few_rows(step: int) -> tuple[Any, ...]:
    """One row or three of eight numbers, so that not all experts have some."""
    return (numbers(1 + step % 2 * 2, 8, seed=step),)


class Five(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
        self.register_buffer("load", torch.zeros(5))


class Routed(Five):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 5)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        return weights, chosen


@program(batch=few_rows, loop=eight_steps)
class SkipsExpertsWithoutRows(Routed):
    """As a mixture of experts is mostly written by hand; who has no row has no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.route(x)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.layers):
            mask = chosen == i
            if mask.any():
                rows, places = torch.where(mask)
                out.index_add_(0, rows, expert(x[rows]) * weights[rows, places, None])
        return out


@program(batch=few_rows, loop=eight_steps)
class LeavesOutExpertsByTheirRows(Routed):
    """And counts in a buffer how many each had."""

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.route(x)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.layers):
            rows, places = torch.where(chosen == i)
            if rows.numel() == 0:
                continue
            out[rows] += expert(x[rows]) * weights[rows, places].unsqueeze(-1)
            self.load[i] += (chosen == i).sum()
        return out + self.load.sum()


@program(batch=flags, loop=eight_steps)
class ReadsWhatAnEarlierWayLeft(Five):
    def forward(self, x: Tensor, flags: Tensor) -> Tensor:
        out, last = self.layers[0](x), x.cos()
        for i, layer in enumerate(self.layers):
            if flags[i] > 0:
                last = layer(last)
            else:
                out = out + last
        return out


@program(batch=flags, loop=eight_steps)
class ExchangesTwoNames(Five):
    def forward(self, x: Tensor, flags: Tensor) -> Tensor:
        a, b = self.layers[0](x), self.layers[1](x)
        for i in range(5):
            if flags[i] > 0:
                a, b = b, a
        return a + 2 * b


@program(batch=flags, loop=eight_steps)
class AddsUpInAnAttribute(Five):
    def forward(self, x: Tensor, flags: Tensor) -> Tensor:
        out = self.layers[0](x)
        self.total = out.mean() * 0
        for i, layer in enumerate(self.layers):
            if flags[i] > 0:
                out = layer(out)
                self.total = self.total + out.square().mean()
        return out + self.total


@program(batch=flags, refused="torch.where")
class CountsItsWays(Five):
    """What follows depends on all answers, and these on parameters."""

    def forward(self, x: Tensor, flags: Tensor) -> Tensor:
        out, used = self.layers[0](x), 0
        for i, layer in enumerate(self.layers):
            if flags[i] + out.mean() * 0 > 0:  # refused
                out, used = layer(out), used + 1
        return out / max(used, 1)


@program(batch=flags, loop=eight_steps)
class HasNumbersInExpressions(Five):
    """A number waits for the others."""

    def weight(self, flag: Tensor) -> int:
        if flag > 0:
            return 1
        return 2

    def forward(self, x: Tensor, flags: Tensor) -> Tensor:
        return self.layers[0](x) * (self.weight(flags[0]) + self.weight(flags[1]) * self.weight(flags[2]))


@program(batch=flags, loop=eight_steps)
class WritesIntoOneOfTwoNames(Five):
    """Both are of one tensor on some ways."""

    def forward(self, x: Tensor, flags: Tensor) -> Tensor:
        a = self.layers[0](x)
        b = a
        for flag in flags[:3]:
            if flag > 0:
                b = b.clone()
            b.mul_(2)
        return a + 3 * b


@program(batch=flags, loop=eight_steps)
class AsksForAGradientBetween(Five):
    """Whether one is required depends on earlier answers."""

    def forward(self, x: Tensor, flags: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for i in range(3):
            if flags[i] > 0:
                out = out + self.layers[i](x)
            elif out.requires_grad:
                out = out * 2
            else:
                out = out + 5
        return out + self.layers[3](x)


def all_of_three(step: int) -> tuple[Any, ...]:
    """Four rows of eight numbers, and three flags, which have all eight values in these steps."""
    return numbers(4, 8, seed=step), (torch.tensor(step) >> torch.arange(3)) % 2 - numbers(3, seed=step).sigmoid()


class Leaves(Five):
    """What the first answer has left is read again where the third is False alone."""

    def leave(self, number: int, h: Tensor) -> Any:
        """Keeps a number somewhere."""
        return None

    def left(self, kept: Any, h: Tensor) -> int:
        """The number."""
        return 0

    def forward(self, x: Tensor, flags: Tensor) -> Tensor:
        h = self.layers[0](x)
        if flags[0] > 0:
            kept = self.leave(1, h)
        else:
            kept = self.leave(2, h)
        if flags[1] > 0:
            self.load.add_(1)
        if flags[2] > 0:
            number = 3
        else:
            number = self.left(kept, h)
        self.leave(0, h)
        return self.layers[1](h) * number + self.load.sum()


@program(batch=all_of_three, loop=eight_steps)
class LeavesWhichOfTwoIsNone(Leaves):
    def leave(self, number: int, h: Tensor) -> Any:
        first, second = (None, 4) if number == 1 else (4, None)

        def which() -> int:
            return 1 if first is None else 2 if second is None else 0

        return which

    def left(self, kept: Any, h: Tensor) -> int:
        which: int = kept()
        return which


@program(batch=all_of_three, loop=eight_steps)
class LeavesADefault(Leaves):
    def leave(self, number: int, h: Tensor) -> Any:
        return self.keep(number)

    def keep(self, number: int) -> Any:
        def kept(*, default: int = number) -> int:
            return default

        return kept

    def left(self, kept: Any, h: Tensor) -> int:
        default: int = kept()
        return default


@program(batch=all_of_three, loop=eight_steps)
class LeavesAnAttributeOfATensor(Leaves):
    def leave(self, number: int, h: Any) -> None:
        h.number = number

    def left(self, kept: Any, h: Any) -> int:
        number: int = h.number
        return number


LAST = {"number": 0}


@program(batch=all_of_three, loop=eight_steps)
class LeavesAnEntryOfAGlobal(Leaves):
    """Which is as it was when the call is over."""

    def leave(self, number: int, h: Tensor) -> None:
        LAST["number"] = number

    def left(self, kept: Any, h: Tensor) -> int:
        return LAST["number"]


@program(batch=all_of_three, loop=eight_steps)
class LeavesAnEntryOfItsClass(Leaves):
    last: ClassVar[dict[str, int]] = {"number": 0}

    def leave(self, number: int, h: Tensor) -> None:
        self.last["number"] = number

    def left(self, kept: Any, h: Tensor) -> int:
        return self.last["number"]


@cache
def choice(flags: Tensor, place: int) -> int:
    return 1 if flags[place] > 0 else 2


@program(batch=all_of_three, loop=eight_steps)
class LeavesAResultInACache(Five):
    def forward(self, x: Tensor, flags: Tensor) -> Tensor:
        choice(flags, 0)
        if flags[1] > 0:
            self.load.add_(1)
        return self.layers[0](x) * (3 if flags[2] > 0 else choice(flags, 0)) + self.load.sum()


class Chosen:
    def __init__(self, flags: Tensor, load: Tensor) -> None:
        if flags[0] > 0:
            self.number = 1
        else:
            self.number = 2
        if flags[1] > 0:
            load.add_(1)


@program(batch=all_of_three, loop=eight_steps)
class AsksWhereAnObjectIsMade(Five):
    """Nobody but the caller has it in the end."""

    def forward(self, x: Tensor, flags: Tensor) -> Tensor:
        chosen = Chosen(flags, self.load)
        return self.layers[0](x) * (3 if flags[2] > 0 else chosen.number) + self.load.sum()


@program(batch=all_of_three, loop=eight_steps)
class LeavesANumberForTheCaller(Five):
    """A function that asks has no use any more for what it was given."""

    def choose(self, kept: dict[str, int], flags: Tensor) -> None:
        if flags[0] > 0:
            kept["number"] = 1
        if flags[1] > 0:
            self.load.add_(1)

    def forward(self, x: Tensor, flags: Tensor) -> Tensor:
        kept = {"number": 2}
        self.choose(kept, flags)
        return self.layers[0](x) * (3 if flags[2] > 0 else kept["number"]) + self.load.sum()


@program(batch=all_of_three, loop=eight_steps)
class AsksInAFunctionThatCallsItself(Five):
    def choose(self, flags: Tensor, place: int) -> int:
        if place == 2:
            return 0
        number = 1 if flags[place] > 0 else 2
        return self.choose(flags, place + 1) * 10 + number

    def forward(self, x: Tensor, flags: Tensor) -> Tensor:
        number = self.choose(flags, 0)
        return self.layers[0](x) * (3 if flags[2] > 0 else number)


@program(batch=all_of_three, loop=eight_steps)
class LeavesANumberOfRows(Five):
    """Each of two has its own, which values tell."""

    def forward(self, x: Tensor, flags: Tensor) -> Tensor:
        h = self.layers[0](x)
        seen = h.detach()
        count = len(torch.nonzero(seen > 0)) if flags[0] > 0 else len(torch.nonzero(seen > 0.3))
        if flags[1] > 0:
            self.load.add_(1)
        return h * (3 if flags[2] > 0 else count) + self.load.sum()


@program(batch=flags, loop=eight_steps)
class SkipsALaterQuestion(Five):
    """The ways of the first question meet where it asks for a third time, those of the second one behind it."""

    def forward(self, x: Tensor, flags: Tensor) -> Tensor:
        out, skips = self.layers[0](x), False
        if flags[0] > 0:
            out = out + 1
            if flags[1] > 0:
                out = out * 2
            else:
                skips = True
        if not skips:
            out = out.sin() if flags[2] > 0 else out.cos()
        skips = False
        if flags[3] > 0:
            out = self.layers[1](out)
        return out + self.layers[2](x)


@program(batch=few_rows, loop=eight_steps)
class GoesOverOneLayerSeveralTimes(Five):
    """No variable tells the turns from each other."""

    def forward(self, x: Tensor) -> Tensor:
        out, skips = self.layers[1](x), False
        for layer in [self.layers[0]] * 4:
            if skips:
                skips = False
            elif out.mean() > 0:
                out, skips = layer(out).cos() - 0.5, True
        return out
