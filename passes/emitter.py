"""Inserting and replacing calls in a captured graph: what the passes that rewrite operators share."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoparallel import _torch
from autoparallel.graph.lines import marks_of
from autoparallel.rules.calls import shape_of


class Emitter:
    """Inserts calls before a node and computes their fake values; the new nodes inherit its module and line, or those
    of another one that they are ``like``."""

    def __init__(self, node: fx.Node, like: fx.Node | None = None) -> None:
        self.graph, self.node, self.marks = node.graph, node, marks_of(like or node)

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self.graph.inserting_before(self.node):
            new = self.graph.call_function(target, args, kwargs)
        new.meta = dict(self.marks)
        values, named = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        mode = _mode_in((values, named, self.node.meta.get("val"))) or _mode_of(self.graph)
        # As the tracer has it: in torch 2.11 a linear layer of a symbolic batch has no value without the dispatcher.
        with mode, _torch.export.enable_python_dispatcher(), torch.no_grad():
            new.meta["val"] = target(*values, **named)
        return new

    def size(self, x: fx.Node, dim: int) -> Any:
        """A global size: a number, or the node that asks for it where it is symbolic."""
        size = shape_of(x)[dim]
        return size if isinstance(size, int) else self(torch.ops.aten.sym_size.int, x, dim)

    def sizes(self, x: fx.Node) -> list[Any]:
        """All global sizes of a tensor (see :meth:`size`)."""
        return [self.size(x, dim) for dim in range(len(shape_of(x)))]

    def cast(self, x: fx.Node, dtype: torch.dtype, device: torch.device | None = None) -> fx.Node:
        """A tensor in a dtype, and on a device; itself, where it is so already."""
        value = self.value(x)
        if device not in (None, value.device):
            return self(torch.ops.aten._to_copy.default, x, dtype=dtype, device=device)
        return x if value.dtype == dtype else self(torch.ops.aten._to_copy.default, x, dtype=dtype)

    def value(self, x: fx.Node) -> torch.Tensor:
        """The fake value of a tensor."""
        value: torch.Tensor = x.meta["val"]
        return value


def copier(graph: fx.Graph, becomes: dict[fx.Node, fx.Node], call: fx.Node) -> Callable[[fx.Node], fx.Node]:
    """What copies a node of a trace, and what it is made of, to where a graph inserts, in the place of a call.

    Args:
        becomes: what is there already for nodes of the trace; the copies are added.
    """
    marks = marks_of(call)

    def put(node: fx.Node) -> fx.Node:
        if node not in becomes:
            assert node.op == "call_function", node.format_node()
            becomes[node] = copied = graph.node_copy(node, put)
            copied.meta = {"val": node.meta.get("val"), **marks}
        return becomes[node]

    return put


def replace_node(old: fx.Node, new: Any) -> None:
    """Has those that read a node read another one, and erases it."""
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)


def replace_results(call: fx.Node, result_of: Callable[[int], Any]) -> None:
    """Puts nodes in the places of a call's several results, by their indices, and erases it."""
    for item in list(call.users):
        replace_node(item, result_of(item.args[1]))  # type: ignore[arg-type]
    call.graph.erase_node(call)


Rewrite = Callable[[Emitter, fx.Node], Any]
"""What makes that which takes the place of a call: a node, or of a call with several results a function from a result's
index to its node; None where the call may stay."""


def rewrite_calls(graph: fx.Graph, rewrites: Mapping[Any, Rewrite]) -> None:
    """Puts what rewrites make in the places of the calls of their targets; a call stays whose several results are read
    all at once."""
    for node in list(graph.nodes):
        if node.op == "call_function" and not node._erased and node.target in rewrites:
            single = not isinstance(node.meta.get("val"), tuple | list)
            if not single and any(user.target is not operator.getitem for user in node.users):
                continue
            result = rewrites[node.target](Emitter(node), node)
            if result is None:
                continue
            if single:
                replace_node(node, result)
            else:
                replace_results(node, result)


def _mode_in(values: Any) -> Any:
    """The fake mode of the first fake tensor among some values."""
    return next((mode for x in pytree.tree_leaves(values) if (mode := getattr(x, "fake_mode", None)) is not None), None)


def _mode_of(graph: fx.Graph) -> Any:
    """The mode in which a graph was traced."""
    return next(mode for node in graph.nodes if (mode := _mode_in(node.meta.get("val"))) is not None)
