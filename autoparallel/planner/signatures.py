"""What makes two calls alike for the planner: the same operator on tensors of the same kind.

Repeated layers make a graph of thousands of calls out of a few dozen kinds.  Whatever depends on the kind alone, such
as the options of an operator and the prices between them, is worked out once and shared.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import fx

from autoparallel.rules.calls import is_tensor


class Signatures:
    """Numbers the kinds of nodes of one graph; two nodes with the same number differ in their names alone."""

    def __init__(self, actual: Mapping[Any, int]) -> None:
        self.actual = actual
        self._sizes: dict[Any, int] = {}
        self._tensors: dict[Hashable, int] = {}
        self._tensor_of: dict[fx.Node, int] = {}
        self._calls: dict[Hashable, int] = {}
        self._call_of: dict[fx.Node, int] = {}
        self._shapes: dict[fx.Node, tuple[int, ...]] = {}

    def __call__(self, value: Any) -> int:
        """A traced size, as it is in the call that is planned for."""
        if isinstance(value, int):
            return value
        expression = value.node.expr
        if expression not in self._sizes:
            self._sizes[expression] = int(expression.subs(self.actual))
        return self._sizes[expression]

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """The node's global shape in that call."""
        known = self._shapes.get(node)
        if known is None:
            known = self._shapes[node] = tuple([self(s) for s in node.meta["val"].shape])
        return known

    def tensor(self, node: fx.Node) -> int:
        """The kind of a tensor: its shape, dtype, and whether gradients flow."""
        known = self._tensor_of.get(node)
        if known is None:
            val = node.meta["val"]
            sizes = tuple([s if isinstance(s, int) else s.node.expr for s in val.shape])
            key = (sizes, val.dtype, bool(node.meta["differentiable"]), bool(node.meta["backward"]))
            known = self._tensor_of[node] = self._tensors.setdefault(key, len(self._tensors))
        return known

    def call(self, node: fx.Node) -> int:
        """The kind of a call: operator, arguments, and the kinds of its operands and of its result.

        Which operands are one and the same tensor counts; where they come from does not.
        """
        known = self._call_of.get(node)
        if known is None:
            places: dict[fx.Node, int] = {}
            arguments = self._frozen(node.args, places), self._frozen(node.kwargs, places)
            batch = frozenset(node.meta.get("batch_factors", ()))
            key = (node.target, arguments, self.tensor(node) if is_tensor(node) else -1, batch)
            known = self._call_of[node] = self._calls.setdefault(key, len(self._calls))
        return known

    def _frozen(self, value: Any, places: dict[fx.Node, int]) -> Hashable:
        if isinstance(value, fx.Node):
            if is_tensor(value):
                return (places.setdefault(value, len(places)), self.tensor(value))
            made = value.meta.get("val")
            return ("size", made.node.expr if isinstance(made, torch.SymInt) else str(made))
        if isinstance(value, tuple | list):
            return tuple([self._frozen(v, places) for v in value])
        if isinstance(value, dict):
            return tuple([(k, self._frozen(v, places)) for k, v in value.items()])
        if isinstance(value, slice):
            return ("slice", self._frozen((value.start, value.stop, value.step), places))
        if isinstance(value, torch.SymInt):
            return ("size", value.node.expr)
        return (type(value), value)  # 1, 1.0 and True are equal, and not the same argument
