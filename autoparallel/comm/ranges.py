"""Names in a profile: of modules around what they compute, and of collectives with their axis and what they are for.

While no profiler runs, nothing is named, and a name costs a look at a flag.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch.profiler import record_function

from autoparallel import _torch
from autoparallel.comm.current import Current

R = TypeVar("R")

_MODULE = Current("")
"""The module that computes now, as far as a profiled program has said."""


def named(name: Callable[[], str]) -> AbstractContextManager[Any]:
    """Names what runs inside, while a profiler runs."""
    return record_function(name()) if _torch.autograd.is_profiling() else nullcontext()


def place() -> str:
    """The module that computes now; a compiled program says nothing of it."""
    return "" if torch.compiler.is_compiling() else _MODULE.value


def in_backward(module: str, function: Callable[..., R], *arguments: Any) -> R:
    """Calls a function, whose range in a profile is the backward of a module, if it is of one."""
    if not module:
        return function(*arguments)
    with named(lambda: f"{module}, backward"):
        return function(*arguments)


def begin(module: str) -> tuple[record_function, str]:
    """Begins the range of a module; a program that is profiled calls it."""
    entered, before = record_function(module), place()
    entered.__enter__()
    _MODULE.value = module
    return entered, before


def end(begun: tuple[record_function, str]) -> None:
    """Ends a module's range."""
    entered, _MODULE.value = begun
    entered.__exit__(None, None, None)
