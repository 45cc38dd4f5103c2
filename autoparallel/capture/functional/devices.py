"""Where a graph was traced, forgotten (see [Note: devices] in ``capture.attempt``)."""

from __future__ import annotations

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoparallel._torch.export import move_to_cpu
from autoparallel.graph.captured import Captured
from autoparallel.operators.control_flow import inner_graphs
from autoparallel.passes.set_device import set_device

_CPU = torch.device("cpu")


def forget_devices(captured: Captured) -> None:
    """Has a captured graph create its tensors on the CPU, where its fakes are then, too, in place."""
    set_device(captured.module, _CPU)
    _move_fakes(captured.graph)


def _move_fakes(graph: fx.Graph) -> None:
    for node in graph.nodes:
        pytree.tree_map_(move_to_cpu, node.meta.get("val"))
        for module in inner_graphs(node.target):
            _move_fakes(module.graph)
