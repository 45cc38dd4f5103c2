"""The table of programs."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any, TypeVar

from tests.capture.runner import PROGRAMS, Program, rows
from tests.devices import DEVICE

T = TypeVar("T", bound=Callable[..., Any])

_programs: dict[str, Program] = {}


def program(**options: Any) -> Callable[[T], T]:
    """Adds a model's class, or a function that makes a model, to the table; see ``Program`` for the options.

    With ``device``, it is for tests on such a device alone.
    """
    here = options.pop("device", DEVICE) == DEVICE

    def add(make: T) -> T:
        if not here:
            return make
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", make.__name__).lower()
        assert name not in _programs, name
        subject = make.__module__.rpartition(".")[2]
        _programs[name] = Program(name, subject, make, **{"batch": rows} | options)
        return make

    return add


def loop(**options: Any) -> Callable[[T], T]:
    """Adds a loop to the table: a function of a ``Run`` that makes and trains its own models."""
    here = options.pop("device", DEVICE) == DEVICE

    def add(function: T) -> T:
        if not here:
            return function
        subject = function.__module__.rpartition(".")[2]
        assert function.__name__ not in _programs, function.__name__
        settings = {"batch": rows, "make": _none, "loop": function} | options
        _programs[function.__name__] = Program(function.__name__, subject, **settings)
        return function

    return add


def _none() -> Any:
    raise AssertionError("this program's loop makes its own models")


def programs() -> list[Program]:
    """All programs, by subject."""
    for file in sorted(PROGRAMS.glob("*.py")):
        if file.stem != "__init__":
            importlib.import_module(f"tests.capture.programs.{file.stem}")
    return list(_programs.values())
