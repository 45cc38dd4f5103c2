"""The device on which a program creates tensors."""

from __future__ import annotations

import torch
from torch import fx

from autoparallel.operators.control_flow import create_on


def set_device(module: fx.GraphModule, device: torch.device) -> None:
    """Rewrites the device that the traced program creates tensors on, in place.

    The graphs that an operator may run are shared with the trace and with programs on other devices: the operator is
    replaced by one of copies of them.
    """
    for node in module.graph.nodes:
        create_on(node, device)
