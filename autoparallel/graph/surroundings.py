"""Variables around a model that its calls change: ``features[name] = output.detach()`` in a hook, ``steps += 1``.

What they hold is read, given to calls and set as attributes of the model are, under labels that begin with ``SCRIPT``.
A variable is looked after once a call has changed it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from autoparallel.graph.python_state import MISSING
from autoparallel.graph.variables import Variable

SCRIPT = "the script"
"""The path of variables around a model, beside those of its modules."""

TRACED: Any = object()
"""In the memo of ``copy.deepcopy``, by its id, where a model is copied for a trace: an object that has the compiled
model, and a method of which is a hook, has the copy of the plain one then."""


class _Values(MutableMapping[str, Any]):
    """What variables hold, by their names."""

    def __init__(self, variables: dict[str, Variable]) -> None:
        self._variables = variables

    def __getitem__(self, name: str) -> Any:
        value = self._variables[name].read()
        if value is MISSING:
            raise KeyError(name)
        return value

    def __setitem__(self, name: str, value: Any) -> None:
        self._variables[name].write(value)

    def __delitem__(self, name: str) -> None:
        self._variables[name].write(MISSING)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._variables if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Holder:
    """An object whose attributes are variables; it has no others, whose names those may have."""

    __slots__ = ("__values__",)
    __values__: _Values

    def __init__(self, variables: dict[str, Variable]) -> None:
        object.__setattr__(self, "__values__", _Values(variables))

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        return self.__values__

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__values__[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self.__values__[name] = value


@dataclass(eq=False)
class Surroundings:
    """The variables around one model that are looked after; what plans it holds them.

    Attributes:
        variables: by a name of each.
        holder: an object that has what they hold as its attributes.
    """

    variables: dict[str, Variable] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.holder = _Holder(self.variables)

    def add(self, variable: Variable) -> None:
        """Looks after a variable from now on."""
        if variable not in self.variables.values():
            number = 1 + sum(other.partition(" (")[0] == variable.name for other in self.variables)
            self.variables[variable.name if number == 1 else f"{variable.name} ({number})"] = variable

    def name_of(self, variable: Variable) -> str | None:
        """The name of a variable that is looked after."""
        return next((name for name, other in self.variables.items() if other == variable), None)

    def name_holding(self, value: Any) -> str | None:
        """The name of one that holds an object."""
        return next((name for name, other in vars(self.holder).items() if other is value), None)


def surroundings_of(model: nn.Module) -> Surroundings:
    """Those of a model."""
    reference = _OF_MODELS.get(model)
    surroundings = None if reference is None else reference()
    if surroundings is None:
        surroundings = Surroundings()
        _OF_MODELS[model] = weakref.ref(surroundings)
    return surroundings


_OF_MODELS: WeakKeyDictionary[nn.Module, weakref.ref[Surroundings]] = WeakKeyDictionary()
"""Held by neither, as what variables hold may refer to the model."""
