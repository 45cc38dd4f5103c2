"""Finds what must divide evenly for a program to run; rewrites nothing.

For (the batch is open, s0, and cut over an axis of 2 ranks):
    linear = aten.linear(x, w)      [s0, 4]  S0
the divisors are ((s0, 2),).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sympy
from torch import fx

from autoparallel.placements import Layout, count_pieces
from autoparallel.rules.calls import is_tensor


@dataclass(frozen=True)
class Divisors:
    """What must divide evenly for a program to run: for each symbolic size that is cut its expression, and into how
    many pieces."""

    pairs: tuple[tuple[sympy.Expr, int], ...]


def find_divisors(module: fx.GraphModule, axis_sizes: Sequence[int]) -> Divisors:
    """Finds the symbolic sizes that a program cuts; rewrites nothing."""
    pairs: dict[tuple[sympy.Expr, int], None] = {}
    for node in module.graph.nodes:
        if not is_tensor(node) or "placements" not in node.meta:
            continue
        layout: Layout = node.meta["placements"]
        for dim, size in enumerate(node.meta["val"].shape):
            if isinstance(size, int):
                continue
            count = count_pieces(layout, dim, axis_sizes)
            if count > 1:
                pairs[size.node.expr, count] = None
    return Divisors(tuple(pairs))
