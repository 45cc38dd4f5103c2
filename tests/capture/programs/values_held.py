"""Python that reads values of buffers, and of attributes that are tensors."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap

from tests.capture.programs.inplace import Two
from tests.capture.programs.loops import finish
from tests.capture.registry import loop, program
from tests.capture.runner import STEPS, Run, numbers, sgd


class Masked(Two):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.arange(8) % 2 == 0)


@program(ranks=True)
class SelectsColumnsByABuffer(Masked):
    """As a coupling layer does: as many columns as a mask holds."""

    def forward(self, x: Tensor) -> Tensor:
        kept, other = x[:, self.mask], x[:, ~self.mask]
        return self.b(torch.cat([kept * 2, other], 1)) + self.a(x)


class Times(Two):
    def __init__(self) -> None:
        super().__init__()
        self.times = torch.linspace(0.0, 1.0, 4)

    def forward(self, x: Tensor) -> Tensor:
        for start, end in zip(self.times[:-1], self.times[1:], strict=True):
            x = x + (end - start).item() * torch.tanh(self.a(x))
        return self.b(x)


@program(ranks=True)
class StepsAtHeldTimes(Times):
    """As a solver with steps of its own."""


@loop(ranks=True)
def times_that_the_loop_sets(run: Run) -> None:
    """In place, and by another tensor."""
    model = Times().double()
    compiled = run.compile(model)
    optimizer = sgd(compiled)
    for step in range(STEPS + 1):
        if step == 1:
            compiled.times[2] = 0.5
        elif step == 2:
            compiled.times = torch.linspace(0.0, 2.0, 3)
        output = compiled(numbers(4, 8, seed=step))
        run.note("output", output)
        output.square().mean().backward()
        finish(run, compiled, optimizer)


@program()
class AsksWhatAMaskHolds(Masked):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.mask.any() and self.mask.float().mean() < 0.75:
            h = torch.tanh(h)
        return self.b(h)[:, : int(self.mask.sum())]


@program(ranks=True)
class AsksForEachColumn(Two):
    """An attribute, as often as it has places."""

    def __init__(self) -> None:
        super().__init__()
        self.continuous = torch.arange(8) % 3 > 0

    def forward(self, x: Tensor) -> Tensor:
        columns = []
        for place, is_continuous in enumerate(self.continuous):
            columns.append(x[:, place] if is_continuous else x[:, place].exp())
        return self.b(self.a(torch.stack(columns, 1)))


@program()
class LooksUpRowsByBoth(Masked):
    """By an input's value and a buffer's."""

    def forward(self, x: Tensor) -> Tensor:
        width = int(self.mask.sum()) + int((x.detach() > 9).sum())
        return self.b(self.a(x))[:, :width]


class Counted(Two):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.ones((), dtype=torch.int64))


@program()
class ReadsWhatItChanges(Counted):
    """A counter in a buffer that decides how many columns there are."""

    def forward(self, x: Tensor) -> Tensor:
        width = int(self.count)
        self.count += 1
        return self.b(self.a(x))[:, :width]


@program()
class SetsItByWhatItReads(Counted):
    def forward(self, x: Tensor) -> Tensor:
        width = int(self.count)
        self.count.fill_(width % 4 + 1)
        return self.b(self.a(x))[:, :width]


@program()
class ReadsWhatItBindsAnew(Counted):
    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return self.b(self.a(x))[:, : int(self.count)]


class SetUpByItsFirstCall(Counted):
    """As an ActNorm whose flag is a number: only the first call changes it."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        width = int(self.count)
        if width == 1:
            self.set_up(h.detach())
        return self.b(h)[:, :width]

    def set_up(self, h: Tensor) -> None:
        raise NotImplementedError


@program(ranks=True)
class FillsANumberItReads(SetUpByItsFirstCall):
    def set_up(self, h: Tensor) -> None:
        self.count.fill_(4)


@program()
class CopiesOverANumberItReads(SetUpByItsFirstCall):
    def set_up(self, h: Tensor) -> None:
        self.count.copy_(torch.tensor(4))


@program()
class BindsANumberItReadsAnew(SetUpByItsFirstCall):
    def set_up(self, h: Tensor) -> None:
        self.count = torch.full_like(self.count, 4)


@program()
class ReadsWhatActivationsDecide(Counted):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        width = int(self.count)
        self.count.copy_((h > 0).sum() % 4 + 1)
        return self.b(h)[:, :width]


@program(ranks=True)
class AsksUnderVmap(Masked):
    """What parts have in common has values there, too."""

    def energy(self, row: Tensor) -> Tensor:
        h = self.a(row)
        for place, keeps in enumerate(self.mask.tolist()):
            h = torch.tanh(h) + row[place] if keeps else h
        return self.b(torch.cat([h[self.mask], h[~self.mask]])).square().sum()

    def forward(self, x: Tensor) -> Tensor:
        return vmap(grad(self.energy))(x)


@program(batch=lambda step: (numbers(4, 8, seed=step), torch.tensor([[1, 2], [0, 1]]) + step))
class ReadsWhatVmapHasWritten(Two):
    """To each row of a tensor: nobody follows it, so that it is a size that values tell."""

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        counts = counts.clone()
        first = int(counts[0, 0])
        vmap(lambda row: row.mul_(2))(counts)
        h = self.a(x) * (counts[0, 0] - first)
        return self.b(h)[:, : counts[1, 1] + 1]


class HoldsElsewhere(Two):
    """In lists, objects, classes, variables around it, and behind names of an enclosing function."""

    levels: Any = torch.tensor([1.0, 2.0])

    def __init__(self, width: Tensor) -> None:
        super().__init__()
        self.widths = [torch.tensor(8), torch.tensor(6)]
        self.options = SimpleNamespace(mask=torch.arange(8) % 2 == 0)
        self.width = lambda: int(width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        for level in self.levels.tolist():
            h = torch.tanh(h * level)
        if self.options.mask.all():
            h = h * 2
        h = h[:, : int(self.widths[1])] + h[:, : int(WIDTHS["out"])]
        return self.b(torch.nn.functional.pad(h, (0, 8 - h.shape[1])))[:, : self.width()]


WIDTHS = {"out": torch.tensor(6)}
SCALE = torch.tensor(0.5)
with torch.inference_mode():
    LEVEL = torch.tensor(2.0)


@loop(ranks=True)
def values_held_elsewhere(run: Run) -> None:
    """The loop sets them, in place and by other tensors; the first step asks for what was set last."""
    width = torch.tensor(4)
    changes: list[Callable[[Any], Any]] = [
        lambda model: HoldsElsewhere.levels.mul_(2),
        lambda model: setattr(HoldsElsewhere, "levels", torch.tensor([3.0])),
        lambda model: model.options.mask.fill_(True),
        lambda model: width.sub_(1),
        lambda model: (WIDTHS["out"].fill_(5), model.widths[1].fill_(5)),
        lambda model: (WIDTHS.update(out=torch.tensor(6)), model.widths.__setitem__(1, torch.tensor(6))),
    ]
    HoldsElsewhere.levels, WIDTHS["out"] = torch.tensor([1.0, 2.0]), torch.tensor(6)
    model = HoldsElsewhere(width).double()
    compiled = run.compile(model)
    optimizer = sgd(compiled)
    for step in range(len(changes) + 1):
        if step:
            changes[step - 1](compiled)
        output = compiled(numbers(4, 8, seed=step))
        run.note("output", output)
        output.square().mean().backward()
        finish(run, compiled, optimizer)


class ScalesBy(Two):
    """A number of torch's around the model."""

    def scale(self, h: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.scale(self.a(x)))


def set_scale(_: Any, step: int) -> None:
    SCALE.fill_(0.5 + step)
    with torch.inference_mode():
        LEVEL.fill_(2.0 + step)


@program(between=set_scale, ranks=True)
class ReadsAComplexNumber(ScalesBy):
    def scale(self, h: Tensor) -> Tensor:
        return h * abs(complex(SCALE))


@program(between=set_scale)
class FillsWithANumberOfTorch(ScalesBy):
    def scale(self, h: Tensor) -> Tensor:
        return h * torch.full((8,), SCALE) + SCALE  # type: ignore[call-overload]


@program(between=set_scale)
class ReadsWhatInferenceModeMade(ScalesBy):
    def scale(self, h: Tensor) -> Tensor:
        return h * LEVEL.item()


@program(between=set_scale)
class GivesATensorForANumber(ScalesBy):
    """torch would read it when the model is traced."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.add(self.a(x), 1.0, alpha=SCALE))  # type: ignore[call-overload]


@program(ranks=True)
class GivesBuffersForNumbers(Two):
    """To functions that take numbers alone."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("numbers", torch.tensor([2, 1]))
        self.register_buffer("slope", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        two, one = self.numbers
        h = F.leaky_relu(F.group_norm(self.a(x), two), self.slope).transpose(one, 0)  # type: ignore[arg-type]
        parts = torch.cat([part.exp() for part in h.t().chunk(two, one)], 1).sub(1.0, alpha=self.slope)
        return self.b(parts) + parts.topk(two, dim=one).values.sum(one).unsqueeze(one)


@program(between=set_scale, refused="read its values by x.numpy")
class HandsItsMemoryOn(ScalesBy):
    def scale(self, h: Tensor) -> Tensor:
        return h * float(np.from_dlpack(SCALE))  # type: ignore[arg-type]  # refused
