"""Attributes that the user has set on tensors, which what stands for them in a trace has not."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.capture.programs.inplace import Two
from tests.capture.registry import program
from tests.capture.runner import rows


def set_scale(model: Any, step: int) -> None:
    """Sets the attribute of the weight, after the first step."""
    if step:
        model.a.weight.scale = 1.0 + step


def rows_with_scale(step: int) -> tuple[Tensor, ...]:
    """Rows that have an attribute."""
    batch = rows(step)
    batch[0].scale = 2.0  # type: ignore[attr-defined]
    return batch


@program(between=set_scale, ranks=True)
class ScaleOfAWeight(Two):
    def __init__(self) -> None:
        super().__init__()
        self.a.weight.scale = 0.5  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.a.weight.scale


@program(between=set_scale, ranks=True)
class ScaleThatAWeightMayHave(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * getattr(self.a.weight, "scale", 0.5)


@program(refused="keep it in an attribute of the module")
class FunctionOfAWeight(Two):
    def __init__(self) -> None:
        super().__init__()
        self.a.weight.scaled = lambda x: 2 * x  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return self.a.weight.scaled(self.a(x))  # refused


@program(batch=rows_with_scale, refused="an argument of its own")
class ScaleOfAnInput(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * getattr(x, "scale", 1.0)  # refused


@program()
class ScaleThatNoInputHas(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * getattr(x, "scale", 1.0)


@program(refused="keep it in an attribute of the module")
class CountsOnAWeight(Two):
    def __init__(self) -> None:
        super().__init__()
        self.a.weight.count = 0  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        self.a.weight.count += 1  # type: ignore[operator]  # refused
        return self.a(x) * self.a.weight.count
