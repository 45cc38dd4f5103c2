"""Calls that run a part of a graph: what a program can only make as a whole becomes the graph of one call."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autoparallel._torch.export import copy_node, graph_module
from autoparallel.operators.opaque import CALL, HOOK
from autoparallel.passes.canonicalize_operators import canonicalize_operators


def inner_graph(
    calls: Iterable[fx.Node],
    results: Iterable[fx.Node],
    operands: Iterable[fx.Node],
    twins: Mapping[fx.Node, fx.Node] | None = None,
) -> fx.GraphModule:
    """The graph of some calls.

    Args:
        calls: in their order.
        results: what the graph returns.
        operands: what it reads, each a placeholder.
        twins: what stands for what among the operands.
    """
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate(operands):
        values[node] = graph.placeholder(f"operand_{i}")
        values[node].meta = {"val": node.meta["val"]}

    def inner(x: fx.Node) -> fx.Node:
        return values[x] if x in values or twins is None else values[twins[x]]

    for node in calls:
        values[node] = copy_node(graph, node, inner)
    graph.output(tuple(map(inner, results)))
    module = graph_module(graph)
    canonicalize_operators(module)
    module.recompile()
    return module


def obstacle_in(node: fx.Node) -> str | None:
    """What keeps a call from being a part of such a graph, in words; None for nothing."""
    if node.target in (CALL, HOOK):
        return "an autograd.Function or a hook"
    is_of_graphs = node.op == "get_attr" or isinstance(node.target, torch._ops.HigherOrderOperator)
    return "an operator that runs graphs" if is_of_graphs else None


def insert_call(
    behind: fx.Node,
    target: Callable[..., Any],
    arguments: Sequence[Any],
    values: Sequence[Any],
    marks: Mapping[str, Any],
) -> list[fx.Node]:
    """Inserts a call that makes one result, or several and what takes each of them from it.

    Args:
        behind: what comes before it.
        values: of the results, as a plan sees them.
        marks: of where in the model it stands.
    """
    graph = behind.graph
    with graph.inserting_after(behind):
        call = last = graph.call_function(target, tuple(arguments))
    if len(values) == 1:
        call.meta = {**marks, "val": values[0]}
        return [call]
    call.meta = {**marks, "val": tuple(values)}
    items = []
    for i, value in enumerate(values):
        with graph.inserting_after(last):
            last = graph.call_function(operator.getitem, (call, i))
        last.meta = {**marks, "val": value}
        items.append(last)
    return items
