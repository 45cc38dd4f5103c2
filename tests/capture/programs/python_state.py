"""Attributes, closures, globals, counters and caches."""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.registry import loop, program
from tests.capture.runner import STEPS, Run, rows_and_targets, sgd


def anneal(model: Any, step: int) -> None:
    model.tau = 1.0 / (step + 1)


@program(between=anneal, ranks=True)
class Temperature(nn.Module):
    """A temperature that a schedule lowers, on the compiled model."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.tau = nn.Linear(8, 8), 2.0

    def forward(self, x: Tensor) -> Tensor:
        return (self.a(x) / self.tau).softmax(-1)


@loop(ranks=True)
def temperature_of_the_plain(run: Run) -> None:
    """The same, set on the model that was given to compile()."""
    plain = Temperature()
    model = run.compile(plain)
    optimizer = sgd(model)
    for step in range(STEPS):
        plain.tau = 1.0 / (step + 1)
        run.step(model, optimizer, step)


def annealed_submodule(model: Any, step: int) -> None:
    model.get_submodule("0").tau = 3.0 - step


@program(between=annealed_submodule)
def temperature_of_a_submodule() -> nn.Module:
    return nn.Sequential(Temperature(), nn.Linear(8, 8))


@program(between=lambda model, step: setattr(model.get_submodule("1"), "eps", 10.0**-step), ranks=True)
def epsilon_of_a_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))


@program(between=lambda model, step: setattr(model.get_submodule("1"), "p", (1.0, 0.0, 1.0)[step]))
def rate_of_a_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(1.0), nn.Linear(8, 8))


@program(between=lambda model, step: setattr(model.get_submodule("1"), "momentum", 0.1 * (step + 1)))
def momentum_of_a_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))


def swap(model: Any, step: int) -> None:
    model.act = (torch.tanh, torch.sigmoid, torch.relu)[step]


@program(between=swap)
class SwappedFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.act = nn.Linear(8, 8), nn.Linear(8, 8), torch.tanh

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.act(self.a(x)))


@program(between=lambda model, step: setattr(model, "1", (nn.Tanh(), nn.GELU(), nn.ReLU())[step]))
def swapped_module() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


@program()
class Counter(nn.Module):
    """Counts its calls and warms up."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.n = nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return self.a(x) * min(1.0, self.n / 3)


@program()
class CounterOnlyWritten(nn.Module):
    """Remembers the shape it saw last: written, never read."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.rows = nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        self.rows = x.shape[1]
        return self.a(x)


@program()
class CachedTensor(nn.Module):
    """Keeps an activation for whoever asks."""

    last: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.last = h.detach()
        return h


@program()
class CachedMask(nn.Module):
    """A mask that is made at the first call: harmless, the same at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.mask = nn.Linear(8, 8), None

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones(8).cumsum(0)
        return self.a(x) * self.mask


@program()
class Recurrent(nn.Module):
    """The hidden state goes from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.h = nn.Linear(8, 8), nn.Linear(8, 8), torch.zeros(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x) + self.b(self.h))
        self.h = h.detach()
        return h


@program(ranks=True)
class ReboundBuffer(nn.Module):
    """``self.buf = new`` on a registered buffer."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return h - self.mean


@program(ranks=True)
class ReboundBufferInProduct(nn.Module):
    """The old value is saved for backward: a new one must not be written over it."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * self.scale
        self.scale = 0.9 * self.scale + 0.1 * h.detach().abs().mean(0)
        return h


@program()
class BufferCounter(nn.Module):
    """A counter as a buffer, as it should be."""

    n: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.register_buffer("n", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return self.a(x) * (self.n / 3).clamp(max=1.0)


@program(ranks=True)
class AppendsToList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.losses = nn.Linear(8, 8), []

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.losses.append(h.square().mean())
        return h


@program(ranks=True)
class ListOfTheCall(nn.Module):
    """A list that each call clears before it fills it, read by the parent: auxiliary losses."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        losses: list[Tensor] = []
        for layer in (self.a, self.b):
            x = layer(x).tanh()
            losses.append(x.square().mean(-1))
        return x, torch.stack(losses)


@program(refused="torch.where")
class HidesWhatItDraws(nn.Module):
    """A draw that is kept where nobody looks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drawn = nn.Linear(8, 8), (ctypes.c_ubyte * 1)()

    def forward(self, x: Tensor) -> Tensor:
        self.drawn[0] = random.getrandbits(8)  # refused
        return self.layer(x)


ALPHA = 1.0


def set_alpha(model: Any, step: int) -> None:
    global ALPHA
    ALPHA = 1.0 + step


class ReadsGlobal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * ALPHA


@program(between=set_alpha, ranks=True)
def reads_a_global() -> nn.Module:
    set_alpha(None, 0)
    return ReadsGlobal()


@loop()
def closure_of_the_loss(run: Run) -> None:
    """A weight that the loss closes over grows."""
    weight = 1.0
    model = run.compile(nn.Linear(8, 8), lambda out, y: F.mse_loss(out, y) * weight)
    optimizer = sgd(model)
    for step in range(STEPS):
        weight = 1.0 + step
        loss = model(*rows_and_targets(step))
        run.finish(model, optimizer, loss)
        run.note_state(model)


@loop()
def namespace_of_arguments(run: Run) -> None:
    """Everything hangs on ``args``, as in research code."""
    args = SimpleNamespace(beta=0.1, kind="l2")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.args = nn.Linear(8, 8), args

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            return h.abs() * self.args.beta if args.kind == "l1" else h.square() * self.args.beta

    model = run.compile(Net())
    optimizer = sgd(model)
    for step in range(STEPS):
        args.beta, args.kind = 0.1 * (step + 1), ("l2", "l1", "l2")[step]
        run.step(model, optimizer, step)


class Stage(enum.Enum):
    WARM = 1
    FULL = 2


@dataclasses.dataclass
class Config:
    width: int = 8
    scale: float = 1.0
    stage: Stage = Stage.WARM


def next_stage(model: Any, step: int) -> None:
    model.config.stage = Stage.WARM if step == 0 else Stage.FULL
    model.config.scale = 1.0 + step // 2


@program(between=next_stage)
class DataclassConfig(nn.Module):
    """A curriculum in a config that is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.config.stage is Stage.FULL:
            h = h + self.b(h).tanh()
        return h * self.config.scale


class Base(nn.Module):
    slope = 0.2


@program(between=lambda model, step: setattr(Base, "slope", 0.2 + step))
class ClassAttribute(Base):
    def __init__(self) -> None:
        super().__init__()
        Base.slope = 0.2
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(self.a(x), self.slope)


@program(between=lambda model, step: setattr(model, "progress", step / 2))
class PropertyOfProgress(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.progress = nn.Linear(8, 8), 0.0

    @property
    def weight(self) -> float:
        return 1 / (1 + self.progress)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.weight


@program(between=lambda model, step: model.weights.__setitem__("a", 1.0 + step))
class DictOfWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.weights = {"a": 1.0, "b": 0.5}

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.weights["a"] + self.b(x) * self.weights["b"]


@program(between=lambda model, step: model.order.reverse())
class ListOfIndices(nn.Module):
    """Which layers run, in which order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.order = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), [0, 1]

    def forward(self, x: Tensor) -> Tensor:
        for i in self.order:
            x = self.layers[i](x).tanh()
        return x


@program(between=lambda model, step: model.scale.fill_(1.0 + step), ranks=True)
class TensorAttribute(nn.Module):
    """A tensor that is no buffer, changed in place by a schedule: the cure that messages name should work."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.scale = nn.Linear(8, 8), torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.scale


@program(between=lambda model, step: setattr(model, "scale", torch.full((8,), 1.0 + step)))
class TensorAttributeReplaced(nn.Module):
    """The same, replaced by another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.scale = nn.Linear(8, 8), torch.ones(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.scale


@program(between=lambda model, step: model.scale.fill_(1.0 + step), ranks=True)
class BufferOfASchedule(nn.Module):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.scale


@program(between=lambda model, step: setattr(model, "mask", torch.arange(8.0) > step))
class BufferReplaced(nn.Module):
    """A pruning mask, a new tensor now and then."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.register_buffer("mask", torch.ones(8, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.mask


@program(between=lambda model, step: setattr(model, "act", partial(F.leaky_relu, negative_slope=0.1 * (step + 1))))
class PartialActivation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.act = nn.Linear(8, 8), partial(F.leaky_relu, negative_slope=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.a(x))


@program(between=lambda model, step: setattr(model, "gain", np.float64(1.0 + step)))
class NumpyScalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.gain = nn.Linear(8, 8), np.float64(1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * float(self.gain)


@program(between=lambda model, step: setattr(model, "current", step))
class Curriculum(nn.Module):
    """A step that is given to the model as an attribute, with a schedule in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return h + self.b(h) if getattr(self, "current", 0) >= 1 else h


@program()
class ConfigFilledByACall(nn.Module):
    """An object that a module holds gets a value at the first call, as the configs of classifiers do."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.config = Kept()

    def forward(self, x: Tensor) -> Tensor:
        if self.config.kind is None:
            self.config.kind = "regression"
        return self.a(x) * (1 if self.config.kind == "regression" else 2)


class Kept:
    kind: str | None

    def __init__(self) -> None:
        self.kind = None
