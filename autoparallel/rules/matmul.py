"""Matrix products, convolution, attention: the operators that compute."""

from __future__ import annotations

import torch
from torch import fx

from autoparallel.rules.calls import arguments, shape_of, tensor_operands
from autoparallel.rules.core import Rule, make_rule, rule

aten = torch.ops.aten


@rule(aten.mm.default)
def _mm(node: fx.Node) -> Rule:
    return _contract(node, "m k, k n -> m n", "k", [(0,), (1,)])


@rule(aten.mv.default)
def _mv(node: fx.Node) -> Rule:
    return _contract(node, "m k, k -> m", "k", [(0,), (1,)])


@rule(aten.dot.default)
def _dot(node: fx.Node) -> Rule:
    return _contract(node, "k, k -> ", "k", [(0,), (1,)])


@rule(aten.bmm.default)
def _bmm(node: fx.Node) -> Rule:
    return _contract(node, "b m k, b k n -> b m n", "k", [(0,), (1,)])


@rule(aten.matmul.default)
def _matmul(node: fx.Node) -> Rule | None:
    a, b = (len(shape_of(o)) for o in tensor_operands(node))
    if a == 1 and b == 1:
        return _contract(node, "k, k -> ", "k", [(0,), (1,)])
    if b == 1:
        return _contract(node, "... m k, k -> ... m", "k", [(0,), (1,)])
    if a == 1:
        return _contract(node, "k, ... k n -> ... n", "k", [(0,), (1,)])
    return _contract(node, "... m k, ... k n -> ... m n", "k", [(0,), (1,)])


@rule(aten.linear.default)
def _linear(node: fx.Node) -> Rule:
    if len(tensor_operands(node)) == 2:
        return _contract(node, "... k, n k -> ... n", "k", [(0,), (1,)])
    return _contract(node, "... k, n k, n -> ... n", "k", [(0,), (1,)], additive=(2,))


@rule(aten.addmm.default)
def _addmm(node: fx.Node) -> Rule:
    bias = "... n" if len(shape_of(tensor_operands(node)[0])) == 1 else "m n"
    return _contract(node, f"{bias}, m k, k n -> m n", "k", [(1,), (2,)], additive=(0,))


@rule(aten.baddbmm.default)
def _baddbmm(node: fx.Node) -> Rule:
    return _contract(node, "b m n, b m k, b k n -> b m n", "k", [(1,), (2,)], additive=(0,))


def _contract(
    node: fx.Node, notation: str, summed: str, linear: list[tuple[int, ...]], additive: tuple[int, ...] = ()
) -> Rule:
    return make_rule(
        notation.replace("... n,", "n,") if notation.startswith("... n,") else notation,
        [shape_of(o) for o in tensor_operands(node)],
        shape_of(node),
        reductions={summed: "sum"},
        linear=linear,
        additive=additive,
        flops=2,
    )


@rule(aten.convolution.default, aten.conv2d.default, aten.conv1d.default, aten.conv3d.default)
def _convolution(node: fx.Node) -> Rule | None:
    values = arguments(node)
    if values.get("transposed"):
        return None
    operands = tensor_operands(node)
    spatial = len(shape_of(operands[0])) - 2
    if spatial < 1:
        return None
    places = [f"x{i}" for i in range(spatial)]
    kernel = [f"k{i}" for i in range(spatial)]
    out = [f"y{i}" for i in range(spatial)]
    grouped = values["groups"] != 1
    # Grouped convolution mixes channels within a group only: its channels are cut together or not at all.
    channels_in, channels_weight = ("g", "i") if grouped else ("i", "i")
    notation = f"n {channels_in} {' '.join(places)}, o {channels_weight} {' '.join(kernel)}"
    if len(operands) == 3:
        notation += ", o"
    blocked = [*places, *kernel, *out] + (["g", "i", "o"] if grouped else [])
    return make_rule(
        f"{notation} -> n o {' '.join(out)}",
        [shape_of(o) for o in operands],
        shape_of(node),
        reductions={} if grouped else {"i": "sum"},
        linear=[(0,), (1,)],
        additive=(2,) if len(operands) == 3 else (),
        blocked=blocked,
        flops=2,
    )


@rule(aten.scaled_dot_product_attention.default)
def _attention(node: fx.Node) -> Rule | None:
    values = arguments(node)
    operands = tensor_operands(node)
    q, k = shape_of(operands[0]), shape_of(operands[1])
    if len(q) < 3 or values["dropout_p"]:
        return None  # canonicalize_operators has expanded attention with dropout
    heads = ["h"] if len(q) > 3 else []
    lead = " ".join(["...", *heads]) if len(q) > 3 else "..."
    grouped = bool(values.get("enable_gqa")) and q[-3] != k[-3]
    blocked = ["e", "s", "v"] + (["l"] if values["is_causal"] else [])
    if grouped:
        # Query head i reads key head i // (q heads / kv heads): both are cut in whole groups of the kv heads.
        ratio = q[-3] // k[-3]
        notation = "... (h r) l e, ... h s e, ... h s v"
        sizes = {"h": k[-3], "r": ratio}
        result = "... (h r) l v"
    else:
        notation = f"{lead} l e, {lead} s e, {lead} s v"
        sizes = {}
        result = f"{lead} l v"
    if len(operands) == 4:
        mask = shape_of(operands[3])
        names = (["..."] if len(mask) > 3 else []) + (heads if len(mask) > 2 else []) + ["l", "s"]
        if grouped:
            names = ["..."] * (len(mask) > 3) + ["(h r)"] * (len(mask) > 2) + ["l", "s"]
            if len(mask) > 2 and mask[-3] == 1:
                names[-3] = "1"
        notation += f", {' '.join(names)}"
    return make_rule(
        f"{notation} -> {result}",
        [shape_of(o) for o in operands],
        shape_of(node),
        sizes=sizes,
        linear=[(2,)],
        blocked=blocked,
        flops=4,
    )
