"""Inserting calls into a captured graph: what the passes that rewrite operators share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autoparallel.rules.calls import shape_of


class Emitter:
    """Inserts calls before a node and computes their fake values; the new nodes inherit its module and line."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self.graph, self.node = graph, node

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self.graph.inserting_before(self.node):
            new = self.graph.call_function(target, args, kwargs)
        new.meta = {k: v for k, v in self.node.meta.items() if k in ("module", "nn_module_stack", "stack_trace")}
        values, named = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        mode = next((v.fake_mode for v in fake_tensors((values, named))), None) or self.node.meta["mode"]
        with mode, torch.no_grad():
            new.meta["val"] = target(*values, **named)
        return new

    def size(self, x: fx.Node, dim: int) -> Any:
        """A global size: a number, or the node that asks for it where it is symbolic."""
        size = shape_of(x)[dim]
        return size if isinstance(size, int) else self(torch.ops.aten.sym_size.int, x, dim)


Rewrite = Callable[[Emitter, fx.Node], Any]
"""What makes that which takes the place of a call: a node, or of a call with several results a function from a result's
index to its node; None where the call may stay."""


def fake_tensors(values: Any) -> list[Any]:
    """The fake tensors among some values."""
    leaves = torch.utils._pytree.tree_leaves(values)
    return [v for v in leaves if isinstance(v, torch.Tensor) and hasattr(v, "fake_mode")]


def fake_mode_of(graph: fx.Graph) -> Any:
    """The mode in which a graph was traced; None for one without tensors."""
    return next((v.fake_mode for node in graph.nodes for v in fake_tensors(node.meta.get("val"))), None)
