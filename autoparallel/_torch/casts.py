"""Regions of autocast in a trace.

``torch.export`` makes calls of regions of another gradient mode first, and of regions of autocast then.  It looks for
the former at the beginning of each part that it cuts; where a region of autocast is around it, the part begins with
entering that, and the gradient mode is lost:
    with torch.autocast("cpu", enabled=False), torch.no_grad(): ...
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._export.passes import replace_set_grad_with_hop_pass as set_grad_pass
from torch._higher_order_ops.wrap import wrap_with_autocast
from torch.amp.autocast_mode import _enter_autocast as enter
from torch.amp.autocast_mode import _exit_autocast as leave

_PASS = "replace_set_grad_with_hop_pass"
_QUESTION = "_is_set_grad_enabled_sub_mod"
_SETS_MODE = torch._C._set_grad_enabled


@contextmanager
def gradient_modes_in_casts() -> Iterator[None]:
    """Inside, a trace keeps gradient modes that are set in regions of autocast, and leaves out the regions that change
    nothing: those of no autocast where there is none around."""
    make_calls, begins = getattr(set_grad_pass, _PASS), getattr(set_grad_pass, _QUESTION)

    def make_calls_of_needed(module: fx.GraphModule, signature: Any) -> Any:
        _drop_idle_regions(module.graph)
        module.recompile()
        return make_calls(module, signature)

    setattr(set_grad_pass, _PASS, make_calls_of_needed)
    setattr(set_grad_pass, _QUESTION, _begins_region)
    try:
        yield
    finally:
        setattr(set_grad_pass, _PASS, make_calls)
        setattr(set_grad_pass, _QUESTION, begins)


def _drop_idle_regions(graph: fx.Graph) -> None:
    """Leaves out regions of no autocast that are in none."""
    open_regions: list[fx.Node] = []
    for node in list(graph.nodes):
        if node.target is enter:
            open_regions.append(node)
        elif node.target is leave:
            region = open_regions.pop()
            device, enabled = region.args[0], region.args[2]
            around = any(other.args[0] == device and other.args[2] for other in open_regions)
            if not (enabled or around or torch.is_autocast_enabled(str(device))):
                graph.erase_node(node)
                graph.erase_node(region)


def _begins_region(node: fx.Node, omit_if_same_with_ambient: bool = False) -> bool:
    """Whether a part of a trace is a region of another gradient mode, whatever autocast it enters before."""
    if node.op != "call_module":
        return False
    owner = node.graph.owning_module
    assert owner is not None
    part = owner.get_submodule(str(node.target))
    assert isinstance(part, fx.GraphModule)
    calls = (x for x in part.graph.nodes if x.op != "placeholder" and x.target is not enter)
    first = next(calls, None)
    if first is None or first.target is not _SETS_MODE:
        return False
    return not omit_if_same_with_ambient or first.args[0] != torch.is_grad_enabled()


__all__ = ["gradient_modes_in_casts", "wrap_with_autocast"]
