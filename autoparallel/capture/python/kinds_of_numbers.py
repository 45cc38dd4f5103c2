"""``isinstance(x.shape[0], int)``, ``type(scale) is float``: what a model is told of sizes and numbers that a trace
leaves open, which are of torch's own types."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import torch

from autoparallel.graph.python_state import OURS, is_library

_KINDS: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


def _is_instance(value: Any, kinds: Any, /) -> bool:
    """As ``isinstance``."""
    kind = _KINDS.get(type(value))
    return isinstance(value, kinds) or kind is not None and issubclass(kind, kinds)


class _Asking(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        value = type(*args, **kwargs)
        return cls if value is type else _KINDS.get(value, value)  # type(nn.Module) is type

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, type)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, type)


class _Type(type, metaclass=_Asking):
    """As ``type``."""


STAND_INS: Mapping[str, Any] = {"isinstance": _is_instance, "type": _Type}
"""What stands for functions of Python in modules of the user's while models are traced."""


def is_stand_in(value: Any) -> bool:
    """Whether a global of a user's module is there only while a model is traced."""
    return value is _is_instance or value is _Type


def modules_of_users() -> Iterator[ModuleType]:
    """The modules that are loaded of which functions may run in a model."""
    for name, module in [*sys.modules.items()]:
        if isinstance(module, ModuleType):
            file = vars(module).get("__file__")
            if name == "__main__" or file is not None and not file.startswith(OURS) and not is_library(file):
                yield module
