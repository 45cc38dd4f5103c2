"""A call of a model that no program can make: what passes on a captured graph raise."""

from __future__ import annotations

from torch import fx


class Refusal(ValueError):
    """A call that cannot be part of a program.

    Args:
        node: the call.
        message: what it does.
        cure: what to change in the model.
    """

    def __init__(self, node: fx.Node, message: str, cure: str) -> None:
        super().__init__(message)
        self.node, self.cure = node, cure
