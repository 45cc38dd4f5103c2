"""What a traced graph cannot be a program with: refused before it is rewritten, with the line of the model."""

from __future__ import annotations

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoparallel._torch import free_unbacked_symbols
from autoparallel.graph.captured import CaptureError
from autoparallel.graph.data_access import explain_new_memory
from autoparallel.graph.lines import line_of
from autoparallel.passes.settle_memory import STRIDED, relative_start
from autoparallel.rules import operator_name


def require_static(graph: fx.Graph) -> None:
    """Refuses sizes and numbers that are known only when the program runs."""
    for node in graph.nodes:
        if any(free_unbacked_symbols(v) for v in pytree.tree_leaves(node.meta.get("val"))):
            if operator_name(node.target) in ("aten._local_scalar_dense", "aten.item"):
                what, advice = "a tensor's value is read into Python", "keep it a tensor (no .item())"
            else:
                what, advice = "a size depends on a tensor's values", "use torch.where or masks, of a fixed size"
            raise CaptureError(
                f"{what} at {line_of(node)}\nWhat to change: {advice}, or compute it outside of the model and "
                "pass it in."
            )


def require_same_memory(graph: fx.Graph) -> None:
    """Refuses ``x.set_(y)``, which a functional graph would take for the use of another tensor."""
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name == "aten::set_":
            raise CaptureError(explain_new_memory("x.set_(...)", line_of(node)))


def require_positions(graph: fx.Graph) -> None:
    """Refuses what reads or writes through strides of which nobody can say which elements they name."""
    for node in graph.nodes:
        if node.target in STRIDED and relative_start(node) is None:
            raise CaptureError(
                f"the model reads or writes through strides (as_strided) of a tensor that does not lie in one piece in "
                f"memory, at {line_of(node)}\nWhat to change: slice, index, unfold() or diagonal() it, or make it "
                "contiguous() before."
            )


__all__ = ["require_positions", "require_same_memory", "require_static"]
