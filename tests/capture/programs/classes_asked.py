"""Models that ask which class an object is of: what is traced is of classes derived from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from tests.capture.programs.inplace import Two
from tests.capture.registry import program
from tests.capture.runner import numbers

SCALES: dict[type, float] = {nn.Linear: 2.0}
LAYERS = (nn.Linear, nn.Conv2d)


class Settings:
    scale = 3.0


class Wider(Settings):
    scale = 5.0


class Asking(Two):
    kinds: ClassVar[dict[type, float]] = {Settings: 2.0}

    def __init__(self) -> None:
        super().__init__()
        self.settings, self.kind, self.plain = Settings(), nn.Linear, torch.ones(8).double()


@program(ranks=True)
class OfModules(Asking):
    def forward(self, x: Tensor) -> Tensor:
        answers = [
            type(self.b) is nn.Linear, type(self.b) == nn.Module, type(self.b) in LAYERS, type(self) is OfModules,  # noqa: E721
            type(self.b) is self.kind, self.b.__class__ is nn.Linear, type(self.a) is type(self.b), type(self) is Two,
            self.__class__ == Two, type(self).__mro__[1] is Asking, type(self).__bases__ == (Asking,),
            issubclass(Asking, type(self)), isinstance(self.a, type(self.b)), type(self).__name__ == "OfModules",
        ]  # fmt: skip
        return self.a(x) * sum(2**i for i, answer in enumerate(answers) if answer) / 2 ** len(answers)


@program(ranks=True)
class OfTensors(Asking):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        answers = [
            type(x) is torch.Tensor, type(h) == torch.Tensor, type(self.a.weight) is nn.Parameter,  # noqa: E721
            type(self.a.weight) is torch.Tensor, type(self.plain) is torch.Tensor, type(h) in (list, tuple),
            type(h.shape) is torch.Size, type(x.dtype) is torch.dtype,
        ]  # fmt: skip
        return h * sum(2**i for i, answer in enumerate(answers) if answer) / 2 ** len(answers)


@program(refused="isinstance")
class OfTensorsByTheirAttribute(Two):
    def forward(self, x: Tensor) -> Tensor:  # refused
        return self.a(x) * (2.0 if x.__class__ is torch.Tensor else 1.0)


@program(ranks=True)
class OfSettings(Asking):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * (self.settings.scale if type(self.settings) is Settings else 1.0)


@program(ranks=True)
class Later(Asking):
    def forward(self, x: Tensor) -> Tensor:
        kind, of_settings = type(self.b), self.settings.__class__
        scale = 2.0 if kind in LAYERS else 1.0
        return self.a(x) * scale * (of_settings.scale if of_settings is Settings else 1.0)


@program(ranks=True)
class OfClosures(Asking):
    def forward(self, x: Tensor) -> Tensor:
        def is_a(value: Any) -> bool:
            return type(value) is kind

        kind = nn.Linear
        return self.a(x) * (2.0 if is_a(self.b) else 1.0) * sum(1.0 for m in self.modules() if type(m) == kind)  # noqa: E721


@program(ranks=True)
class LooksItUp(Asking):
    """In tables of the module and of its class."""

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * SCALES.get(type(self.b), 1.0) * self.kinds[type(self.settings)]


@dataclass(order=True)
class Rates:
    rate: float = 0.5


@program(ranks=True)
class Makes(Asking):
    def __init__(self) -> None:
        super().__init__()
        self.rates = Rates(0.25)

    def forward(self, x: Tensor) -> Tensor:
        other = type(self.rates)(self.rates.rate * 2)
        changed = replace(self.rates, rate=0.1)
        return (
            self.a(x)
            * (other.rate + changed.rate)
            * (1.0 if type(changed) is Rates else 2.0)
            * (3.0 if self.rates < Rates() else 1.0)
        )


def widen(model: Any, step: int) -> None:
    model.settings = (Settings, Wider)[step % 2]()


@program(between=widen, ranks=True)
class OtherClasses(Asking):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * (2.0 if type(self.settings) is Settings else 0.5)


def rescale(model: Any, step: int) -> None:
    ByVariables.scale = ByGetattr.scale = 1.0 + step


@program(between=rescale, ranks=True)
class ByVariables(Two):
    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        kind = type(self)
        return self.a(x) * kind.scale


@program(between=rescale, ranks=True)
class ByGetattr(Two):
    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * getattr(self.__class__, "scale")  # noqa: B009


class Registering(type):
    classes: ClassVar[dict[str, type]] = {}

    def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> Any:
        made = super().__new__(cls, name, bases, body)
        cls.classes[name] = made
        return made


@program(ranks=True)
class IsRegisteredByItsMetaclass(Two, metaclass=Registering):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * (2.0 if Registering.classes[type(self).__name__] is type(self) else 1.0)


@program(ranks=True)
class CallsItsBaseByItsClass(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * len(super(type(self), self).__repr__()) / len(super(self.__class__, self).__repr__())


class Based(Two):
    @classmethod
    def scaled(cls, x: Tensor) -> Tensor:
        return x * (2.0 if cls is OfClassMethods else 1.0)


@program(ranks=True)
class OfClassMethods(Based):
    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(self.a(x)) + type(self).scaled(self.b(x)) + Based.scaled(x)


@runtime_checkable
class Runs(Protocol):
    def run(self, x: Tensor) -> Tensor: ...


@program(ranks=True)
class OfProtocols(Two):
    def run(self, x: Tensor) -> Tensor:
        return self.a(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x) * (2.0 if isinstance(self, Runs) and not isinstance(self.b, Runs) else 1.0)


@program(refused=".")
class CountsByVariables(Two):
    """Of a class, which no program changes."""

    count = 0

    def __init__(self) -> None:
        super().__init__()
        CountsByVariables.count = 0

    def forward(self, x: Tensor) -> Tensor:
        kind = type(self)
        kind.count += 1  # refused
        return self.a(x) / self.count


@program(refused=".")
class AddsByVariables(Two):
    seen: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        AddsByVariables.seen = []

    def forward(self, x: Tensor) -> Tensor:
        kind = type(self)
        kind.seen.append(1)  # refused
        return self.a(x) / len(self.seen)


def either(step: int) -> tuple[Any, ...]:
    x = numbers(4, 8, seed=step)
    return ([x] if step == 1 else x,)


@program(batch=either)
class OfArguments(Two):
    def forward(self, x: Any) -> Tensor:
        if type(x) is not torch.Tensor:
            (x,) = x
        return self.a(x)
