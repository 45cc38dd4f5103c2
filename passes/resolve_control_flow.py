"""Puts plain Python around the graphs of ``torch.cond``, ``while_loop``, ``scan`` and their like, and FlexAttention.

Before (true_graph_0 and false_graph_0 are submodules):
    cond = torch.ops.higher_order.cond(gt, true_graph_0, false_graph_0, (h, weight));  getitem = cond[0]
After, the graphs inside of the operator:
    cond = autoparallel.operators.control_flow.cond(gt, (h, weight));  getitem = cond[0]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from autoparallel.graph.errors import refusal
from autoparallel.graph.lines import line_of
from autoparallel.operators.control_flow import RUNS, control_operator
from autoparallel.operators.flex import flex_operator, is_flex
from autoparallel.passes.canonicalize_operators import canonicalize_operators
from autoparallel.passes.emitter import replace_node


def resolve_control_flow(module: fx.GraphModule) -> None:
    """Rewrites the graph of ``module`` in place, and the graphs that it may run.

    Raises:
        CaptureError: for a higher-order operator that no program can make.
    """
    graph = module.graph
    for node in list(graph.nodes):
        if not isinstance(node.target, torch._ops.HigherOrderOperator):
            continue
        name = node.target.name()
        if name.startswith("auto_functionalized"):
            raise refusal(
                f"the operator {node.args[0]} changes what it is given in place",
                line_of(node),
                "let it return new tensors (mutates_args=()), and write them with copy_()",
            )
        if name == "flex_attention":
            _resolve_flex(module, node)
            continue
        if name not in RUNS:
            raise refusal(
                f"the model calls torch.ops.higher_order.{name}, which no program can make",
                line_of(node),
                "write it with torch.cond, while_loop or scan, or without a higher-order operator",
            )
        arguments = [
            module.get_submodule(str(x.target)) if isinstance(x, fx.Node) and x.op == "get_attr" else x
            for x in node.args
        ]
        for inner in arguments:
            if isinstance(inner, fx.GraphModule):
                resolve_control_flow(inner)
                canonicalize_operators(inner)
                inner.recompile()
        node.target, rest = control_operator(name, arguments)
        node.args, node.kwargs = tuple(rest), {}
    for node in list(graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)


def _resolve_flex(module: fx.GraphModule, node: fx.Node) -> None:
    """Makes each result of FlexAttention that is read a call of its own: rules speak of operators with one."""
    calls: Any = node.args
    q, k, v, score, (*blocks, mask), scale, options, score_reads, mask_reads = calls
    functions = [module.get_submodule(str(x.target)) for x in (score, mask)]
    target = flex_operator(*functions)  # type: ignore[arg-type]
    for user in list(node.users):
        with node.graph.inserting_before(node):
            arguments = (q, k, v, tuple(blocks), score_reads, mask_reads, scale, dict(options), user.args[1])
            new = node.graph.call_function(target, arguments)
        new.meta = {**node.meta, "val": user.meta["val"]}
        replace_node(user, new)
    node.graph.erase_node(node)


def price_masks(graph: fx.Graph, constants: Mapping[str, torch.Tensor]) -> None:
    """Tells each FlexAttention which part of its scores the blocks of its mask leave, where they are constants.

    Args:
        constants: of the graph, by the names of their placeholders.
    """
    for node in graph.nodes:
        if is_flex(node.target):
            blocks = [constants.get(x.name) if isinstance(x, fx.Node) else x for x in node.args[3]]
            count, places, full = blocks[2:5]
            if isinstance(count, torch.Tensor) and isinstance(places, torch.Tensor):
                visited = count if full is None else count + full
                node.kwargs = {**node.kwargs, "density": float(visited.double().mean()) / places.shape[-1]}
