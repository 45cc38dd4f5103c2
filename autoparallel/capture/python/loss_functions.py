"""What a loss function brings along beside the globals and cells that it reads."""

from __future__ import annotations

import types
from functools import partial
from typing import Any

import torch

from autoparallel.graph.python_state import PythonState, is_data


def read_of_loss(function: Any) -> PythonState:
    """What a loss function brings along beside globals and cells: defaults, arguments of a ``functools.partial``."""
    state = PythonState()
    if isinstance(function, partial):
        state.watch("loss_fn", lambda: function, id(function), deep=True)
        state.merge(read_of_loss(function.func))
    elif isinstance(function, types.FunctionType):
        state.watch(
            "the defaults of loss_fn", lambda: (function.__defaults__, function.__kwdefaults__), id(function), deep=True
        )
    return state


def packages_of(model: torch.nn.Module, function: Any) -> frozenset[str]:
    """The top-level packages that a model's classes and its loss function come from."""
    places = {cls.__module__ for module in model.modules() for cls in type(module).__mro__}
    return frozenset(place.partition(".")[0] for place in {*places, str(getattr(function, "__module__", ""))})


def owners_of(function: Any) -> tuple[Any, ...]:
    """The objects that a bound method, an object that is called, or a ``functools.partial`` brings along."""
    if isinstance(function, partial):
        held = (*function.args, *function.keywords.values())
        return (*owners_of(function.func), *(x for x in held if is_data(x)))
    if isinstance(function, types.MethodType):
        return (function.__self__,)
    return (function,) if is_data(function) else ()
