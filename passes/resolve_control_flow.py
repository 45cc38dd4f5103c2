"""Puts plain Python around the graphs of ``torch.cond``, ``while_loop``, ``scan`` and their like.

Before (true_graph_0 and false_graph_0 are submodules):
    cond = torch.ops.higher_order.cond(gt, true_graph_0, false_graph_0, (h, weight));  getitem = cond[0]
After, the graphs inside of the operator:
    cond = autoparallel.operators.control_flow.cond(gt, (h, weight));  getitem = cond[0]
"""

from __future__ import annotations

import torch
from torch import fx

from autoparallel.graph.captured import refusal
from autoparallel.graph.lines import line_of
from autoparallel.operators.control_flow import RUNS, control_operator
from autoparallel.passes.canonicalize_operators import canonicalize_operators

INSTEAD_OF_FLEX = (
    "use F.scaled_dot_product_attention(q, k, v, attn_mask=...), with what score_mod adds, or -inf where block_mask "
    "masks, as a tensor, or with is_causal=True"
)
"""What to do instead of FlexAttention, whose functions speak of whole heads and positions, and which has no gradient
on the fake CPU tensors of a trace."""


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
        if name not in RUNS:
            instead = "write it with torch.cond, while_loop or scan, or without a higher-order operator"
            raise refusal(
                f"the model calls torch.ops.higher_order.{name}, which no program can make",
                line_of(node),
                INSTEAD_OF_FLEX if name == "flex_attention" else instead,
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
