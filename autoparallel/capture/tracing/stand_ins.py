"""What stands for functions of torch while any thread traces."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from autoparallel.capture.tracing.trace import listening


def replacement(owner: Any, name: str, stand_in: Callable[..., Any]) -> tuple[Any, str, Any]:
    """A name that is replaced, with a function that on threads which do not trace does what stood there.

    Args:
        owner: what has the name.
        stand_in: called with the trace and with what stood there, in front of the arguments.
    """
    return owner, name, _while_traced(getattr(owner, name), stand_in)


def replacements_of(function: Any, stand_in: Callable[..., Any]) -> tuple[tuple[Any, str, Any], ...]:
    """The names that are replaced so that calls of a function of Python's are calls of ``stand_in``, as above.

    The function stays the object that it is, by which Dynamo knows it, and every module that has imported it.
    """
    before = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    stand_ins = {"stand_in": _while_traced(before, stand_in)}
    return (function, "__kwdefaults__", stand_ins), (function, "__code__", _code.__code__)


def _while_traced(before: Callable[..., Any], stand_in: Callable[..., Any]) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        trace = listening()
        return before(*args, **kwargs) if trace is None else stand_in(trace, before, *args, **kwargs)

    return function


def _code(*args: Any, stand_in: Callable[..., Any], **kwargs: Any) -> Any:
    return stand_in(*args, **kwargs)
