"""The device on which a program creates tensors."""

from __future__ import annotations

import torch
from torch import fx

from autoparallel.operators.control_flow import inner_graphs


def set_device(module: fx.GraphModule, device: torch.device) -> None:
    """Rewrites the device that the traced program creates tensors on, in place, and that of the graphs it may run."""
    for node in module.graph.nodes:
        for inner in inner_graphs(node.target):
            set_device(inner, device)
            inner.recompile()
        if node.op == "call_function" and isinstance(node.kwargs.get("device"), torch.device):
            node.kwargs = {**node.kwargs, "device": device}
