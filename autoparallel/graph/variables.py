"""Variables of Python's that functions read and bind: globals, cells, attributes, and arguments that they come with."""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass
from functools import partial
from types import CellType, CodeType, FunctionType
from typing import Any

from autoparallel.graph.python_state import MISSING


@dataclass(frozen=True, eq=False)
class Variable:
    """Where a value stands.

    Attributes:
        owner: what has it.
        name: its name there.
    """

    owner: Any
    name: str

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.owner is self.owner and other.name == self.name

    def __hash__(self) -> int:
        return hash((id(self.owner), self.name))

    def read(self) -> Any:
        """The value; ``MISSING`` where there is none."""
        raise NotImplementedError

    def write(self, value: Any) -> None:
        """Binds it to a value, or with ``MISSING`` to none."""
        raise NotImplementedError


class Global(Variable):
    """A global of a module, whose table is the owner."""

    owner: dict[str, Any]

    def read(self) -> Any:
        return self.owner.get(self.name, MISSING)

    def write(self, value: Any) -> None:
        self.owner[self.name] = value
        if value is MISSING:
            del self.owner[self.name]


class Cell(Variable):
    """What closures share that are made in one call of a function; nothing else of ours holds the cell, the owner."""

    owner: CellType

    def read(self) -> Any:
        return contents_of(self.owner)

    def write(self, value: Any) -> None:
        self.owner.cell_contents = value
        if value is MISSING:
            del self.owner.cell_contents


class Attribute(Variable):
    """An attribute of a module of Python's, of a class or of a function."""

    def read(self) -> Any:
        return vars(self.owner).get(self.name, MISSING)

    def write(self, value: Any) -> None:
        setattr(self.owner, self.name, value)
        if value is MISSING:
            delattr(self.owner, self.name)


class Default(Variable):
    """A default of a function's argument."""

    def read(self) -> Any:
        return {**self._positional(), **(self.owner.__kwdefaults__ or {})}.get(self.name, MISSING)

    def write(self, value: Any) -> None:
        keywords = self.owner.__kwdefaults__ or {}
        if self.name in keywords:
            keywords[self.name] = value
        else:
            self.owner.__defaults__ = tuple((self._positional() | {self.name: value}).values())

    def _positional(self) -> dict[str, Any]:
        code, defaults = self.owner.__code__, self.owner.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        return dict(zip(names, defaults, strict=True))


class PartialArgument(Variable):
    """An argument that a ``functools.partial`` comes with; the place of one without a name is its name."""

    owner: partial[Any]

    def read(self) -> Any:
        return {**self._positional(), **self.owner.keywords}.get(self.name, MISSING)

    def write(self, value: Any) -> None:
        args, keywords = self._positional(), dict(self.owner.keywords)
        (keywords if self.name in keywords else args)[self.name] = value
        state = self.owner.func, tuple(args.values()), keywords, vars(self.owner)
        self.owner.__setstate__(state)  # type: ignore[attr-defined]

    def _positional(self) -> dict[str, Any]:
        return {str(place): value for place, value in enumerate(self.owner.args)}


def is_left(variable: Variable | None) -> bool:
    """Whether a variable is a cell that no function has any more, as is so for locals of a call that is over."""
    return isinstance(variable, Cell) and sys.getrefcount(variable.owner) <= 2  # the variable's, and the argument


def contents_of(cell: CellType) -> Any:
    """What a closure's cell holds; ``MISSING`` where it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def cells_of(code: CodeType, name: str, value: Any) -> list[Variable]:
    """The cells by which functions that share a code call an object by a name."""
    functions = [x for x in gc.get_referrers(code) if isinstance(x, FunctionType) and x.__code__ is code]
    closures = [dict(zip(code.co_freevars, function.__closure__ or (), strict=True)) for function in functions]
    cells = dict.fromkeys(Cell(closure[name], name) for closure in closures)
    return [cell for cell in cells if cell.read() is value]


def arguments_of(function: partial[Any]) -> list[Variable]:
    """Those that it comes with."""
    names = (*map(str, range(len(function.args))), *function.keywords)
    return [PartialArgument(function, name) for name in names]
