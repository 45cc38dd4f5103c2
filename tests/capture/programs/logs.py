"""Lists, dicts and deques of a model to which calls add."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.capture.programs.inplace import Two
from tests.capture.programs.loops import finish
from tests.capture.registry import loop, program
from tests.capture.runner import STEPS, Run, numbers, sgd


class Logging(Two):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[Any] = []
        self.stats: dict[str, Any] = {}
        self.recent: deque[Any] = deque(maxlen=2)


def _train(run: Run, model: Any, other: Sequence[Any] = ()) -> None:
    """Calls a model more often than what it fixes may have values; another list takes the place of its log."""
    optimizer = sgd(model)
    for step in range(12):
        output = model(numbers(4, 8, seed=step))
        output.square().mean().backward()
        finish(run, model, optimizer)
        run.note("kept", [model.log, model.stats, [*model.recent], type(model.recent)])
        if step == 6:
            model.log = [*other]


@loop(ranks=True)
def histories_grow(run: Run) -> None:
    class Histories(Logging):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            self.log.append(h.detach().norm().item())
            self.log += [h.shape[0], "step"]
            self.recent.append(h.detach().mean())
            return self.b(h)

    _train(run, run.compile(Histories().double()))


@loop(ranks=True)
def losses_are_collected(run: Run) -> None:
    """The loop adds them up and empties the list, which the layers share."""

    class Layer(Two):
        def __init__(self, losses: list[Tensor]) -> None:
            super().__init__()
            self.losses = losses

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x).tanh()
            self.losses.append(h.square().mean())
            return h

    class Layers(Logging):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(self.log) for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return self.b(x)

    model = run.compile(Layers().double())
    optimizer = sgd(model)
    for step in range(STEPS):
        output = model(numbers(4, 8, seed=step))
        (output.square().mean() + sum(model.log)).backward()
        finish(run, model, optimizer)
        run.note("collected", model.log)
        if step == 1:
            model.log = []  # the layers go on with their own
        else:
            model.log.clear()


@loop(ranks=True)
def statistics_by_name(run: Run) -> None:
    class Statistics(Logging):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            self.stats["mean"] = h.detach().mean()
            self.stats.update(rows=x.shape[0], twice=2 * self.stats["mean"])
            return self.b(h)

    model = run.compile(Statistics().double())
    _train(run, model)


@loop(ranks=True)
def a_list_is_emptied_and_filled(run: Run) -> None:
    """What a call reads of it is its own."""

    class Emptied(Logging):
        def forward(self, x: Tensor) -> Tensor:
            self.log.clear()
            self.stats.clear()
            for name in ("one", "other"):
                x = self.a(x).tanh()
                self.log.append(x.mean())
                self.stats[name] = x.detach().sum()
            return self.b(x) * (len(self.log) + sum(self.log)) + torch.stack(self.log).sum() + self.stats["one"]

    _train(run, run.compile(Emptied().double()))


@program()
class LogsInOrder(Logging):
    """In a dict of another class."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: OrderedDict[str, Any] = OrderedDict()

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.norms["last"] = h.norm().item()
        return self.b(h)


@program(refused="as an output")
class ReadsItsHistory(Logging):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.log.append(h.detach().mean())
        return self.b(h) + sum(self.log)  # refused


@program(refused="self.log.clear")
class StacksItsHistory(Logging):
    """torch looks into the list by itself."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.log.append(h.detach().mean())
        return self.b(h) + torch.stack(self.log).sum()  # refused


@loop(ranks=True)
def losses_by_name_are_summed(run: Run) -> None:
    """A call sets all that there was before, so that it may read all."""

    class Losses(Two):
        def __init__(self) -> None:
            super().__init__()
            self.losses: dict[str, Any] = {"second": 0.0, "first": 0.0}

        def forward(self, x: Tensor) -> dict[str, Any]:
            h = self.a(x)
            self.losses["first"] = h.mean()
            self.losses["second"] = self.b(h).square().mean()
            return {**self.losses, "sum": sum(self.losses.values())}

    model = run.compile(Losses().double())
    optimizer = sgd(model)
    for step in range(6):
        losses = model(numbers(4, 8, seed=step))
        losses["sum"].backward()
        run.note("losses", [losses, model.losses])
        finish(run, model, optimizer)
        if step == 3:
            model.losses = {"first": 0.0, "second": 0.0}


@loop(ranks=True)
def entries_are_taken_out(run: Run) -> None:
    """What a call has set it takes out again, and with it what stood there."""

    class Passing(Two):
        def __init__(self) -> None:
            super().__init__()
            self.stats: dict[str, Any] = {"mean": 0.0, "kept": 1.0}

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            self.stats["mean"] = h.mean()
            h = h + self.stats.pop("mean")
            self.stats["sum"] = h.detach().sum()
            del self.stats["sum"]
            self.stats["sum"] = h.detach().mean()
            return self.b(h) if "mean" not in self.stats else h

    model = run.compile(Passing().double())
    for step in range(4):
        run.note("output", model(numbers(4, 8, seed=step)))
        run.note("stats", model.stats)
        if step == 1:
            model.stats["mean"] = 5.0


@loop(ranks=True)
def features_in_places_of_a_list(run: Run) -> None:
    """Of each layer, with a graph, of which the loop makes a term of its loss; the model and a hook may read them."""

    class Places(Two):
        def __init__(self) -> None:
            super().__init__()
            self.features: list[Any] = [None, None, "name"]

        def forward(self, x: Tensor) -> Tensor:
            for place, layer in enumerate((self.a, self.b)):
                x = layer(x).tanh()
                self.features[place] = x
            return x + self.features[0] + self.features[-2].mean()

    plain = Places().double()
    counts = [0, 0]

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        counts[0], counts[1] = output.shape[0], 7

    plain.a.register_forward_hook(hook)
    model = run.compile(plain)
    optimizer = sgd(model)
    for step in range(6):
        output = model(numbers(4 + step % 2, 8, seed=step))
        (output.square().mean() + model.features[0].abs().mean()).backward()
        run.note("features", [*model.features, *counts])
        finish(run, model, optimizer)
        if step == 3:
            model.features = [1.0, None, "other"]


@loop()
def all_places_of_a_list_are_set(run: Run) -> None:
    class Places(Logging):
        def __init__(self) -> None:
            super().__init__()
            self.log = [None, None]

        def forward(self, x: Tensor) -> Tensor:
            self.log[0] = self.a(x).detach().mean()
            self.log[1] = self.b(x).detach().mean()
            return self.b(self.a(x)) * sum(self.log)

    _train(run, run.compile(Places().double()), [0.0, 0.0])


@loop()
def a_list_is_set_and_grows(run: Run) -> None:
    class Grows(Logging):
        def forward(self, x: Tensor) -> Tensor:
            self.log[0] = x.shape[0]
            self.log.append(self.a(x).detach().mean())
            return self.b(x)

    model = Grows().double()
    model.log = [0]
    compiled = run.compile(model)
    for step in range(4):
        compiled(numbers(4, 8, seed=step)).sum().backward()
        run.note("log", [*compiled.log])


@program(refused="as an output")
class ReadsAnEarlierPlace(Logging):
    def __init__(self) -> None:
        super().__init__()
        self.log = [0.0] * 20

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.log[0] = h
        return h + self.log[1] + sum(self.log)  # refused
