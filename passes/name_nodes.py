"""Gives every node its module and the key that plans use: module path, operator, occurrence.

Before (meta of the two calls):
    linear = aten.linear(x, w)            nn_module_stack: ... ("model.up", Linear)
    linear_1 = aten.linear(linear, w)     nn_module_stack: ... ("model.up", Linear)
After:
    linear = aten.linear(x, w)            module: "up", key: "up/aten.linear#0"
    linear_1 = aten.linear(linear, w)     module: "up", key: "up/aten.linear#1"
"""

from __future__ import annotations

from torch import fx

from autoparallel.rules import operator_name


def name_nodes(graph: fx.Graph) -> None:
    """Names the nodes of a graph in place; those that have a key, from before a rewrite, keep it."""
    keys = {node.meta["key"] for node in graph.nodes if "key" in node.meta}
    counts: dict[str, int] = {}
    for node in graph.nodes:
        if "key" in node.meta:
            continue
        path = node.meta["module"] = _module_of(node)
        name = node.name if node.op in ("placeholder", "output") else operator_name(node.target)
        count = counts.get(f"{path}/{name}", 0)
        while (key := f"{path}/{name}#{count}") in keys:
            count += 1
        counts[f"{path}/{name}"] = count + 1
        keys.add(key)
        node.meta["key"] = key


def _module_of(node: fx.Node) -> str:
    if "module" in node.meta:
        return str(node.meta["module"])
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if stack and isinstance(stack[-1], tuple) and not str(stack[-1][0]).startswith("_empty"):
        return str(stack[-1][0]).removeprefix("model").removeprefix(".")
    return ""
