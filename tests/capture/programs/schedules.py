"""Functions of Python and of numpy of numbers that calls change, or that are sizes: one trace serves all of them."""

from __future__ import annotations

import math
from math import exp, sqrt
from typing import Any

import numpy as np
from torch import Tensor

from tests.capture.programs.changing_attributes import over_lengths
from tests.capture.programs.inplace import Two
from tests.capture.programs.loops import finish
from tests.capture.registry import loop, program
from tests.capture.runner import Run, numbers, sgd, signed


class Stepping(Two):
    """More steps than a number by which a model fixes what it computes may have values."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.rate = 0, 0.9

    def weight(self) -> Any:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        return self.b(self.a(x) * self.weight())


@loop(ranks=True)
def ramp_of_a_reversed_gradient(run: Run) -> None:
    """As in domain-adversarial training."""

    class Ramp(Stepping):
        def weight(self) -> Any:
            return 2 / (1 + math.exp(-10 * self.step / 12)) - 1

    over_lengths(run, Ramp(), (6,) * 12)


@loop()
def cosine_of_numpy(run: Run) -> None:
    class Cosine(Stepping):
        def weight(self) -> Any:
            return 0.5 * (1 + np.cos(np.pi * self.step / 12)) + np.exp(-self.step)

    over_lengths(run, Cosine(), (6,) * 12)


@loop()
def functions_that_are_imported(run: Run) -> None:
    class Decay(Stepping):
        def weight(self) -> Any:
            self.rate = max(0.1, self.rate * exp(-0.02 * self.step))
            return self.rate / sqrt(self.step) + math.log(self.step, 10) + math.log2(self.step)

    over_lengths(run, Decay(), (6,) * 12)


@loop()
def powers(run: Run) -> None:
    class Powers(Stepping):
        def weight(self) -> Any:
            return 0.99**self.step * math.pow(self.rate, 3) + math.tanh(self.rate) + math.sin(math.radians(self.step))

    over_lengths(run, Powers(), (6,) * 12)


@loop(ranks=True)
def remainders_of_floats(run: Run) -> None:
    """As Python computes them: 1 // 0.1 is 9, and what is left of a float is a float."""

    class Cycle(Stepping):
        def weight(self) -> Any:
            time = 0.1 * self.step
            self.rate = (self.rate + 0.7) % 1.5
            whole = int(7 * time % 1.5) + math.ceil(time % 0.25) + math.floor(2 * self.rate)
            return whole + (10 * time) // 0.1 + self.step // 0.3 + time % 0.25 + (-time) % 0.4 % 0.3 + self.rate % 1

    over_lengths(run, Cycle(), (6,) * 12)


@loop()
def powers_of_what_is_below_zero(run: Run) -> None:
    class Parabola(Stepping):
        def weight(self) -> Any:
            time = self.step / 5 - 1
            return time**2 + (-time) ** 3.0 + math.pow(time, 3) + time**self.step

    over_lengths(run, Parabola(), (6,) * 12)


@loop(ranks=True)
def questions_about_functions(run: Run) -> None:
    class Phases(Stepping):
        def weight(self) -> Any:
            decay = math.exp(-self.step / 4)
            is_late = math.log(self.step) > 1
            return (decay if decay > 0.3 else 2 * decay) + float(is_late) + (self.step % 3.5 == 0) * 0.5

    over_lengths(run, Phases(), (6,) * 12)


class OfItsLength(Two):
    def forward(self, x: Tensor) -> Tensor:
        """As many rounds as lengths have bits, and what has the length's logarithm."""
        for _ in range(math.ceil(math.log2(x.shape[1]))):
            x = x + self.a(x).tanh()
        return self.b(x) * math.log(x.shape[1], 10) / math.sqrt(x.shape[1])


@loop(ranks=True)
def logarithms_of_lengths(run: Run) -> None:
    over_lengths(run, OfItsLength(), (5, 6, 7, 8, 9, 10, 16))


@loop()
def functions_of_an_argument(run: Run) -> None:
    class Weighed(Two):
        def forward(self, x: Tensor, alpha: float) -> Tensor:
            return self.b(self.a(x)) * math.exp(-alpha) + math.cos(alpha)

    model = run.compile(Weighed().double())
    optimizer = sgd(model)
    for step in range(12):
        model(numbers(4, 8, seed=step), 0.1 * step).square().mean().backward()
        finish(run, model, optimizer)


@program(batch=signed, ranks=True)
class FunctionsOfWhatIsRead(Two):
    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        h = self.a(x)
        n = h.norm().item()
        return self.b(h) * math.exp(-n) / math.sqrt(n) + math.log(n), math.atan(n)
