"""State that hides in objects, containers, classes, functions and the environment."""

from __future__ import annotations

import collections
import contextvars
import functools
import itertools
import os
import types
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.programs.inplace import Two
from tests.capture.registry import loop, program
from tests.capture.runner import STEPS, Run, rows_and_targets, sgd
from tests.devices import DEVICE


class Schedule:
    """No module: a value that its owner moves on."""

    def __init__(self) -> None:
        self.t = 0

    def value(self) -> float:
        return 0.5**self.t


@program(between=lambda model, step: setattr(model.schedule, "t", step))
class ScheduleObject(Two):
    def __init__(self) -> None:
        super().__init__()
        self.schedule = Schedule()

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.schedule.value()


class Gain:
    def __init__(self) -> None:
        self.gain = torch.tensor(2.0, dtype=torch.float64, device=DEVICE)

    def apply(self, x: Tensor) -> Tensor:
        return x * self.gain


@program(between=lambda model, step: model.scale.__self__.gain.mul_(0.5))
class MethodOfAnObject(Two):
    """A bound method, whose object holds a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Gain().apply

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(self.a(x))


@program()
class ScheduleMovedInForward(Two):
    def __init__(self) -> None:
        super().__init__()
        self.schedule = Schedule()

    def forward(self, x: Tensor) -> Tensor:
        self.schedule.t += 1
        return self.a(x) * self.schedule.value()


class Nested:
    def __init__(self) -> None:
        self.inner = [types.SimpleNamespace(table={"k": [1.0, 2.0]})]


@program(between=lambda model, step: model.nested.inner[0].table["k"].__setitem__(1, 2.0 + step))
class DeeplyNested(Two):
    def __init__(self) -> None:
        super().__init__()
        self.nested = Nested()

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.nested.inner[0].table["k"][1]


SETTINGS: dict[str, Any] = {"alpha": 1.0}
SPACE = types.SimpleNamespace(alpha=1.0)


class ReadsGlobalDict(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * SETTINGS["alpha"]


@program(between=lambda model, step: SETTINGS.update(alpha=1.0 + step))
def global_dict() -> nn.Module:
    SETTINGS["alpha"] = 1.0
    return ReadsGlobalDict()


class ReadsGlobalObject(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.helper(x)

    def helper(self, x: Tensor) -> Tensor:
        return scaled_by_space(self.a(x))


def scaled_by_space(x: Tensor) -> Tensor:
    return x * SPACE.alpha


@program(between=lambda model, step: setattr(SPACE, "alpha", 1.0 + step))
def global_object_in_a_helper() -> nn.Module:
    SPACE.alpha = 1.0
    return ReadsGlobalObject()


CALLS = 0


class CountsGlobally(Two):
    def forward(self, x: Tensor) -> Tensor:
        global CALLS
        CALLS += 1
        return self.a(x) / CALLS


@program(observe=lambda _: CALLS, ranks=True)
def global_counter() -> nn.Module:
    global CALLS
    CALLS = 0
    return CountsGlobally()


@program(refused=".")
class ClassCounter(Two):
    """A counter on the class."""

    count = 0

    def __init__(self) -> None:
        super().__init__()
        ClassCounter.count = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).count += 1  # refused
        return self.a(x) / self.count


@program(ranks=True)
class CellCounter(Two):
    """A counter in a closure's cell."""

    def __init__(self) -> None:
        super().__init__()
        n = 0

        def count() -> int:
            nonlocal n
            n += 1
            return n

        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) / self.count()


@program(refused=".")
class IteratorAttribute(Two):
    """itertools.count."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) / next(self.numbers)  # refused


@program()
class RingBuffer(Two):
    """A deque of what was seen."""

    def __init__(self) -> None:
        super().__init__()
        self.recent: collections.deque[Tensor] = collections.deque(maxlen=2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.recent.append(h.detach().mean(0))
        return h - sum(self.recent) / len(self.recent)


@program()
class DictOfCounts(Two):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, int] = collections.defaultdict(int)

    def forward(self, x: Tensor) -> Tensor:
        self.seen["calls"] += 1
        return self.a(x) / self.seen["calls"]


@program()
class AnnealsItself(Two):
    def __init__(self) -> None:
        super().__init__()
        self.tau = 1.0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.tau = max(0.1, self.tau * 0.9)
        return self.a(x) / self.tau


@program()
class TensorAttributeInPlace(Two):
    """A plain tensor that forward itself changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.level = torch.ones(8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.level.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return h - self.level


@program(refused="register_buffer")
class ListOfTensorsInPlace(Two):
    """The same in a list: per-layer statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = [torch.zeros(8), torch.zeros(8)]

    def forward(self, x: Tensor) -> Tensor:
        for layer, level in zip((self.a, self.b), self.levels, strict=True):
            x = layer(x).tanh()
            level.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)  # refused
            x = x - level
        return x


@program(between=lambda model, step: model.gains.__setitem__(0, 1.0 + step))
class NumpyArray(Two):
    """An array that a schedule changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.gains = np.ones(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * float(self.gains[0])


@program(between=lambda model, step: model.gains.__setitem__(0, 1.0 + step))
class NumpyArrayAsTensor(Two):
    """torch.from_numpy in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.gains = np.ones(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * torch.as_tensor(self.gains)


MODE: contextvars.ContextVar[float] = contextvars.ContextVar("MODE", default=1.0)


@program(between=lambda model, step: MODE.set(1.0 + step))
class ContextVariable(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * MODE.get()  # refused


@program(between=lambda model, step: os.environ.update(TEST_CAPTURE_GAIN=str(1.0 + step)))
class Environment(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * float(os.environ["TEST_CAPTURE_GAIN"])  # refused


@functools.lru_cache(maxsize=4)
def positions(n: int) -> Tensor:
    return torch.arange(n, dtype=torch.float64).sin()


@program()
class CachedFunction(Two):
    """Positions from an lru_cache: no fake tensor may stay in it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + positions(x.shape[1])


@loop()
def cache_used_outside(run: Run) -> None:
    """The same cache is used by plain code afterwards."""
    positions.cache_clear()
    model = run.compile(CachedFunction())
    optimizer = sgd(model)
    for step in range(STEPS):
        run.step(model, optimizer, step)
        run.note("positions", positions(8))


@program(between=lambda model, step: setattr(model, "route", {"left", "right"} if step else {"left"}))
class SetOfNames(Two):
    def __init__(self) -> None:
        super().__init__()
        self.route = {"left"}

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return h + self.b(x) if "right" in self.route else h


@program(between=lambda model, step: setattr(model.get_submodule("1"), "training", step != 1))
def part_in_evaluation() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))


def doubled(self: Any, x: Tensor) -> Tensor:
    return 2 * F.linear(x, self.weight, self.bias)


@program()
def forward_patched_before() -> nn.Module:
    """A submodule's forward is replaced, as quantisers and adapters do."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].forward = types.MethodType(doubled, model[0])  # type: ignore[method-assign]
    return model


@loop()
def forward_patched_later(run: Run) -> None:
    plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model = run.compile(plain)
    optimizer = sgd(model)
    for step in range(STEPS):
        if step == 1:
            plain[0].forward = types.MethodType(doubled, plain[0])  # type: ignore[method-assign]
        if step == 2:
            del plain[0].forward
        run.step(model, optimizer, step)


@loop()
def class_patched_later(run: Run) -> None:
    """A method of the class is replaced between steps."""

    class Net(Two):
        def mix(self, x: Tensor) -> Tensor:
            return self.a(x)

        def forward(self, x: Tensor) -> Tensor:
            return self.mix(x)

    model = run.compile(Net())
    optimizer = sgd(model)
    for step in range(STEPS):
        if step == 1:
            Net.mix = lambda self, x: self.b(x)  # type: ignore[method-assign]
        run.step(model, optimizer, step)


class Trainer:
    """A loss that is a method, and a weight that grows."""

    def __init__(self) -> None:
        self.weight = 1.0

    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        return self.weight * F.mse_loss(out, y)


def train_with(run: Run, loss_fn: Any, change: Any) -> None:
    model = run.compile(nn.Linear(8, 8), loss_fn)
    optimizer = sgd(model)
    for step in range(STEPS):
        change(step)
        loss = model(*rows_and_targets(step))
        run.finish(model, optimizer, loss)
        run.note_state(model)


@loop()
def loss_as_a_method(run: Run) -> None:
    trainer = Trainer()
    train_with(run, trainer.loss, lambda step: setattr(trainer, "weight", 1.0 + step))


@loop()
def loss_as_a_module(run: Run) -> None:
    """nn.SmoothL1Loss, whose beta is annealed."""
    loss = nn.SmoothL1Loss(beta=1.0)
    train_with(run, loss, lambda step: setattr(loss, "beta", 1.0 / (step + 1)))


class Balanced(nn.Module):
    """Weighs classes by how often they have come."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.ones(8))

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        labels = y.argmax(1)
        self.counts += F.one_hot(labels, 8).sum(0)  # refused
        return F.cross_entropy(out, labels, 1 / self.counts)


@loop(refused="a module that holds the model and the loss function")
def loss_with_a_buffer(run: Run) -> None:
    train_with(run, Balanced().double().to(DEVICE), lambda step: None)


@loop()
def loss_as_a_partial(run: Run) -> None:
    """A partial whose keywords change."""
    loss = functools.partial(F.smooth_l1_loss, beta=1.0)
    train_with(run, loss, lambda step: loss.keywords.update(beta=1.0 / (step + 1)))


@loop()
def loss_with_a_tensor(run: Run) -> None:
    """Class weights in a closure, changed in place."""
    weights = torch.ones(8)
    train_with(run, lambda out, y: (weights * (out - y).square()).mean(), lambda step: weights.fill_(1.0 + step))


@loop()
def loss_with_a_default(run: Run) -> None:
    """A mutable default argument."""
    table = {"w": 1.0}

    def loss(out: Tensor, y: Tensor, table: dict[str, float] = table) -> Tensor:
        return table["w"] * F.mse_loss(out, y)

    train_with(run, loss, lambda step: table.update(w=1.0 + step))


@loop()
def lora_added_later(run: Run) -> None:
    """A submodule with new parameters is put in after compile()."""

    class LoRA(nn.Module):
        def __init__(self, inner: nn.Linear) -> None:
            super().__init__()
            self.inner, self.down = inner, nn.Parameter(torch.full((2, 8), 0.1, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + (x @ self.down.T).sum(-1, keepdim=True)

    plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    plain[0] = LoRA(plain[0])  # type: ignore[arg-type]
    plain[0].inner.requires_grad_(False)
    model = run.compile(plain)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(STEPS):
        run.step(model, optimizer, step)


class Criterion:
    """A loss that is no module, as detectors have them."""

    def __init__(self, size: int) -> None:
        self.places = torch.arange(size, dtype=torch.float64)

    def __call__(self, h: Tensor) -> Tensor:
        return (h * self.places).square().mean()


@program(refused="call the plain model once before compile")
class MakesItsCriterionInTheFirstCall(Two):
    def __init__(self) -> None:
        super().__init__()
        self.criterion: Criterion | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.criterion is None:
            self.criterion = Criterion(8)  # refused
        return self.criterion(self.a(x))


@program(ranks=True)
class HasMadeItsCriterion(MakesItsCriterionInTheFirstCall):
    def __init__(self) -> None:
        super().__init__()
        self.double()(torch.zeros(1, 8, dtype=torch.float64))


@program()
class LocalsOfAClosure(Two):
    """Cells that a call makes and leaves: of a generator in another one, of a local function that counts."""

    def forward(self, x: Tensor) -> Tensor:
        layers = ((self.a, self.b), (1.0, 2.0))
        layers = tuple(tuple(row[i] for i in (1, 0)) for row in layers)
        n, seen = 0, [1.0]

        def run(layer: nn.Module, x: Tensor) -> Tensor:
            nonlocal n
            n += 1
            seen.append(n)
            return layer(x) * n / sum(seen)

        for layer, scale in zip(*layers, strict=True):
            x = run(layer, x) * scale
        return x
