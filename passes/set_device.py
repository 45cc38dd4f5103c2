"""The device on which a program creates tensors."""

from __future__ import annotations

import torch
from torch import fx


def set_device(module: fx.GraphModule, device: torch.device) -> None:
    """Rewrites the device that the traced program creates tensors on, in place."""
    for node in module.graph.nodes:
        if node.op == "call_function" and isinstance(node.kwargs.get("device"), torch.device):
            node.kwargs = {**node.kwargs, "device": device}
