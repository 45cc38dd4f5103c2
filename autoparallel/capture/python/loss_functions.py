"""What a loss function brings along beside the globals and cells that it reads."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from autoparallel.capture.python.roots import Finder, find_nothing
from autoparallel.graph.python_state import PythonState, is_data
from autoparallel.graph.variables import Attribute, arguments_of


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


class LossOfObject:
    """A loss function that is an object of the user's, or a method of one: an attribute here is the variable that has
    the object, whose attributes calls may change (``self.steps += 1``).

    Attributes:
        loss_fn: the object.
        function: of its class; None where the object itself is called.
    """

    def __init__(self, owner: Any, function: Callable[..., Any] | None) -> None:
        self.loss_fn, self.function = owner, function
        self.__module__ = type(owner).__module__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self.loss_fn if self.function is None else partial(self.function, self.loss_fn))(*args, **kwargs)


def with_variable(function: Any) -> Any:
    """A loss function, whose object a variable has, where it is one or a method of one, also in a partial."""
    if isinstance(function, partial):
        inner = with_variable(function.func)
        return function if inner is function.func else partial(inner, *function.args, **function.keywords)
    is_method = isinstance(function, types.MethodType)
    owner = function.__self__ if is_method else function
    return LossOfObject(owner, function.__func__ if is_method else None) if is_data(owner) else function


def packages_of(model: torch.nn.Module, function: Any, attached: Sequence[types.FunctionType]) -> frozenset[str]:
    """The top-level packages that a model's classes, its loss function and the functions attached to it come from."""
    places = {cls.__module__ for module in model.modules() for cls in type(module).__mro__}
    places |= {str(getattr(function, "__module__", "")), *(str(f.__globals__.get("__name__")) for f in attached)}
    return frozenset(place.partition(".")[0] for place in places)


def owners_of(function: Any) -> list[tuple[Any, Finder]]:
    """The objects that a bound method, an object that is called, or a ``functools.partial`` brings along, and what
    finds the variables that have them."""
    if isinstance(function, partial):
        arguments = [(x.read(), lambda x=x: [x]) for x in arguments_of(function)]
        return [*owners_of(function.func), *((value, find) for value, find in arguments if is_data(value))]
    if isinstance(function, LossOfObject):
        return [(function.loss_fn, lambda: [Attribute(function, "loss_fn")])]
    owner = function.__self__ if isinstance(function, types.MethodType) else function
    return [(owner, find_nothing)] if owner is not function or is_data(owner) else []
