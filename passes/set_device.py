"""The device on which a program creates tensors."""

from __future__ import annotations

import copy

import torch
from torch import fx

from autoparallel.operators.control_flow import inner_graphs


def set_device(module: fx.GraphModule, device: torch.device) -> None:
    """Rewrites the device that the traced program creates tensors on, in place.

    The graphs that an operator may run are shared with the trace and with programs on other devices: the operator is
    replaced by one of copies of them.
    """
    for node in module.graph.nodes:
        if graphs := inner_graphs(node.target):
            node.target = node.target.of_graphs([_on_device(inner, device) for inner in graphs])
        if node.op == "call_function" and isinstance(node.kwargs.get("device"), torch.device):
            node.kwargs = {**node.kwargs, "device": device}


def _on_device(module: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    module = copy.deepcopy(module)
    set_device(module, device)
    module.recompile()
    return module
