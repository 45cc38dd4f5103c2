"""Convolutions, pooling and interpolation: operators with spatial dims, which are never cut."""

from __future__ import annotations

import math
import re

import torch
from torch import fx

from autoparallel.rules.calls import arguments, shape_of, tensor_operands
from autoparallel.rules.core import Rule, make_rule, rule
from autoparallel.rules.localize import LocalCall
from autoparallel.rules.shapes import hint

aten = torch.ops.aten


def _localize_groups(call: LocalCall) -> None:
    pieces = 1
    for axis in call.axes_of("g"):
        pieces *= call.axis_sizes[axis]
    if pieces > 1:
        call.set_argument("groups", arguments(call.node)["groups"] // pieces)


@rule(
    aten.convolution.default, aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.conv1d.padding,
    aten.conv2d.padding, aten.conv3d.padding, aten.conv_transpose1d.default, aten.conv_transpose2d.input,
    aten.conv_transpose3d.input,
)  # fmt: skip
def _convolution(node: fx.Node) -> Rule:
    values = arguments(node)
    operands = tensor_operands(node)
    x, weight = shape_of(operands[0]), shape_of(operands[1])
    transposed = bool(values.get("transposed")) or "transpose" in str(node.target)
    spatial = len(weight) - 2
    places, kernel, out = ([f"{c}{i}" for i in range(spatial)] for c in "xky")
    groups = values["groups"]
    inputs, outputs, sizes = "i", "o", {}
    weights = ["i", "o"] if transposed else ["o", "i"]
    if groups > 1:  # channels mix within a group only, so whole groups are cut
        inputs, outputs = "(g i)", "(g o)"
        weights = ["(g i)", "o"] if transposed else ["(g o)", "i"]
        channels = shape_of(node)[-spatial - 1]
        sizes = {"g": groups, "i": x[-spatial - 1] // groups, "o": channels // groups}
    batch = ["n"] if len(x) == spatial + 2 else []
    # Each place of the result (transposed: of the input) meets the kernel once; the other side's places are no loop.
    beside = math.prod(hint(s) for s in (shape_of(node) if transposed else x)[-spatial:])
    parts = [[*batch, inputs, *places], [*weights, *kernel]]
    if len(operands) == 3:
        parts.append([outputs])
    return make_rule(
        f"{', '.join(' '.join(p) for p in parts)} -> {' '.join([*batch, outputs, *out])}",
        [shape_of(o) for o in operands],
        shape_of(node),
        sizes=sizes,
        reductions={"i": "sum"} if groups == 1 else {},
        linear=[(0,), (1,)],
        additive=(2,) if len(operands) == 3 else (),
        blocked=[*places, *kernel, *out] + (["i", "o"] if groups > 1 else []),
        localize=_localize_groups if groups > 1 else None,
        flops=2 / max(beside, 1),
    )


_LINEAR_POOLS = [
    aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default, aten.adaptive_avg_pool1d.default,
    aten.adaptive_avg_pool2d.default, aten.adaptive_avg_pool3d.default, aten._adaptive_avg_pool2d.default,
    aten.upsample_nearest1d.vec, aten.upsample_nearest2d.vec, aten.upsample_nearest3d.vec,
    aten.upsample_bilinear2d.vec, aten.upsample_bicubic2d.vec, aten.upsample_linear1d.vec,
    aten.upsample_trilinear3d.vec,
]  # fmt: skip
_MAX_POOLS = [aten.max_pool1d.default, aten.max_pool2d.default, aten.max_pool3d.default]


@rule(*_LINEAR_POOLS, *_MAX_POOLS)
def _pool(node: fx.Node) -> Rule:
    match = re.search(r"(\d)d", str(node.target))
    assert match is not None
    places, out = ([f"{c}{i}" for i in range(int(match[1]))] for c in "xy")
    return make_rule(
        f"... {' '.join(places)} -> ... {' '.join(out)}",
        [shape_of(tensor_operands(node)[0])],
        shape_of(node),
        linear=[(0,)] if node.target in _LINEAR_POOLS else [],
        blocked=[*places, *out],
    )


@rule(aten.pixel_shuffle.default, aten.pixel_unshuffle.default)
def _pixel_shuffle(node: fx.Node) -> Rule:
    before, after = ["c", "x", "y"], ["d", "u", "v"]
    return make_rule(
        f"... {' '.join(before)} -> ... {' '.join(after)}",
        [shape_of(tensor_operands(node)[0])],
        shape_of(node),
        linear=[(0,)],
        blocked=[*before, *after],
    )


@rule(aten.im2col.default)
def _unfold(node: fx.Node) -> Rule:
    return make_rule(
        "... c x y -> ... k l",
        [shape_of(tensor_operands(node)[0])],
        shape_of(node),
        linear=[(0,)],
        blocked=["c", "x", "y", "k", "l"],
    )
