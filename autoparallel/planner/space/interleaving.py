"""What it costs to bring interleaved pieces (see ``passes.interleave_projections``) to their product.

Interleaving itself is free: without blocks that are sharded there is none in the program, and with them it is one copy,
which is made for the redistribution that deals the blocks out.  So both are paid where they happen, between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import fx

from autoparallel import operators
from autoparallel.hardware import Profile
from autoparallel.placements import Layout
from autoparallel.placements.redistribution import local_numel
from autoparallel.planner.calls.options import Option
from autoparallel.rules.shapes import runs_of_equal_product


def deals_out(node: fx.Node) -> bool:
    """Whether a node interleaves pieces, so that its result may be dealt out in blocks."""
    return node.target is operators.interleave


def dealing_seconds(
    node: fx.Node,
    shape: tuple[int, ...],
    options: Sequence[Option],
    columns: Sequence[Layout],
    axis_sizes: Sequence[int],
    profile: Profile,
) -> np.ndarray:
    """The time of the copy between each option's result and each layout; infinite where more happens than that blocks
    are dealt out, which is done before they are made, where parameters travel in buckets."""
    dim = node.args[1]
    out = np.zeros((len(options), len(columns)))
    copies = 4 if node.meta["backward"] else 2  # read and written, and once more by the gradient
    for i, option in enumerate(options):
        size = local_numel(shape, option.result, axis_sizes) * node.meta["val"].element_size()
        for j, column in enumerate(columns):
            changes = [new for old, new in zip(option.result, column, strict=True) if old != new]
            if any(new.kind != "S" or new.dim != dim for new in changes):
                out[i, j] = np.inf
            elif changes:
                out[i, j] = copies * size / profile.memory_bandwidth
    return out


def dealt_bytes(
    node: fx.Node,
    shape: tuple[int, ...],
    options: Sequence[Option],
    columns: Sequence[Layout],
    axis_sizes: Sequence[int],
    saved: bool,
) -> np.ndarray:
    """The memory of what is dealt out, where the backward finds it (``saved``), and of its gradient."""
    copies = int(saved) + int(node.meta["backward"])
    held = [copies * local_numel(shape, c, axis_sizes) * float(node.meta["val"].element_size()) for c in columns]
    return np.array([[size if o.result != c else 0.0 for c, size in zip(columns, held, strict=True)] for o in options])


def why_whole(
    graph: fx.Graph, axes: Sequence[tuple[str, int]], size: Callable[[fx.Node], Sequence[int]]
) -> dict[str, str]:
    """Why no mesh axis can cut a fused projection into whole pieces and heads, for each module where that is so.

    Args:
        axes: the names and sizes of the mesh axes that may cut it.
        size: a node's shape in the call that is planned for.
    """
    reasons: dict[str, str] = {}
    for node in graph.nodes:
        if "pieces" not in node.meta or not axes:
            continue
        counts = _heads(node, size)
        what = "heads" if counts else "rows"
        counts = counts or list(node.meta["pieces"])
        if all(any(count % n for count in counts) for _, n in axes):
            ranks = " or ".join(f"{n} ranks of {name!r}" for name, n in axes)
            reasons[str(node.meta["module"])] = (
                f"its product is cut into pieces of {', '.join(map(str, counts))} {what}, which do not divide by the "
                f"{ranks}: use a number of {what} that does, or another mesh"
            )
    return reasons


def _heads(product: fx.Node, size: Callable[[fx.Node], Sequence[int]]) -> list[int]:
    """How many heads each piece is viewed as; empty where a piece is not."""
    counts: list[int] = []
    readers = [product]
    for node in readers:
        for user in node.users:
            if user.target is not operators.piece:
                readers.extend([user] if "interleaved" in user.meta else [])
                continue
            views = [u for u in user.users if u.target is torch.ops.aten.reshape.default]
            for view in views[:1]:
                dim = user.args[1]
                runs = runs_of_equal_product(tuple(size(user)), tuple(size(view)))
                counts += [size(view)[right[0]] for left, right in runs if left == [dim] and len(right) > 1]
    return counts
