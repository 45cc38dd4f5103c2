"""A digest of a captured graph."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import fx


def fingerprint(graph: fx.Graph) -> str:
    """A digest of a captured graph: keys, operators, wiring and shapes; batch sizes count as open."""
    places = {node: place for place, node in enumerate(graph.nodes)}  # names tell what was there before passes
    lines = []
    texts: dict[tuple[int, Any], str] = {}  # of values, which copied layers share
    for node in graph.nodes:
        meta = node.meta
        value, flows = meta.get("val"), meta.get("differentiable")
        text = texts.get((id(value), flows))
        if text is None:
            shapes = [
                (tuple([s if isinstance(s, int) else "?" for s in v.shape]), str(v.dtype))
                for v in torch.utils._pytree.tree_leaves(value)
                if isinstance(v, torch.Tensor)
            ]
            text = texts[id(value), flows] = f"|{shapes}|{flows}"
        lines.append(f"{meta.get('key')}|{[places[n] for n in node.all_input_nodes]}{text}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
