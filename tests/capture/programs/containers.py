"""Containers of a user's own class, those of a class, tables in which a model looks itself up, and types."""

from __future__ import annotations

from collections import UserList
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from tests.capture.programs.inplace import Two
from tests.capture.registry import program


class Config(dict[str, Any]):
    """A dict whose entries are attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Rates(list[float]):
    """A list of a class of its own."""


def set_entries(model: Any, step: int) -> None:
    """Changes what containers of the model hold."""
    model.config["scale"] = 1.0 + step
    model.rates[0] = model.users[0] = 0.5 * step


class _Held(Two):
    def __init__(self) -> None:
        super().__init__()
        self.config, self.rates, self.users = Config(scale=1.0), Rates([0.5]), UserList([0.5])


@program(between=set_entries, ranks=True)
class EntryOfAConfig(_Held):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.config["scale"]


@program(between=set_entries)
class AttributeOfAConfig(_Held):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.config.scale


@program(between=set_entries)
class EntryOfAList(_Held):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.rates[0] + self.b(x) * self.users[0]


@program(between=lambda model, step: setattr(model, "scale", -0.0 if step % 2 else 0.0))
class SignOfZero(Two):
    scale = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * (1.0 if str(self.scale) == "0.0" else 2.0)


@program(refused="registered buffer of the module")
class ListOfAClass(Two):
    calls: ClassVar[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(1)  # refused
        return self.a(x) * len(self.calls)


OF_MODULES: WeakKeyDictionary[nn.Module, float] = WeakKeyDictionary()
BY_ID: dict[int, float] = {}


@program(refused="attributes of the modules")
class LooksItselfUp(Two):
    def __init__(self) -> None:
        super().__init__()
        OF_MODULES[self] = 2.0

    def forward(self, x: Tensor) -> Tensor:  # refused
        return self.a(x) * OF_MODULES.get(self, 1.0)


@program(refused="attributes of the modules")
class LooksItselfUpById(Two):
    def __init__(self) -> None:
        super().__init__()
        BY_ID[id(self.a)] = 2.0

    def forward(self, x: Tensor) -> Tensor:  # refused
        return self.a(x) * BY_ID.get(id(self.a), 1.0)


@program()
class GrowsABuffer(Two):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turns", torch.ones(1, 8))

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > len(self.turns):
            self.register_buffer("turns", torch.arange(8.0 * len(x)).view(-1, 8))
        return self.a(x) * self.turns[: len(x)]


@program(refused="registered buffer")
class ChangesAnArray(Two):
    def __init__(self) -> None:
        super().__init__()
        self.counts = np.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        self.counts[0] += 1  # refused
        return self.a(x)


# As in einops, whose functions find what computes for a tensor by its type.
FILLED = """
from torch import Tensor
from tests.capture.programs.inplace import Two

SCALES = {Tensor: 2.0}

def scale_of(x):
    kind = type(x)
    if kind not in SCALES:
        SCALES[kind] = 2.0 if isinstance(x, Tensor) else 1.0
    return SCALES[kind]

class Scaled(Two):
    def forward(self, x):
        return self.a(x) * scale_of(x)
"""


@program(ranks=True)
class GivesSomeParameters(Two):
    """Of which an optimizer is made: the other layer keeps its values."""

    def parameters(self) -> Iterator[nn.Parameter]:  # type: ignore[override]
        return self.b.parameters()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


@program(ranks=True)
class SumsItsBuffers(Two):
    """Without tensors that are none."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = torch.ones(8).double()
        self.register_buffer("scale", torch.full((8,), 2.0).double())

    def forward(self, x: Tensor) -> Tensor:
        count = len([*self.buffers()]) + len([*self.named_buffers()]) + len([*self.a.buffers()])
        return self.a(x) * sum(self.buffers()) * count + self.offset


@program(ranks=True)
def fills_a_table_by_types() -> nn.Module:
    """Of an installed package."""
    names: dict[str, Any] = {"__name__": "installed"}
    exec(compile(FILLED, "/site-packages/installed.py", "exec"), names)
    return cast(nn.Module, names["Scaled"]())


@dataclass
class Settings:
    """Compared by its fields."""

    scale: float = 1.0


@program(ranks=True)
class EqualSettings(Two):
    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings()

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * (2.0 if self.settings == Settings() else 1.0)


@program(ranks=True)
class LayersThatAreOne(nn.Module):
    """A layer in two places is one among ``modules()``, whatever the way to it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.rest = nn.ModuleDict({"a": self.a, "b": nn.Linear(8, 8)})

    def forward(self, x: Tensor) -> Tensor:
        penalty = sum(m.weight.square().sum() for m in self.modules() if isinstance(m, nn.Linear))
        scale = 2.0 if self.rest["a"] is self.a and [*self.rest.values()][1] is self.rest["b"] else 1.0
        return scale * self.rest["b"](self.rest["a"](self.a(x))) + penalty


@program()
class ParametersInAList(Two):
    """As those that do not decay."""

    def __init__(self) -> None:
        super().__init__()
        self.without = [self.a.bias, self.b.bias]

    def forward(self, x: Tensor) -> Tensor:
        penalty = sum(p.square().sum() for p in self.parameters() if not any(p is q for q in self.without))
        return self.a(x) + penalty


@program()
class SetsATensorInTheDict(Two):
    def __init__(self) -> None:
        super().__init__()
        self.last = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.__dict__["last"] = h.detach().mean()
        return h


class Irreps(tuple):  # type: ignore[type-arg]
    """As of e3nn: a tuple that does not say how long it is."""

    def __len__(self) -> int:
        raise NotImplementedError


@program(ranks=True)
class TupleWithoutALength(Two):
    def __init__(self) -> None:
        super().__init__()
        self.parts = Irreps((3, 5))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.a(x).split([*iter(self.parts)], -1)
        return self.b(torch.cat([second, first], -1))
