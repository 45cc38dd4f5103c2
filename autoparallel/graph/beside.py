"""What stands beside the arguments of a call: attributes of the model that calls change, numbers that the call draws,
and the method of the model that it runs in the place of ``forward``.

Each is a keyword argument of a name that no function can have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.utils import _pytree as pytree

from autoparallel.graph.carried_attributes import by_label, number_of

CARRIED = "attributes that calls change"
DRAWS = "numbers that the call draws"
METHOD = "the method that runs"


class Beside(NamedTuple):
    """What stands there, or something that there is for each input of it.

    Attributes:
        numbers: the attributes that are whole numbers, by label, as a call is given them.
        others: all other attributes.
        draws: what is drawn, by the names of scripts (see ``graph.drawn_numbers``).
        method: the name of the method; None for ``forward``.
    """

    numbers: dict[str, Any]
    others: dict[str, Any]
    draws: Mapping[str, tuple[Any, ...]]
    method: str | None

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes as the model has them, by label."""
        return {label: number_of(x.shape) for label, x in self.numbers.items()} | self.others


def take_apart(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], Beside]:
    """The keyword arguments of a call, and what stands beside its arguments."""
    arguments = dict(kwargs)
    numbers, others = arguments.pop(CARRIED, ({}, {}))
    draws, method = arguments.pop(DRAWS, {}), arguments.pop(METHOD, None)
    return arguments, Beside(by_label(numbers), by_label(others), draws, method)


def beside_in(leaves: Sequence[Any], in_spec: pytree.TreeSpec) -> Beside:
    """What of something that there is for each input is for what stands beside the arguments."""
    return take_apart(pytree.tree_unflatten(leaves, in_spec)[1])[1]


def method_of(model: nn.Module, name: str | None) -> Callable[..., Any]:
    """What a call runs."""
    return getattr(model, name or "forward")
