"""Attributes that are read and written past the object that has them: by its class, ``__dict__`` or ``__slots__``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tests.capture.programs.inplace import Two
from tests.capture.registry import program


def rescale(model: Any, step: int) -> None:
    """Sets the attribute of the class whose object a model, plain or compiled, is."""
    for cls in (ScaleOfTheType, ScaleOfTheClass, ScaleOfAClassMethod):
        cls.scale = 1.0 + step


@program(between=rescale, ranks=True)
class ScaleOfTheType(Two):
    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * type(self).scale


@program(between=rescale)
class ScaleOfTheClass(Two):
    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.__class__.scale


@program(between=rescale)
class ScaleOfAClassMethod(Two):
    scale = 1.0

    @classmethod
    def scaled(cls, x: Tensor) -> Tensor:
        return x * cls.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(self.a(x))


@program(between=lambda model, step: setattr(model, "scale", 1.0 + step))
class ScaleInTheDict(Two):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.__dict__["scale"]


@program(between=lambda model, step: setattr(model, "scale", 1.0 + step))
class ScaleAmongVars(Two):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * sum(value for value in vars(self).values() if isinstance(value, float))


@program(between=lambda model, step: setattr(model, "scale", torch.ones(8).double() * step), ranks=True)
class TensorInTheDict(Two):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * self.__dict__["scale"] if "scale" in self.__dict__ else self.a(x)
        return self.b(h) * vars(self).get("scale", 0.0)


@dataclass(slots=True)
class Scales:
    value: float = 1.0
    inner: Scales | None = None


class ScalesWithMore(Scales):
    """Has a ``__dict__``, too."""


SCALES = Scales()


@program(between=lambda model, step: setattr(model.scales.inner, "value", 1.0 + step), ranks=True)
class ScaleInSlots(Two):
    def __init__(self) -> None:
        super().__init__()
        self.scales = Scales(2.0, Scales())

    def forward(self, x: Tensor) -> Tensor:
        assert self.scales.inner is not None
        return self.a(x) * self.scales.value * self.scales.inner.value


@program(between=lambda model, step: setattr(model.scales, "value", 1.0 + step))
class ScaleInSlotsBesideADict(Two):
    def __init__(self) -> None:
        super().__init__()
        self.scales = ScalesWithMore()

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.scales.value


@program(between=lambda model, step: setattr(SCALES, "value", 1.0 + step))
class ScaleInAGlobalsSlots(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * SCALES.value


MORE = ScalesWithMore()


@program(between=lambda model, step: setattr(MORE, "value", 1.0 + step))
class ScaleInAGlobalsSlotsBesideADict(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * MORE.value


@program(refused="registered buffer")
class ScaleInSlotsMoved(Two):
    def __init__(self) -> None:
        super().__init__()
        self.scales = Scales()

    def forward(self, x: Tensor) -> Tensor:
        self.scales.value += 1.0  # refused
        return self.a(x) * self.scales.value


@program()
class CountsInTheDict(Two):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.__dict__["count"] += 1
        return self.a(x) * self.__dict__["count"]


@program()
class CountsPastItsClass(Two):
    count = 0

    def forward(self, x: Tensor) -> Tensor:
        object.__setattr__(self, "count", self.count + 1)
        return self.a(x) * self.count


@program(ranks=True)
class FirstValueInTheDict(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.__dict__.setdefault("scale", 1.5) + self.offset

    @cached_property
    def offset(self) -> float:
        return 0.5
