"""The function behind a frame: its closure and its defaults."""

from __future__ import annotations

import gc
import inspect
import types
import weakref
from collections.abc import Iterator
from typing import Any

from autoparallel.graph.python_state import MISSING
from autoparallel.graph.variables import contents_of


class Closures:
    """The closures of functions that run; many share a code, as those do that a decorator makes."""

    def __init__(self) -> None:
        self._functions: dict[int, tuple[types.CodeType, list[weakref.ref[Any]]]] = {}

    def cells_of(self, code: types.CodeType, values: dict[str, Any]) -> dict[str, types.CellType]:
        """The closure of the function that runs: of all that share its code, the one with these values."""
        for find in (_youngest, self._met, self._any):  # what has just been made is found at once
            for function in reversed(find(code)):
                if isinstance(function, types.FunctionType) and function.__code__ is code and function.__closure__:
                    cells = dict(zip(code.co_freevars, function.__closure__, strict=True))
                    if all(contents_of(cell) is values.get(name, MISSING) for name, cell in cells.items()):
                        return cells
        return {}

    def _met(self, code: types.CodeType) -> list[Any]:
        """Those that were there when one was looked for."""
        _, functions = self._functions.get(id(code), (code, []))
        return [function() for function in functions]

    def _any(self, code: types.CodeType) -> list[Any]:
        functions = [x for x in gc.get_referrers(code) if isinstance(x, types.FunctionType)]
        self._functions[id(code)] = code, [*map(weakref.ref, functions)]
        return functions


def functions_before(frame: types.FrameType, first: str) -> Iterator[types.FunctionType]:
    """The function that runs, as a method of its first argument or a global, or those that share its code; what the
    run itself has made is left out."""
    code, owner = frame.f_code, frame.f_locals.get(first)
    classes = (owner if isinstance(owner, type) else type(owner)).__mro__
    for held in (*(vars(cls).get(code.co_name) for cls in classes), frame.f_globals.get(code.co_name)):
        held = getattr(held, "__func__", None) or getattr(held, "fget", held)
        function = inspect.unwrap(held) if callable(held) else None
        if isinstance(function, types.FunctionType) and function.__code__ is code:
            yield function
            return
    of_the_run = {id(x) for x in _youngest(code)}
    for x in gc.get_referrers(code):  # for which Python looks through everything there is
        if isinstance(x, types.FunctionType) and x.__code__ is code and id(x) not in of_the_run:
            yield x


def _youngest(_: types.CodeType) -> list[Any]:
    """What has been made since the run began."""
    return gc.get_objects(0)
