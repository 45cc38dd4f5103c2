"""Marks where gradients flow in a forward graph, and detaches outputs beside the loss.

Before (w is trained; the outputs are the new value of a buffer, the loss, and something beside it):
    mul = x * w;  sum = mul.sum();  return (mul, sum, mul)
After, with meta["differentiable"] and meta["backward"] on every node:
    mul = x * w;  sum = mul.sum();  detach = mul.detach();  return (detach, sum, detach)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoparallel.operators.derivatives import DERIVATIVE
from autoparallel.rules.calls import may_have_gradient

_NO_GRADIENT = (
    "aten::detach", "aten::empty_like", "aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::new_empty",
    "aten::new_zeros", "aten::new_ones", "aten::new_full", "autoparallel::leaf",
)  # fmt: skip


def mark_differentiable(graph: fx.Graph, placeholders: set[str]) -> None:
    """Sets ``meta["differentiable"]``: whether a node's value depends, differentiably, on one of ``placeholders``."""
    for node in graph.nodes:
        if node.op == "placeholder":
            node.meta["differentiable"] = node.name in placeholders
        else:
            node.meta["differentiable"] = flows(node)


def mark_new(graph: fx.Graph) -> None:
    """Marks the nodes that a rewrite has put into a marked graph."""
    for node in graph.nodes:
        if "differentiable" not in node.meta:
            node.meta["differentiable"] = flows(node)
    mark_backward(graph)


def stops_gradient(node: fx.Node) -> bool:
    """Whether the result of a call never depends on its operands differentiably."""
    if node.target is DERIVATIVE:
        return not node.args[3]
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name in _NO_GRADIENT


def flows(node: fx.Node) -> bool:
    """Whether a call's result depends differentiably on what is trained, as its operands are marked."""
    flowing = any(a.meta.get("differentiable") for a in node.all_input_nodes)
    return flowing and not stops_gradient(node) and is_continuous(node)


def is_continuous(node: fx.Node) -> bool:
    """Whether the dtype of a node's value, or of one of several, lets it be differentiated."""
    value = node.meta.get("val")
    values = [value] if isinstance(value, torch.Tensor) else pytree.tree_leaves(value)
    return any(isinstance(v, torch.Tensor) and may_have_gradient(v) for v in values)


def differentiable_outputs(results: Any, first: int) -> list[int]:
    """The indices, from ``first`` on, of the outputs that depend differentiably on what is trained."""
    return [i for i, n in enumerate(results) if i >= first and n.meta["differentiable"]]


@dataclass(frozen=True)
class Detached:
    """The indices of the model's own outputs that were detached."""

    outputs: tuple[int, ...]


def detach_outputs(graph: fx.Graph, first: int, loss: int | None = None) -> Detached:
    """Detaches new values of buffers, the outputs before ``first``, and, where a ``loss`` is given, every output but
    this one."""
    output = graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    detached = []
    results_of: dict[fx.Node, fx.Node] = {}  # a value that is several outputs is detached once
    for i, node in enumerate(results):
        if node.meta["differentiable"] and (i < first or loss is not None and i != loss):
            if node not in results_of:
                with graph.inserting_before(output):
                    result = graph.call_function(torch.ops.aten.detach.default, (node,))
                result.meta = {**node.meta, "differentiable": False, "key": f"{node.meta['key']}/output"}
                results_of[node] = result
            results[i] = results_of[node]
            if i >= first:
                detached.append(i)
    output.args = (tuple(results),)
    return Detached(tuple(detached))


def mark_backward(graph: fx.Graph) -> None:
    """Sets ``meta["backward"]``: whether a gradient flows through the node when the outputs are differentiated."""
    reached: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or node in reached:
            reached.update(n for n in node.all_input_nodes if n.meta.get("differentiable"))
        node.meta["backward"] = node in reached
