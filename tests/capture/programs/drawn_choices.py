"""Whole numbers, choices and orders that a forward draws of Python's ``random`` and of numpy's: stochastic depth by
choice, crops, layers in another order."""

from __future__ import annotations

import random
from random import choice, randint

import numpy as np
from torch import Tensor, nn

from tests.capture.programs.drawn_numbers import Deep, seven_steps, train_and_evaluate, upcoming
from tests.capture.programs.inplace import Two
from tests.capture.registry import loop, program
from tests.capture.runner import Run, rows, sgd


@program(ranks=True, loop=seven_steps, observe=upcoming)
class ChoosesByPython(Two):
    def forward(self, x: Tensor) -> Tensor:
        return random.choice((self.a, self.b))(x)


@program(ranks=True, loop=seven_steps, observe=upcoming)
class ChoosesOfThree(Deep):
    """Of three, a generator draws again until it is one of them."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        layer = choice(list(self.layers)[:3])
        h = h + layer(h).tanh() * random.random()
        return self.b(h) * (1.0 if random.randrange(2) else 2.0)


@program(ranks=True, loop=seven_steps, observe=upcoming)
class DropsOneLayer(Deep):
    """At most one layer is dropped, which one is drawn only where one is."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        dropped = random.randint(0, 2) if self.training and random.random() < 0.6 else -1
        for i, layer in enumerate(self.layers[:3]):
            if i != dropped:
                h = h + layer(h).tanh()
        return self.b(h) * random.uniform(1, 2)


@program(ranks=True, loop=seven_steps, observe=upcoming)
class ShufflesLayers(Two):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        layers = list(self.layers)
        random.shuffle(layers)
        for layer in layers:
            x = layer(x).tanh()
        return self.b(x)


@program(ranks=True, loop=seven_steps, observe=upcoming)
class SamplesLayers(Deep):
    def forward(self, x: Tensor) -> Tensor:
        for i in sorted(random.sample(range(4), 3)):
            x = self.layers[i](x).tanh()
        (head,) = random.choices([self.a, self.b], weights=[1, 3])
        return head(x)


@program(ranks=True, loop=seven_steps, observe=upcoming)
class DrawsUntilItHasAnother(Two):
    """Of many, ``sample`` draws again what it has already."""

    def forward(self, x: Tensor) -> Tensor:
        first = other = random.randrange(3)
        while other == first:
            other = random.randrange(3)
        places = random.sample(range(30), 2)
        return self.b(self.a(x)[:, [first, other]].repeat(1, 4)) * (places[0] != places[1])


@program(ranks=True, loop=seven_steps, observe=upcoming)
class ComputesWithWholeNumbers(Two):
    """They stay open where the model only computes with them: levels of noise."""

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        level = randint(1, 1000)
        self.last = random.randrange(0, 100, 10)
        return self.b(self.a(x) * (level / 1000) + self.last), level


@program(ranks=True, loop=seven_steps, observe=upcoming)
class CropsBySizes(Two):
    def forward(self, x: Tensor) -> Tensor:
        start = random.randint(0, x.shape[1] - 4 - 2)
        return self.b(self.a(x)[:, start : start + 4].repeat(1, 2))


@program(ranks=True, loop=seven_steps, observe=upcoming)
class DrawsByNumpy(Deep):
    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[np.random.randint(3)](self.a(x))
        scale = np.random.choice([0.5, 1.0, 1.5])
        kind = np.random.choice(2, p=[0.3, 0.7])
        if np.random.choice(["tanh", "relu"]) == "tanh":
            h = h.tanh()
        return (
            (self.b(h) if kind else self.b(h).sin())
            * float(scale)
            * (np.random.randint(1, 500) / 500)
            * np.random.rand()
        )


@program(ranks=True, loop=seven_steps, observe=upcoming)
class DrawsInLayers(nn.Module):
    """Layers that are alike, each of which chooses."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            if random.random() < 0.3:
                return x
            return x + random.choice([self.a, self.b])(x).tanh() * (random.randint(1, 20) / 20)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@program(ranks=True, loop=seven_steps, observe=upcoming)
class DrawsOfOne(Two):
    """A choice of one is known, and is drawn all the same; ``randint(3, 3)``, too."""

    def forward(self, x: Tensor) -> Tensor:
        layer = random.choice([self.a])
        return self.b(layer(x)) * random.randint(3, 3)


@program(ranks=True, loop=seven_steps, observe=upcoming)
class DrawsByWhatItDrew(Deep):
    """What is drawn, and in which order, depends on what was drawn before."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if random.random() < 0.5:
            h = h * random.choice([0.5, 1.5, 2.5])
        if random.random() < 0.5:
            h = self.layers[random.randrange(2)](h)
        return self.b(h) * random.random()


@loop(ranks=True)
def choices_beside_evaluation(run: Run) -> None:
    """The loop draws, too, and evaluation draws nothing."""

    class Chooses(Deep):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            if self.training:
                h = random.choice(self.layers[:3])(h)
            return self.b(h)

    model = run.compile(Chooses().double())
    optimizer = sgd(model)
    for step in range(5):
        x = rows(step)[0] * random.choice([1, 2, 3])
        train_and_evaluate(run, model, optimizer, x)


@program(ranks=True, loop=seven_steps, observe=upcoming)
class ShufflesWhatItHolds(Two):
    """The order is carried from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.order = [0, 1, 2]

    def forward(self, x: Tensor) -> Tensor:
        random.shuffle(self.order)
        return self.b(self.a(x)) * self.order[0]


@program(refused="draw single numbers with")
class DrawsNormals(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) * random.gauss(0, 1)  # refused


@program(refused="draw single numbers with")
class SetsTheGeneratorBack(Two):
    def forward(self, x: Tensor) -> Tensor:
        before = random.getstate()
        factor = random.choice([0.5, 1.5])
        random.setstate(before)  # refused
        return self.b(self.a(x)) * factor


@program(refused="draw single numbers with")
class SetsNumpysBack(Two):
    def forward(self, x: Tensor) -> Tensor:
        before = np.random.get_state()
        factor = np.random.rand()
        np.random.set_state(before)  # refused
        return self.b(self.a(x)) * factor


@program(refused="draw single numbers with")
class SeedsTheGenerator(Two):
    def forward(self, x: Tensor) -> Tensor:
        random.seed(3)  # refused
        return self.b(self.a(x)) * random.choice([0.5, 1.5])
