"""Whether what a program computes can be differentiated twice, as ``create_graph=True`` asks for.

Its backward is autograd's, through torch's operators and redistributions, and the transpose of a redistribution is a
redistribution: that of the transpose, the first one.  So a second backward is as right as a first one (see
``docs/why_the_forward.md``), unless an operator of the program has a backward that nobody can differentiate.
"""

from __future__ import annotations

import operator

import torch

from autoparallel.comm.collectives import redistribute
from autoparallel.comm.in_flight import finish_redistribution, start_redistribution
from autoparallel.operators import chunked, control_flow, draws, losses, tables
from autoparallel.operators.control_flow import inner_graphs
from autoparallel.operators.selective_checkpoint import Keeping
from autoparallel.passes.chunk_loss import ChunkedLoss
from autoparallel.program.program import LocalProgram

_OURS = {redistribute, start_redistribution, finish_redistribution}
_MODULES = {
    *(module.__name__ for module in (losses, tables, draws, chunked)),
    *("_operator", "math", "torch", "torch.sym_ops"),
}
"""Whose functions call torch's operators and redistributions alone, or have backwards that do."""


def why_once(program: LocalProgram) -> str:
    """What of a program can be differentiated once only, and what to change; empty where it is nothing."""
    if any(isinstance(region, ChunkedLoss) for region in program.regions.values()):
        return "its loss goes through its rows in chunks\nWhat to change: compile(loss_chunks=1)"
    calls = (n for n in program.calls() if n.op == "call_function" and n.meta.get("differentiable", True))
    node = next((n for n in calls if not _is_twice(n.target)), None)
    if node is None:
        return ""
    place = f" of {node.meta['module']}" if node.meta.get("module") else ""
    if isinstance(node.target, Keeping):
        return (
            f"all but the products{place} run again in the backward\nWhat to change: compile() without a memory_limit "
            "that asks for that"
        )
    name = getattr(node.target, "__name__", str(node.target))
    return f"{name}{place} has a backward that cannot be differentiated\nWhat to change: take it on the plain model"


def _is_twice(target: object) -> bool:
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace == "aten"
    module = getattr(target, "__module__", "")
    if module == control_flow.__name__:
        calls = (node for inner in inner_graphs(target) for node in inner.graph.nodes if node.op == "call_function")
        return all(_is_twice(node.target) for node in calls)
    return target in _OURS or module in _MODULES or target is operator.getitem
