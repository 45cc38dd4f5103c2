"""Running a body through ``torch.compile``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autoparallel import _torch
from autoparallel.program import LocalProgram


def compile_body(program: LocalProgram) -> Callable[..., Any]:
    """The body, compiled at its first call, once for all batch sizes.

    Sizes that the trace left open stay open and all others are fixed: were parameters' sizes open, too, Dynamo would
    take those that happen to be equal for the same size, and compile again when one of them changes.
    """
    compiled = torch.compile(program.body, fullgraph=True, dynamic=False)
    open_dims: list[list[int]] = []
    for node in program.body.graph.nodes:
        if node.op == "placeholder":
            value = node.meta.get("val")
            shape = value.shape if isinstance(value, torch.Tensor) and "placements" in node.meta else ()
            open_dims.append([dim for dim, size in enumerate(shape) if not isinstance(size, int)])

    def run(*arguments: Any) -> Any:
        given = list(arguments)
        for i, dims in enumerate(open_dims):
            if dims:
                given[i] = given[i].view_as(given[i])  # the mark is on a view, not on the caller's tensor
                _torch.leave_open(given[i], dims)
        return compiled(*given)

    return run


__all__ = ["compile_body"]
