"""The sizes of a graph's tensors, open ones at what they are in the call that is planned for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx


class Sizes:
    """Reads traced sizes as they are in the call that is planned for."""

    def __init__(self, actual: Mapping[Any, int]) -> None:
        self.actual = actual
        self._values: dict[Any, int] = {}

    def __call__(self, value: Any) -> int:
        if isinstance(value, int):
            return value
        expression = value.node.expr
        if expression not in self._values:
            self._values[expression] = int(expression.subs(self.actual))
        return self._values[expression]

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """The node's global shape in that call."""
        return tuple(self(s) for s in node.meta["val"].shape)
