"""What makes two calls alike for the planner: the same operator on tensors of the same kind.

Repeated layers make a graph of thousands of calls out of a few dozen kinds.  Whatever depends on the kind alone, such
as the options of an operator and the prices between them, is worked out once and shared.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import fx

from autoparallel.graph.sizes import Sizes

_PLAIN = frozenset({int, float, bool, str, type(None)})


class Signatures(Sizes):
    """Sizes, and numbers for the kinds of nodes of one graph; two nodes of the same number differ in name alone."""

    def __init__(self, actual: Mapping[Any, int]) -> None:
        super().__init__(actual)
        self._tensors: dict[Hashable, int] = {}
        self._tensor_of: dict[tuple[int, Any, Any], int] = {}
        self._kinds: dict[fx.Node, int] = {}
        self._calls: dict[Hashable, int] = {}
        self._reads: dict[fx.Node, tuple[int, list[fx.Node]]] = {}
        self._shapes: dict[fx.Node, tuple[int, ...]] = {}

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """The node's global shape in that call."""
        shape = self._shapes.get(node)
        if shape is None:
            shape = self._shapes[node] = super().shape(node)
        return shape

    def tensor(self, node: fx.Node) -> int:
        """The kind of a tensor: its shape, dtype, and whether gradients flow; -1 for what is no tensor."""
        kind = self._kinds.get(node)
        if kind is None:
            kind = self._kinds[node] = self._kind_of_value(node)
        return kind

    def _kind_of_value(self, node: fx.Node) -> int:
        meta = node.meta
        val = meta.get("val")
        key = id(val), meta.get("differentiable"), meta.get("backward")  # copied layers share their values
        kind = self._tensor_of.get(key)
        if kind is None:
            if not isinstance(val, torch.Tensor):
                self._tensor_of[key] = -1
                return -1
            key = id(val), bool(meta["differentiable"]), bool(meta["backward"])
            sizes = tuple([s if isinstance(s, int) else s.node.expr for s in val.shape])
            kind = self._tensor_of[key] = self._tensors.setdefault((sizes, val.dtype, *key[1:]), len(self._tensors))
        return kind

    def operands(self, node: fx.Node) -> list[fx.Node]:
        """The tensor operands of a call, in its order, repeated where they repeat."""
        return (self._reads.get(node) or self._read(node))[1]

    def call(self, node: fx.Node) -> int:
        """The kind of a call: operator, arguments, and the kinds of its operands and of its result.

        Which operands are one and the same tensor counts; where they come from does not.
        """
        return (self._reads.get(node) or self._read(node))[0]

    def _read(self, node: fx.Node) -> tuple[int, list[fx.Node]]:
        operands: list[fx.Node] = []
        arguments = tuple([self._freeze(value, operands) for value in node.args])
        named = tuple([(name, self._freeze(value, operands)) for name, value in node.kwargs.items()])
        batch = frozenset(node.meta.get("batch_factors", ()))
        key = (node.target, arguments, named, self.tensor(node), batch)
        signature = self._reads[node] = self._calls.setdefault(key, len(self._calls)), operands
        return signature

    def _freeze(self, value: Any, operands: list[fx.Node]) -> Hashable:
        """An argument as a part of a key; notes the tensors in it."""
        kind = type(value)
        if kind in _PLAIN:
            return kind, value  # 1, 1.0 and True are equal, and not the same argument
        if isinstance(value, fx.Node):
            tensor = self.tensor(value)
            if tensor >= 0:
                operands.append(value)
                return operands.index(value), tensor
            traced = value.meta.get("val")
            return "size", traced.node.expr if isinstance(traced, torch.SymInt) else str(traced)
        if isinstance(value, tuple | list):
            return tuple([self._freeze(v, operands) for v in value])
        if isinstance(value, dict):
            return tuple([(k, self._freeze(v, operands)) for k, v in value.items()])
        if isinstance(value, slice):
            return "slice", *[self._freeze(v, operands) for v in (value.start, value.stop, value.step)]
        if isinstance(value, torch.SymInt):
            return "size", value.node.expr
        return kind, value
