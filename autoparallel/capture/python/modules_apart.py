"""Modules that are no part of the model, such as a teacher or a frozen network that a function of it knows.

They are not copied: what they have is part of the kind of call, and a call that changes it is refused.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from autoparallel.capture.python.watched import INTERNAL, TABLES
from autoparallel.graph.errors import CaptureError, refusal
from autoparallel.graph.python_state import Attributes

_TABLES = (*TABLES, "_forward_hooks", "_forward_pre_hooks")
_OF_TORCH = INTERNAL - {"training"}


def modules_apart(value: nn.Module, members: Collection[int]) -> dict[str, nn.Module]:
    """A module and those in it, by their paths; none where it has one of the model's, whose ids are given."""
    modules = dict(value.named_modules())
    return {} if any(id(module) in members for module in modules.values()) else modules


def is_of_tracing(module: nn.Module) -> bool:
    """Whether a module is one that tracing has made, torch's or ours."""
    place = type(module).__module__
    return place.startswith("autoparallel.") or place.startswith("torch.") and not place.startswith("torch.nn.")


def attributes_of(module: nn.Module) -> Attributes:
    """What a module has; of its tables those that are not empty."""
    table = vars(module)
    attributes = Attributes({name: x for name, x in table.items() if name not in _OF_TORCH})
    attributes.update({name: table[name] for name in _TABLES if table[name]})
    return attributes


def set_attributes(module: nn.Module, attributes: Attributes) -> None:
    """Puts back what a module had."""
    table = vars(module)
    for name in attributes_of(module).keys() - attributes.keys():
        table[name].clear() if name in _TABLES else table.pop(name)
    table.update(attributes)


def refused_change(label: str, line: str) -> CaptureError:
    """The refusal of a call that changes such a module."""
    what = f"a call changes the module {label}, which is no part of the model,"
    return refusal(what, line, "make it one (self.teacher = teacher), or return what changes as an output")
