"""Places from which a forward may read a number that a loop changes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.capture.programs.inplace import Two, TwoAndAMean
from tests.capture.registry import loop, program
from tests.capture.runner import STEPS, Run, sgd

SCALE = 1.0


class Settings:
    """One object for all, as a class method gives it."""

    current: Settings | None = None

    class Inner:
        scale = 1.0

    def __init__(self) -> None:
        self.scale = 1.0

    @classmethod
    def get(cls) -> Settings:
        assert cls.current is not None
        return cls.current


LOCAL = threading.local()
CHAIN = SimpleNamespace(inner=SimpleNamespace(scale=1.0))
MODULE = sys.modules.setdefault("settings_of_a_test", ModuleType("settings_of_a_test"))


def _set_global(step: int) -> None:
    global SCALE
    SCALE = 1.0 + step


def _set_current(step: int) -> None:
    Settings.current = Settings.current or Settings()
    Settings.current.scale = 1.0 + step


def _start_anew(step: int) -> None:
    Settings.current = Settings()
    Settings.current.scale = 1.0 + step


def _replace_inner(step: int) -> None:
    CHAIN.inner = SimpleNamespace(scale=1.0 + step)


def _set_of(holder: Any) -> Callable[[int], None]:
    return lambda step: setattr(holder, "scale", 1.0 + step)


def _scaled(change: Callable[[int], None]) -> Callable[[type[Two]], type[Two]]:
    change(0)
    return program(between=lambda _, step: change(step))


@_scaled(_set_global)
class ScaleAmongGlobals(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * globals()["SCALE"]


@_scaled(_set_current)
class ScaleOfASingleton(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * Settings.get().scale


@_scaled(_start_anew)
class ScaleOfANewSingleton(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * Settings.get().scale


@_scaled(_set_of(Settings.Inner))
class ScaleOfAClassInAClass(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * Settings.Inner.scale


@_scaled(_set_of(LOCAL))
class ScaleOfTheThread(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * LOCAL.scale


@_scaled(_replace_inner)
class ScaleOfWhatIsReplaced(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * CHAIN.inner.scale


@_scaled(_set_of(MODULE))
class ScaleOfAnImportedModule(Two):
    def forward(self, x: Tensor) -> Tensor:
        import settings_of_a_test  # type: ignore[import-not-found]

        return self.a(x) * settings_of_a_test.scale  # type: ignore[no-any-return]


@_scaled(_set_of(MODULE))
class ImportedScale(Two):
    def forward(self, x: Tensor) -> Tensor:
        from settings_of_a_test import scale

        return self.a(x) * scale  # type: ignore[no-any-return]


class _Sines(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (torch.sin if func is torch.tanh else func)(*args, **(kwargs or {}))


class Tanh(Two):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.a(x))


@loop()
def functions_replaced_around_a_call(run: Run) -> None:
    model = run.compile(Tanh())
    optimizer = sgd(model)
    for step in range(STEPS):
        if step == 1:
            with _Sines():
                run.step(model, optimizer, step)
        else:
            run.step(model, optimizer, step)


@program(refused="registered buffer")
class ReadsAGradient(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * (1.0 if self.a.weight.grad is None else 2.0)  # refused


@program(refused="in the loop")
class ClearsGradients(Two):
    def forward(self, x: Tensor) -> Tensor:
        self.zero_grad()  # refused
        return self.a(x)


class Base(Two):
    gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)


def _doubled(self: Base, x: Tensor) -> Tensor:
    return 2 * self.b(x)


_FORWARD = Base.forward


def _change_base(_: Any, step: int) -> None:
    Base.gain = 1.0 + step
    Base.forward = _doubled if step == 2 else _FORWARD  # type: ignore[method-assign]


@program(between=_change_base)
class ScaleOfItsBase(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * super().gain


@program()
class ReadsTheGradientOfABuffer(TwoAndAMean):
    """Which is none, as a codebook's is that an average updates."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.a(x)
        if self.mean.grad is None:
            self.mean.lerp_(out.detach().mean(0), 0.1)
        return out - self.mean
