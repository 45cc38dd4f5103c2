"""Methods of the model that calls may run in the place of ``forward``: their name is an argument of such a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

METHOD = "the method that runs"
"""The keyword argument that names it."""


def without_method(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """The keyword arguments of a call, and the method that it runs; None for ``forward``."""
    arguments = dict(kwargs)
    return arguments, arguments.pop(METHOD, None)


def method_of(model: nn.Module, name: str | None) -> Callable[..., Any]:
    """What a call runs."""
    return getattr(model, name or "forward")
