"""A digest of a captured graph."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import fx

from autoparallel.graph.captured import Captured


def fingerprint(captured: Captured) -> str:
    """A digest of a captured graph: keys, operators, wiring, and the shapes of what the model holds.  Sizes of what a
    call brings count as open, but whether one is 1, and so does which of its arguments a tensor is: a plan serves calls
    of any length, by position or by keyword, with one tensor as two arguments or with two."""
    held = captured.parameters.keys() | captured.buffers.keys() | captured.constants.keys()
    nodes = [node for node in captured.graph.nodes if node.op != "placeholder" or node.name in held]
    places: dict[fx.Node, int] = {node: place for place, node in enumerate(nodes)}  # passes have used up names
    lines = []
    texts: dict[tuple[int, Any, bool], str] = {}  # of values, which copied layers share
    for node in nodes:
        meta, is_held = node.meta, node.op == "placeholder"
        value, flows = meta.get("val"), meta.get("differentiable")
        text = texts.get((id(value), flows, is_held))
        if text is None:
            shapes = [
                (_shape(v, is_held), str(v.dtype))
                for v in torch.utils._pytree.tree_leaves(value)
                if isinstance(v, torch.Tensor)
            ]
            text = texts[id(value), flows, is_held] = f"|{shapes}|{flows}"
        lines.append(f"{meta.get('key')}|{[places.get(n, 'input') for n in node.all_input_nodes]}{text}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _shape(value: torch.Tensor, is_held: bool) -> tuple[Any, ...]:
    """The sizes that count."""
    return tuple([s if isinstance(s, int) and (is_held or s == 1) else "?" for s in value.shape])
