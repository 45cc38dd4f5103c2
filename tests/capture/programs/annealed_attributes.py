"""Floats, strings and counts that calls read and change, wherever a model keeps them."""

from __future__ import annotations

import enum
import math
from typing import Any

import torch
from torch import Tensor, nn

from tests.capture.programs.changing_attributes import over_lengths
from tests.capture.programs.inplace import Two
from tests.capture.programs.loops import finish
from tests.capture.registry import loop, program
from tests.capture.runner import Run, numbers, sgd


class Tempered(Two):
    def __init__(self) -> None:
        super().__init__()
        self.tau = 1.0


@loop(ranks=True)
def temperature_that_decays(run: Run) -> None:
    """One trace serves all values but the first."""

    class Decaying(Tempered):
        def forward(self, x: Tensor) -> Tensor:
            h = torch.softmax(self.a(x) / self.tau, -1)
            self.tau *= 0.99
            return self.b(h)

    over_lengths(run, Decaying(), (6,) * 12)


@loop(ranks=True)
def temperature_that_decays_to_a_least_one(run: Run) -> None:
    class Decaying(Tempered):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.tau = max(0.3, self.tau * math.exp(-0.1) / 1.01)
                self.mean = 0.9 * getattr(self, "mean", 1.0) + 0.1 * min(self.tau, 0.8)
            return self.b(torch.softmax(self.a(x) / self.tau, -1)) * self.mean

    over_lengths(run, Decaying(), (6,) * 12)


@loop(ranks=True)
def scale_that_doubles_at_a_count(run: Run) -> None:
    """As of a scaler that the model keeps: the number stays open where the count fixes what is computed."""

    class Scaling(Two):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.good = 0.125, 0

        def forward(self, x: Tensor) -> Tensor:
            out = self.b(self.a(x)) * self.scale
            self.good += 1
            if self.good >= 2:
                self.scale, self.good = self.scale * 2.0, 0
            return out

    over_lengths(run, Scaling(), (6,) * 8)


@loop(ranks=True)
def temperature_that_decays_at_every_second_call(run: Run) -> None:
    """The count is asked before it is raised, so that it begins at 0."""

    class Decaying(Tempered):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            h = torch.softmax(self.a(x) / self.tau, -1)
            if self.calls % 2 == 1:
                self.tau = max(0.3, self.tau * 0.9)
            self.calls += 1
            return self.b(h)

    over_lengths(run, Decaying(), (6,) * 8)


@loop(ranks=True)
def temperature_that_is_asked_for(run: Run) -> None:
    """A trace for each answer serves the numbers that have it."""

    class Asking(Tempered):
        rate = 0.0

        def forward(self, x: Tensor) -> Tensor:
            self.tau *= 0.8
            self.rate += 0.1
            tau = self.tau if self.tau > 0.3 else 0.3
            for _ in range(2 if tau * x.shape[1] > 3 and self.rate != 0.0 else 1):
                x = self.a(x)
            if self.rate >= 1.0:
                self.rate = 0.0
            return self.b(x) * tau + self.rate

    over_lengths(run, Asking(), (6,) * 14)


@loop(refused="registered buffer")
def temperature_that_counts(run: Run) -> None:
    """Each value is a trace of its own."""

    class Counting(Tempered):
        def forward(self, x: Tensor) -> Tensor:
            self.tau *= 0.95
            return self.b(self.a(x)) * [1.0, 2.0, 3.0][int(2 * math.gamma(1 + self.tau))]  # refused

    over_lengths(run, Counting(), (6,) * 12)


@loop(ranks=True)
def argument_that_is_asked_for(run: Run) -> None:
    """Nothing is computed with it but the way."""

    class Asked(Two):
        def forward(self, x: Tensor, alpha: float, count: int) -> Tensor:
            h = self.a(x) if alpha > 0.55 else self.b(x)
            if count == 4 or not alpha:
                h = 2 * h
            return self.b(h) if count * alpha > 4.0 else h

    model = run.compile(Asked().double())
    optimizer = sgd(model)
    for step in range(12):
        model(numbers(4, 8, seed=step), 0.1 * step, step).square().mean().backward()
        finish(run, model, optimizer)


@loop(ranks=True)
def phases_by_name(run: Run) -> None:
    class Phased(Two):
        def __init__(self) -> None:
            super().__init__()
            self.phase = "first"

        def forward(self, x: Tensor) -> Tensor:
            out = self.a(x) if self.phase == "first" else self.b(x)
            self.phase = "second" if self.phase == "first" else "first"
            return out

    over_lengths(run, Phased(), (6,) * 5)


class Phase(enum.Enum):
    WARM = 1
    MAIN = 2


@loop(ranks=True)
def phases_of_an_enum(run: Run) -> None:
    """What is set is no number and no string, and some of it is returned."""

    class Phased(Two):
        def __init__(self) -> None:
            super().__init__()
            self.phase, self.calls, self.dtype = Phase.WARM, 0, torch.float32

        def forward(self, x: Tensor) -> tuple[Tensor, Phase, dict[str, Any]]:
            self.calls += 1
            self.dtype, self.forms = x.dtype, [x.device.type, (torch.strided, 1j)]
            self.phase = Phase.WARM if self.calls < 3 else Phase.MAIN
            out = self.a(x) if self.phase is Phase.WARM else self.b(x)
            return out, self.phase, {"dtype": x.dtype, "calls": self.calls}

    model = run.compile(Phased().double())
    optimizer = sgd(model)
    for step in range(5):
        outputs = model(numbers(4, 8, seed=step))
        run.note("outputs", outputs)
        outputs[0].square().mean().backward()
        finish(run, model, optimizer)
        run.note_state(model)


@loop(refused="outside of forward")
def names_without_end(run: Run) -> None:
    class Named(Two):
        def __init__(self) -> None:
            super().__init__()
            self.label = "a"

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x) * (2 if len(self.label) > 3 else 1)
            self.label += "a"  # refused
            return self.b(x)

    over_lengths(run, Named(), (6,) * 12)


@loop(ranks=True)
def count_that_is_looked_up(run: Run) -> None:
    class Turns(Two):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            rounds, turn = divmod(self.calls, 3)
            return {0: self.a, 1: self.b}[self.calls % 2](x) * (1 + rounds) + turn

    over_lengths(run, Turns(), (6,) * 7)


@loop(ranks=True)
def count_behind_a_property(run: Run) -> None:
    class Hidden(Two):
        _scale = 1

        @property
        def scale(self) -> int:
            return self._scale

        @scale.setter
        def scale(self, scale: int) -> None:
            self._scale = scale

        def forward(self, x: Tensor) -> Tensor:
            self.scale = self.scale + 1
            return self.b(self.a(x)) * self.scale

    over_lengths(run, Hidden(), (6,) * 5)


class Schedule:
    def __init__(self) -> None:
        self.step = 0


class Settings:
    def __init__(self) -> None:
        self.schedule, self.other = Schedule(), Schedule()


@loop(ranks=True)
def counts_in_an_object_within_an_object(run: Run) -> None:
    class Counting(Two):
        def __init__(self) -> None:
            super().__init__()
            self.settings = Settings()

        def forward(self, x: Tensor) -> Tensor:
            self.settings.schedule.step += 1
            self.settings.other.step += 2
            return self.b(self.a(x)) * self.settings.schedule.step / self.settings.other.step

    over_lengths(run, Counting(), (6,) * 5)


class Rising(Schedule):
    value = 0.0

    def tick(self) -> float:
        self.step += 1
        self.value = min(1.0, self.step / 4)
        return self.value


@loop(ranks=True)
def counts_of_objects_in_lists_and_dicts(run: Run) -> None:
    class Scheduled(Two):
        def __init__(self) -> None:
            super().__init__()
            self.schedules = [Rising(), {"beta": Rising(), "gamma": (Rising(),)}]

        def forward(self, x: Tensor) -> Tensor:
            alpha, others = self.schedules
            h = self.a(x) * alpha.tick() + others["beta"].tick()
            others["gamma"][0].step += 2
            return self.b(h) * others["gamma"][0].step

    over_lengths(run, Scheduled(), (6,) * 6)


@loop(ranks=True)
def state_that_is_emptied(run: Run) -> None:
    """What one call keeps, the next one uses up."""

    class Emptying(Two):
        last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            if self.last is None:
                self.last = h.detach().mean((0, 1))
                return self.b(h)
            out = self.b(h + self.last)
            self.last = None
            return out

    over_lengths(run, Emptying(), (6,) * 7)


@loop(ranks=True)
def table_of_evaluation(run: Run) -> None:
    """Training empties it, and says so, also where it is empty already."""

    class Caching(Two):
        def __init__(self) -> None:
            super().__init__()
            self.table: Tensor | None = None
            self.mode, self.sizes = "training", [0, 0]

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.table, self.mode, self.sizes = None, "training", [0, 0]
                return self.b(self.a(x))
            if self.table is None:
                self.table = self.b.weight.detach() @ self.a.weight.detach()
            self.mode, self.sizes = "evaluation", [1, 2]
            return x @ self.table.T

    over_lengths(run, Caching(), (6,) * 7)


@loop()
def attribute_of_one_call(run: Run) -> None:
    class Passing(Two):
        def forward(self, x: Tensor) -> Tensor:
            self.hidden = self.a(x)
            out = self.b(self.hidden)
            del self.hidden
            return out

    over_lengths(run, Passing(), (6,) * 3)


@loop(ranks=True)
def turns_of_layers(run: Run) -> None:
    """A number with a few values, beside one that counts as it does at first."""

    class Turns(Two):
        def __init__(self) -> None:
            super().__init__()
            self.turn = self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            for layer in [self.a, self.b, self.a][: self.turn + 1]:
                x = layer(x).tanh()
            self.turn, self.calls = (self.turn + 1) % 3, self.calls + 1
            return self.b(x)

    over_lengths(run, Turns(), (6,) * 8)


@program(ranks=True)
class CastsAList(Two):
    """As to another device, which changes nothing here."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors = [torch.ones(8) * i for i in range(3)]
        self.scales = {"small": torch.full((8,), 0.5), "large": torch.full((8,), 2.0)}

    def forward(self, x: Tensor) -> Tensor:
        self.anchors = [a.to(x) for a in self.anchors]
        scales = {name: s.double().flatten() for name, s in self.scales.items()}
        return self.b(self.a(x) + sum(self.anchors)) * scales["small"].to(x.device) + scales["large"]


@loop()
def norm_of_one_row(run: Run) -> None:
    """One value per channel has no variance."""

    class Normed(Two):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.norm(self.a(x)))

    model = run.compile(Normed().double())
    for rows in (4, 1, 4):
        try:
            run.note("output", model(torch.ones(rows, 8)))
        except (ValueError, RuntimeError) as error:
            run.note("error", "Expected more than 1 value per channel when training" in str(error))
