"""Look-ups: embedding, gather, scatter, indexing. What is looked up in stays whole, but an embedding's table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autoparallel import operators
from autoparallel.rules.calls import Shape, arguments, shape_of, tensor_operands
from autoparallel.rules.core import Rule, make_rule, rule
from autoparallel.rules.localize import LocalCall

aten = torch.ops.aten


def _localize_embedding(call: LocalCall) -> None:
    group = call.joint_group("v")
    if group:
        weight, indices = call.args[:2]
        values = arguments(call.node)
        call.target = operators.embedding_sharded
        call.args, call.kwargs = (weight, indices, values["padding_idx"], group, values.get("rows")), {}


def _localize_pad_rows(call: LocalCall) -> None:
    count = call.shards(0)
    if count > 1:
        call.args = (call.args[0], call.args[1] // count)


@rule(operators.pad_rows)
def _pad_rows(node: fx.Node) -> Rule:
    """A rank fills up its own piece: the pieces that ``torch.chunk`` cuts begin where those of the padded whole do."""
    shape = shape_of(node)
    return make_rule("v ... -> v ...", [shape], shape, linear=[(0,)], localize=_localize_pad_rows)


@rule(aten.embedding.default, operators.padded_embedding)
def _embedding(node: fx.Node) -> Rule:
    values, operands = arguments(node), tensor_operands(node)
    shapes = [shape_of(o) for o in operands]
    # A gradient divided by how often each row was looked up needs all look-ups at once: only columns may be cut.
    counts = bool(values.get("scale_grad_by_freq"))
    rows = [f"i{k}" for k in range(len(shapes[1]))]
    return make_rule(
        f"v d, {' '.join(rows)} -> {' '.join([*rows, 'd'])}",
        shapes,
        shape_of(node),
        reductions={} if counts else {"v": "sum"},
        linear=[(0,)],
        blocked=["v", *rows] if counts else [],
        localize=_localize_embedding,
    )


@rule(aten.one_hot.default)
def _one_hot(node: fx.Node) -> Rule:
    return make_rule("... -> ... c", [shape_of(tensor_operands(node)[0])], shape_of(node), blocked=["c"])


def _same(sizes: Sequence[Any]) -> bool:
    return all(s == sizes[0] for s in sizes)


def _beside(dim: int, shapes: Sequence[Shape]) -> list[list[str]]:
    """The factors of tensors that correspond in every dim but ``dim``, as far as their sizes agree."""
    parts = []
    for k, shape in enumerate(shapes):
        names = []
        for d in range(len(shape)):
            shared = d != dim and _same([s[d] for s in shapes])
            names.append(f"d{d}" if shared else f"x{k}_{d}")
        parts.append(names)
    return parts


def _looked_up(node: fx.Node, parts: list[list[str]], result: list[str], **options: Any) -> Rule:
    single = {f for names in (*parts, result) for f in names if f.startswith("x")}
    operands = tensor_operands(node)
    return make_rule(
        f"{', '.join(' '.join(p) for p in parts)} -> {' '.join(result)}",
        [shape_of(o) for o in operands],
        shape_of(node),
        blocked=sorted(single),
        **options,
    )


@rule(aten.gather.default, aten.take_along_dim.default)
def _gather(node: fx.Node) -> Rule | None:
    values = arguments(node)
    source, index = (shape_of(o) for o in tensor_operands(node))
    if values["dim"] is None or len(source) != len(index) or not source:
        return None
    dim = values["dim"] % len(source)
    if node.target is aten.take_along_dim.default and shape_of(node) != index:
        return None  # its operands are broadcast
    left, right = _beside(dim, [source, index])
    # The looked-up dim of the result is the index's own, which may be cut.
    right[dim] = "j"
    return _looked_up(node, [left, right], right, linear=[(0,)])


@rule(aten.index_select.default)
def _index_select(node: fx.Node) -> Rule | None:
    source, index = (shape_of(o) for o in tensor_operands(node))
    if not source or not index:
        return None
    dim = arguments(node)["dim"] % len(source)
    names = [f"x{d}" if d == dim else f"d{d}" for d in range(len(source))]
    result = [*names[:dim], "j", *names[dim + 1 :]]
    return _looked_up(node, [names, ["j"]], result, linear=[(0,)])


@rule(aten.scatter_add.default)
def _scatter_add(node: fx.Node) -> Rule:
    shapes = [shape_of(o) for o in tensor_operands(node)]
    dim = arguments(node)["dim"] % max(len(shapes[0]), 1)
    into, index, source = _beside(dim, shapes)
    reductions = {}
    if shapes[0] and shapes[1][dim] == shapes[2][dim]:
        index[dim] = source[dim] = "j"
        reductions = {"j": "sum"}
    return _looked_up(
        node, [into, index, source], into, linear=[(0, 2)], reductions=reductions, additive=[0] if reductions else []
    )


@rule(aten.scatter.src, aten.scatter.value)
def _scatter(node: fx.Node) -> Rule:
    shapes = [shape_of(o) for o in tensor_operands(node)]
    parts = _beside(arguments(node)["dim"] % max(len(shapes[0]), 1), shapes)
    return _looked_up(node, parts, parts[0], linear=[(0, 2)] if len(shapes) == 3 else [])


@rule(aten.index_add.default)
def _index_add(node: fx.Node) -> Rule | None:
    into, index, source = (shape_of(o) for o in tensor_operands(node))
    if len(into) != len(source) or not into or not index:
        return None
    dim = arguments(node)["dim"] % len(into)
    left, right = _beside(dim, [into, source])
    right[dim] = "j"
    return _looked_up(
        node, [left, ["j"], right], left, linear=[(0, 2)], reductions={"j": "sum"}, additive=[0]
    )


def _indexed(node: fx.Node) -> tuple[list[str], list[list[str]], list[str]] | None:
    """The dims of an indexed tensor, of its indices and of the part they name; None for masks."""
    values = arguments(node)
    shape, indices = shape_of(values["self"]), list(values["indices"])
    indices += [None] * (len(shape) - len(indices))
    given = [d for d, i in enumerate(indices) if i is not None]
    if any(indices[d].meta["val"].dtype in (torch.bool, torch.uint8) for d in given) or not given:
        return None
    shapes = [shape_of(indices[d]) for d in given]
    count = max(len(s) for s in shapes)
    broadcast = [f"j{k}" for k in range(count)]
    parts = [broadcast[count - len(s) :] for s in shapes]
    names = [f"x{d}" if d in given else f"d{d}" for d in range(len(shape))]
    first = given[0] if given == list(range(given[0], given[-1] + 1)) else 0
    kept = [n for n in names if n.startswith("d")]
    before = [n for n in names[:first] if n.startswith("d")] if first else []
    return names, parts, [*before, *broadcast, *kept[len(before) :]]


@rule(aten.index.Tensor)
def _index(node: fx.Node) -> Rule | None:
    found = _indexed(node)
    if found is None:
        return None
    names, parts, result = found
    return _looked_up(node, [names, *parts], result, linear=[(0,)])


@rule(aten.index_put.default)
def _index_put(node: fx.Node) -> Rule | None:
    found = _indexed(node)
    if found is None:
        return None
    names, parts, part = found
    blocked = [f for p in parts for f in p]
    shapes = [shape_of(o) for o in tensor_operands(node)]
    values = part[len(part) - len(shapes[-1]) :]
    operands = [names, *parts, values]
    return make_rule(
        f"{', '.join(' '.join(p) for p in operands)} -> {' '.join(names)}",
        shapes,
        shape_of(node),
        linear=[(0, len(operands) - 1)],
        blocked=sorted({*blocked, *(n for n in names if n.startswith("x"))}),
    )
