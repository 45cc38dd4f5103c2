"""Marks where gradients flow in a forward graph, and detaches the outputs that nothing differentiates.

Before (w is trained; the outputs are the new value of a buffer, the loss, and something beside it):
    mul = x * w;  sum = mul.sum();  return (mul, sum, mul)
After, with meta["differentiable"] and meta["backward"] on every node:
    mul = x * w;  sum = mul.sum();  return (mul.detach(), sum, mul.detach())
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

_NO_GRADIENT = ("aten::detach", "aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::new_zeros")


def mark_differentiable(graph: fx.Graph, placeholders: set[str]) -> None:
    """Sets ``meta["differentiable"]``: whether a node's value depends, differentiably, on one of ``placeholders``."""
    for node in graph.nodes:
        if node.op == "placeholder":
            node.meta["differentiable"] = node.name in placeholders
        else:
            _mark(node)


def mark_new(graph: fx.Graph) -> None:
    """Marks the nodes that a rewrite has put into a marked graph."""
    for node in graph.nodes:
        if "differentiable" not in node.meta:
            _mark(node)
    mark_backward(graph)


def _mark(node: fx.Node) -> None:
    value = node.meta.get("val")
    floating = any(isinstance(v, torch.Tensor) and v.is_floating_point() for v in pytree.tree_leaves(value))
    stops = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name in _NO_GRADIENT
    node.meta["differentiable"] = (
        floating and not stops and any(a.meta.get("differentiable") for a in node.all_input_nodes)
    )


def differentiated_scalars(results: Any, first: int) -> list[int]:
    """The indices, from ``first`` on, of the scalars that depend differentiably on what is trained."""
    return [i for i, n in enumerate(results) if i >= first and n.meta["differentiable"] and n.meta["val"].ndim == 0]


def detach_outputs(graph: fx.Graph, first: int, detach_others: bool) -> list[int]:
    """Detaches new values of buffers, the outputs before ``first``, and, where a scalar is differentiated and
    ``detach_others``, the outputs beside it; returns the indices of the scalars that are differentiated."""
    output = graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    scalars = differentiated_scalars(results, first)
    for i, node in enumerate(results):
        if node.meta["differentiable"] and (i < first or (detach_others and scalars and i not in scalars)):
            with graph.inserting_before(output):
                detached = graph.call_function(torch.ops.aten.detach.default, (node,))
            detached.meta = {**node.meta, "differentiable": False, "key": f"{node.meta['key']}/output"}
            results[i] = detached
    output.args = (tuple(results),)
    return scalars


def mark_backward(graph: fx.Graph) -> None:
    """Sets ``meta["backward"]``: whether a gradient flows through the node when the outputs are differentiated."""
    reached: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or node in reached:
            reached.update(n for n in node.all_input_nodes if n.meta.get("differentiable"))
        node.meta["backward"] = node in reached


__all__ = ["detach_outputs", "differentiated_scalars", "mark_backward", "mark_differentiable", "mark_new"]
