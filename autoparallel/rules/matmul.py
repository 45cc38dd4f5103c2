"""Matrix products and attention: the operators that compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from autoparallel.operators.experts import grouped_linear_exchanged, grouped_linear_sharded
from autoparallel.rules.calls import arguments, is_tensor, operand_shapes, shape_of
from autoparallel.rules.core import Notation, Rule, dimwise, make_rule, parse_factors
from autoparallel.rules.localize import LocalCall


def product(node: fx.Node, notation: str | Notation, blocked: Sequence[str] = ()) -> Rule:
    """The rule of a product of all operands, summed over the factors that the result does not bear.

    In its notation, ``+`` is an operand that is added: it has the last dims of the result, as many as there are, and a
    call may lack it.
    """
    operands, result = parse_factors(notation) if isinstance(notation, str) else notation
    shapes = operand_shapes(node)
    parts = [*operands[: len(shapes)]]
    added = [i for i, part in enumerate(parts) if part == ["+"]]
    for i in added:
        parts[i] = result[len(result) - len(shapes[i]) :]
    linear = [(i,) for i in range(len(parts)) if i not in added]
    return make_rule(node, (parts, result), linear=linear, additive=added, blocked=blocked, flops=2)


def matmul(node: fx.Node) -> Rule:
    """The rule of a product of vectors, matrices, or stacks of matrices."""
    a, b = (len(shape) for shape in operand_shapes(node))
    left, right = ["k"] if a == 1 else ["...", "m", "k"], ["k"] if b == 1 else ["...", "k", "n"]
    lead = [] if a == b == 1 else ["..."]
    return product(node, ([left, right], [*lead, *(["m"] if a > 1 else []), *(["n"] if b > 1 else [])]))


def linear(node: fx.Node) -> Rule:
    """The rule of a product with a transposed matrix, or with a vector, and a bias."""
    return product(node, "... k, n k, + -> ... n" if len(operand_shapes(node)[1]) > 1 else "... k, k -> ...")


def einsum(node: fx.Node) -> Rule | None:
    """The rule of a sum of products, each letter a factor."""
    left, arrow, right = str(arguments(node)["equation"]).replace(" ", "").replace("...", ".").partition("->")
    letters = left.replace(".", "").replace(",", "")
    if not arrow:  # torch's implicit form: the letters that occur once, in order, after the ellipsis
        right = ("." if "." in left else "") + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    if ("." in left and "." not in right) or len(set(right)) < len(right):
        return None  # leading dims that are summed have no names; a diagonal cannot be made of parts
    parts = left.split(",")
    diagonals = sorted(c for c in set(letters) if any(part.count(c) > 1 for part in parts))
    dims = [["..." if c == "." else c for c in part] for part in (*parts, right)]
    return product(node, (dims[:-1], dims[-1]), blocked=diagonals)


def tensordot(node: fx.Node) -> Rule:
    """The rule of a product that is summed over the dims which the call names."""
    values = arguments(node)
    a, b = (len(shape) for shape in operand_shapes(node))
    left, right = [f"m{i}" for i in range(a)], [f"n{i}" for i in range(b)]
    for k, (i, j) in enumerate(zip(values["dims_self"], values["dims_other"], strict=True)):
        left[i], right[j] = f"k{k}", f"k{k}"
    return product(node, ([left, right], [f for f in (*left, *right) if not f.startswith("k")]))


def _localize_grouped(call: LocalCall) -> None:
    exchanged, summed = call.axes_of("s@e"), call.axes_of("e")
    if exchanged:
        owners = " ".join(("" if i in exchanged else "-") + call.groups[i] for i in sorted((*exchanged, *summed)))
        call.target = grouped_linear_exchanged
        call.args, call.kwargs = (*call.args, call.joint_group("s@e"), owners), {}
    elif summed:
        call.target, call.args, call.kwargs = grouped_linear_sharded, (*call.args, call.joint_group("e")), {}


def grouped(node: fx.Node) -> Rule:
    """The rule of a linear layer of which every row picks its own weight."""
    experts = operand_shapes(node)[1][0]
    return make_rule(
        node,
        "s k, e k n, s -> s n",
        linear=[(0,), (1,)],
        localize=_localize_grouped,
        flops=2 / experts,  # each row meets one expert
        exchange=("s", "e"),
    )


def attention(node: fx.Node) -> Rule | None:
    """The rule of scaled dot-product attention, with or without groups of heads and a mask."""
    values, (q, k, v, *masks) = arguments(node), operand_shapes(node)
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
    for mask in masks:
        parts.append([*lead, "l", "s"][rank - len(mask) :])
    rule = dimwise(
        node,
        parts,
        [*lead, "l", "v"],
        sizes=sizes,
        linear=[(2,)],
        blocked=["e", "s", "v"] + (["l"] if values["is_causal"] else []),
        # Each query meets each key, and their weight each value: e and v are never met by one another.
        flops=(2 / q[-1] + 2 / v[-1]) * (0.5 if values["is_causal"] else 1),
    )
    return replace(rule, attention=True)


def flex_attention(node: fx.Node) -> Rule:
    """The rule of attention whose scores are changed and masked by functions, which read whole tensors."""
    v = arguments(node)
    heads, shared = shape_of(v["q"])[1], shape_of(v["k"])[1]
    grouped = heads != shared and shared != 1  # cut in whole groups, as in ``attention``
    head = "(h r)" if grouped else "h"
    wide = {"b": shape_of(v["q"])[0], "h": shared if grouped else heads, "r": heads // shared}
    blocks = [x for x in v["blocks"] if isinstance(x, fx.Node) and is_tensor(x)]
    inner = [[f"x{i}_{d}" for d in range(len(shape_of(x)) - 2)] for i, x in enumerate(blocks)]
    others = operand_shapes(node)[3 + len(blocks) :]
    rule = dimwise(
        node,
        [
            ["b", head, "xl", "xe"],
            ["b", "h", "xs", "xe"],
            ["b", "h", "xs", "xv"],
            *(["b", head, *dims] for dims in inner),
            *([f"x{i}r{d}" for d in range(len(shape))] for i, shape in enumerate(others)),
        ],
        ["b", head, "xl", *(["xv"] if v["result"] == 0 else [])],
        sizes=wide if grouped else None,
        linear=[(2,)] if v["result"] == 0 else [],
        localize=_localize_flex,
        flops=(2 / shape_of(v["q"])[-1] + 2 / shape_of(v["v"])[-1]) * v["density"],
    )
    return replace(rule, attention=True)


def _localize_flex(call: LocalCall) -> None:
    rows = ",".join(filter(None, [arguments(call.node)["rows"], *(call.groups[i] for i in call.axes_of("b"))]))
    call.set_argument("rows", rows)
    call.set_argument("heads", ",".join(call.groups[i] for i in call.axes_of("h")))


def solve(node: fx.Node) -> Rule:
    """The rule of systems of linear equations, solved for matrices or vectors; linear in the right-hand sides."""
    matrices, right = operand_shapes(node)
    is_vector = len(right) == 1 or right == matrices[:-1]
    notation = "... x y, ... u -> ... u" if is_vector else "... x y, ... u v -> ... u v"
    return make_rule(node, notation, linear=[(1,)], blocked=["x", "y", "u"] + ["v"] * (not is_vector))
