"""Convolutions, whose spatial dims are never cut."""

from __future__ import annotations

import math

from torch import fx

from autoparallel.rules.calls import arguments, operand_shapes, shape_of
from autoparallel.rules.core import Rule, dimwise
from autoparallel.rules.localize import divide_counts
from autoparallel.rules.shapes import hint


def convolution(node: fx.Node) -> Rule:
    """The rule of a convolution in any number of dims, transposed or not, with or without groups."""
    values, (x, weight, *bias) = arguments(node), operand_shapes(node)
    transposed = bool(values.get("transposed")) or "transpose" in str(node.target)
    spatial, groups = len(weight) - 2, values["groups"]
    if isinstance(groups, fx.Node):  # every row of the batch has a kernel of its own
        groups = groups.meta["val"]
    grouped = not isinstance(groups, int) or groups > 1
    places, kernel, out = ([f"{prefix}{i}" for i in range(spatial)] for prefix in ("x", "xk", "xo"))
    inputs, outputs, sizes = "i", "o", {}
    weights = ["i", "o"] if transposed else ["o", "i"]
    if grouped:  # channels mix within a group only, so whole groups are cut
        inputs, outputs = "(g i)", "(g o)"
        weights = ["(g i)", "o"] if transposed else ["(g o)", "i"]
        cut, whole = weight[0] // groups, weight[1]
        sizes = {"g": groups, "i": cut if transposed else whole, "o": whole if transposed else cut}
    batch = ["n"] if len(x) == spatial + 2 else []
    # Each place of the result (transposed: of the input) meets the kernel once; the other side's places are no loop.
    beside = math.prod(hint(s) for s in (shape_of(node) if transposed else x)[-spatial:])
    return dimwise(
        node,
        [[*batch, inputs, *places], [*weights, *kernel], *([outputs] for _ in bias)],
        [*batch, outputs, *out],
        sizes=sizes,
        linear=[(0,), (1,)],
        additive=[2] if bias else [],
        blocked=["i", "o"] if grouped else [],
        localize=divide_counts("groups", factor="g") if grouped else None,
        flops=2 / max(beside, 1),
    )
