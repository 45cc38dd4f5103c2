"""Matrix products and attention: the operators that compute."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from autoparallel.operators.experts import grouped_linear, grouped_linear_exchanged, grouped_linear_sharded
from autoparallel.rules.calls import arguments, shape_of, tensor_operands
from autoparallel.rules.core import Rule, make_rule, rule
from autoparallel.rules.localize import LocalCall

aten = torch.ops.aten


@rule(aten.mm.default)
def _mm(node: fx.Node) -> Rule:
    return _contract(node, "m k, k n -> m n")


@rule(aten.mv.default)
def _mv(node: fx.Node) -> Rule:
    return _contract(node, "m k, k -> m")


@rule(aten.dot.default, aten.vdot.default)
def _dot(node: fx.Node) -> Rule:
    return _contract(node, "k, k -> ")


@rule(aten.bmm.default)
def _bmm(node: fx.Node) -> Rule:
    return _contract(node, "b m k, b k n -> b m n")


@rule(aten.outer.default)
def _outer(node: fx.Node) -> Rule:
    return _contract(node, "m, n -> m n")


@rule(aten.matmul.default)
def _matmul(node: fx.Node) -> Rule:
    a, b = (len(shape_of(o)) for o in tensor_operands(node))
    if a == 1 and b == 1:
        return _contract(node, "k, k -> ")
    if b == 1:
        return _contract(node, "... m k, k -> ... m")
    if a == 1:
        return _contract(node, "k, ... k n -> ... n")
    return _contract(node, "... m k, ... k n -> ... m n")


@rule(aten.linear.default)
def _linear(node: fx.Node) -> Rule:
    if len(tensor_operands(node)) == 2:
        return _contract(node, "... k, n k -> ... n")
    return _contract(node, "... k, n k, n -> ... n", added=2)


@rule(aten.addmm.default)
def _addmm(node: fx.Node) -> Rule:
    return _contract(node, f"{_aligned(node, ['m', 'n'])}, m k, k n -> m n", added=0)


@rule(aten.baddbmm.default)
def _baddbmm(node: fx.Node) -> Rule:
    return _contract(node, f"{_aligned(node, ['b', 'm', 'n'])}, b m k, b k n -> b m n", added=0)


@rule(aten.addmv.default)
def _addmv(node: fx.Node) -> Rule:
    return _contract(node, f"{_aligned(node, ['m'])}, m k, k -> m", added=0)


@rule(aten.addbmm.default)
def _addbmm(node: fx.Node) -> Rule:
    return _contract(node, f"{_aligned(node, ['m', 'n'])}, b m k, b k n -> m n", added=0)


def _aligned(node: fx.Node, dims: Sequence[str]) -> str:
    """The dims of the first operand, which is broadcast to the result."""
    rank = len(shape_of(tensor_operands(node)[0]))
    return " ".join(dims[len(dims) - rank :])


def _contract(node: fx.Node, notation: str, added: int | None = None) -> Rule:
    """A product of all operands but the added one, summed over the factors that the result does not bear."""
    left, _, right = notation.partition("->")
    summed = {f for part in left.split(",") for f in part.split()} - set(right.split()) - {"..."}
    operands = tensor_operands(node)
    return make_rule(
        notation,
        [shape_of(o) for o in operands],
        shape_of(node),
        reductions={f: "sum" for f in sorted(summed)},
        linear=[(i,) for i in range(len(operands)) if i != added],
        additive=[] if added is None else [added],
        flops=2,
    )


@rule(aten.einsum.default)
def _einsum(node: fx.Node) -> Rule | None:
    left, arrow, right = str(arguments(node)["equation"]).replace(" ", "").partition("->")
    parts = left.split(",")
    if not arrow:  # torch's implicit form: the letters that occur once, in order, after the ellipsis
        letters = left.replace(".", "").replace(",", "")
        right = ("..." if "..." in left else "") + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    if "..." in left and "..." not in right:
        return None  # the leading dims are summed; they have no names
    blocked = {c for part in parts for c in part if c != "." and part.count(c) > 1}  # a diagonal cannot be cut
    if any(right.count(c) > 1 for c in right if c != "."):
        return None
    summed = sorted({c for part in parts for c in part} - set(right) - {"."})
    return make_rule(
        f"{', '.join(_spaced(part) for part in parts)} -> {_spaced(right)}",
        [shape_of(o) for o in tensor_operands(node)],
        shape_of(node),
        reductions={c: "sum" for c in summed},
        linear=[(i,) for i in range(len(parts))],
        blocked=sorted(blocked),
        flops=2,
    )


def _spaced(part: str) -> str:
    return " ".join("..." if c == "." else c for c in part.replace("...", "."))


@rule(aten.tensordot.default)
def _tensordot(node: fx.Node) -> Rule:
    values = arguments(node)
    a, b = (len(shape_of(o)) for o in tensor_operands(node))
    left, right = [f"m{i}" for i in range(a)], [f"n{i}" for i in range(b)]
    for k, (i, j) in enumerate(zip(values["dims_self"], values["dims_other"], strict=True)):
        left[i], right[j] = f"k{k}", f"k{k}"
    kept = [f for f in (*left, *right) if not f.startswith("k")]
    return _contract(node, f"{' '.join(left)}, {' '.join(right)} -> {' '.join(kept)}")


def _localize_grouped(call: LocalCall) -> None:
    sent, summed = call.axes_of("s@e"), call.axes_of("e")
    if sent:
        owners = " ".join(("" if i in sent else "-") + call.groups[i] for i in sorted((*sent, *summed)))
        call.target = grouped_linear_exchanged
        call.args, call.kwargs = (*call.args, call.joint_group("s@e"), owners), {}
    elif summed:
        call.target, call.args, call.kwargs = grouped_linear_sharded, (*call.args, call.joint_group("e")), {}


@rule(grouped_linear)
def _grouped_linear(node: fx.Node) -> Rule:
    shapes = [shape_of(o) for o in tensor_operands(node)]
    return make_rule(
        "s k, e k n, s -> s n",
        shapes,
        shape_of(node),
        reductions={"k": "sum", "e": "sum"},
        linear=[(0,), (1,)],
        localize=_localize_grouped,
        flops=2 / shapes[1][0],  # each row meets one expert
        exchange=("s", "e"),
    )


@rule(aten.scaled_dot_product_attention.default)
def _attention(node: fx.Node) -> Rule | None:
    values = arguments(node)
    operands = tensor_operands(node)
    q, k, v = (shape_of(o) for o in operands[:3])
    rank = len(q)
    if not rank == len(k) == len(v) or values["dropout_p"]:
        return None  # canonicalize_operators has expanded attention with dropout
    lead = [f"b{i}" for i in range(rank - 2)]
    shared, sizes = list(lead), {}
    if rank > 2 and values.get("enable_gqa") and q[-3] != k[-3]:
        # Query head i reads key head i // (q heads / kv heads): both are cut in whole groups of the kv heads.
        if k[-3] != v[-3]:
            return None
        shared[-1], lead[-1] = "h", "(h r)"
        sizes = {"h": k[-3], "r": q[-3] // k[-3]}
    parts = [[*lead, "l", "e"], [*shared, "s", "e"], [*shared, "s", "v"]]
    if len(operands) == 4:
        mask = shape_of(operands[3])
        named = [*lead, "l", "s"][rank - len(mask) :]
        # A composed dim says nothing of its size, so a broadcast one must be written as what it is.
        parts.append(["1" if isinstance(n, int) and n == 1 else f for f, n in zip(named, mask, strict=True)])
    return make_rule(
        f"{', '.join(' '.join(p) for p in parts)} -> {' '.join([*lead, 'l', 'v'])}",
        [shape_of(o) for o in operands],
        shape_of(node),
        sizes=sizes,
        linear=[(2,)],
        blocked=["e", "s", "v"] + (["l"] if values["is_causal"] else []),
        # Each query meets each key, and their weight each value: e and v are never met by one another.
        flops=(2 / q[-1] + 2 / v[-1]) * (0.5 if values["is_causal"] else 1),
    )
