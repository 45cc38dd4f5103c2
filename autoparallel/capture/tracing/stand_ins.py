"""Functions of torch that run other code while any thread traces.

Each stays the object that it is, by which Dynamo knows it, and every module that has imported it by its name.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any


def original(function: Any) -> FunctionType:
    """A function that does what a function of torch does when nothing is traced."""
    return FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)


def names_of(function: Any, stand_in: Callable[..., Any]) -> tuple[tuple[Any, str, Any], ...]:
    """The names that are replaced so that calls of a function are calls of ``stand_in``."""
    return (function, "__kwdefaults__", {"stand_in": stand_in}), (function, "__code__", _code.__code__)


def _code(*args: Any, stand_in: Callable[..., Any], **kwargs: Any) -> Any:
    return stand_in(*args, **kwargs)
