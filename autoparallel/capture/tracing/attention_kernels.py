"""Attention that a model lets run on some kernels only (``with torch.nn.attention.sdpa_kernel(...)``).

Which kernels are permitted is a setting of the process, which no graph has: the call is marked, and a program runs it
under the same setting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from autoparallel import _torch
from autoparallel.capture.tracing.trace import Trace
from autoparallel.graph.layers import mark_kernels


def _attend(trace: Trace, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    kernels, place = _torch.nn.attention_kernels(), _torch.export.place_in_trace()
    result = func(*args, **kwargs)
    for node in _torch.export.nodes_since(place) if kernels != trace.kernels else ():
        if node.target is torch.ops.aten.scaled_dot_product_attention.default:
            mark_kernels(node, kernels)
    return result


# What torch's own functions call, nobody else sees.
ATTENTION: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: _attend,
    F.multi_head_attention_forward: _attend,
}
