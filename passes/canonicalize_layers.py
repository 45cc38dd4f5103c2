"""Layers of torch with several results, and operators that find positions, in terms of operators with one result.

Before:
    lstm = aten.lstm(x, [h, c], [w, u], False, 1, 0.0, True, False, True);  out = lstm[0]
    cummax = aten.cummax(x, 1);  values = cummax[0]
After:
    recurrent = autoparallel.recurrent(x, [h, c], [w, u], "lstm", False, 1, False, True)
    out = aten.reshape(aten.slice(recurrent, 1, 16), [8, 5, 8])
    indices_along = autoparallel.indices_along(x, 1, "cummax");  values = aten.gather(x, 1, indices_along)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autoparallel import operators
from autoparallel.operators.recurrent import recurrent
from autoparallel.passes.emitter import Emitter, Rewrite
from autoparallel.rules.calls import arguments, shape_of

aten = torch.ops.aten

Parts = Callable[[int], Any]
"""From a result's index to the value that takes its place."""


def _split_recurrent(emit: Emitter, node: fx.Node) -> Parts | None:
    """A recurrent layer, whose results are parts of one."""
    v = arguments(node)
    if v["dropout"] and v["train"]:
        return None
    kind, x = str(node.target).split(".")[1], v["input"]
    states = v["hx"] if kind == "lstm" else [v["hx"]]
    biases, layers, both, first = v["has_biases"], v["num_layers"], v["bidirectional"], v["batch_first"]
    rows = emit(recurrent, x, states, v["params"], kind, biases, layers, both, first)
    width = node.meta["val"][0].shape[2]
    shapes = [(state.shape[0], state.shape[2]) for state in node.meta["val"][1:]]
    return lambda i: _part_of_rows(emit, rows, shapes, i - 1) if i else _steps_of_rows(emit, rows, shapes, v, width)


def _part_of_rows(emit: Emitter, rows: fx.Node, shapes: list[tuple[int, int]], index: int) -> fx.Node:
    """One of the last states, which lie side by side in rows."""
    start = sum(map(math.prod, shapes[:index]))
    part = emit(aten.slice.Tensor, rows, 1, start, start + math.prod(shapes[index]))
    part = emit(aten.reshape.default, part, [emit.size(rows, 0), *shapes[index]])
    return emit(aten.transpose.int, part, 0, 1)


def _steps_of_rows(
    emit: Emitter, rows: fx.Node, shapes: list[tuple[int, int]], v: dict[str, Any], width: int
) -> fx.Node:
    """The outputs of all steps, behind the last states: their number may be open."""
    part = emit(aten.slice.Tensor, rows, 1, sum(map(math.prod, shapes)))
    steps = emit.size(v["input"], 1 if v["batch_first"] else 0)
    part = emit(aten.reshape.default, part, [emit.size(rows, 0), steps, width])
    return part if v["batch_first"] else emit(aten.transpose.int, part, 0, 1)


def _split_bag(emit: Emitter, node: fx.Node) -> Parts | None:
    """Bags of one length, which are the rows of a matrix: a look-up, and a reduction of each row, weighed or not."""
    v = arguments(node)
    offsets = v["offsets"]
    plain = v["padding_idx"] in (None, -1) and not v["include_last_offset"] and not v["scale_grad_by_freq"]
    if not plain or any(user.args[1:] != (0,) for user in node.users):
        return None
    ids, weights = _matrix_of(v["indices"]), _matrix_of(v["per_sample_weights"])
    if ids is None or v["per_sample_weights"] is not None and (weights is None or shape_of(weights) != shape_of(ids)):
        return None
    steps = arguments(offsets) if offsets.target is aten.arange.start_step else {}
    if steps.get("start") != 0 or steps.get("step") != shape_of(ids)[1] or shape_of(offsets) != shape_of(ids)[:1]:
        return None
    rows = emit(aten.embedding.default, v["weight"], ids)
    if weights is not None:
        rows = emit(aten.mul.Tensor, rows, emit(aten.unsqueeze.default, weights, 2))
    if v["mode"] == 2:
        where = emit(aten.argmax.default, rows, 1, True)
        bags = emit(aten.squeeze.dim, emit(aten.gather.default, rows, 1, where), 1)
    else:
        bags = emit((aten.sum.dim_IntList, aten.mean.dim)[v["mode"]], rows, [1])
    return lambda i: bags


def _matrix_of(flat: fx.Node | None) -> fx.Node | None:
    """The matrix that an operand has the elements of, one row after the other."""
    if flat is None or flat.target not in (aten.view.default, aten.reshape.default):
        return None
    matrix = flat.args[0]
    two = isinstance(matrix, fx.Node) and len(shape_of(matrix)) == 2 and len(shape_of(flat)) == 1
    return matrix if two else None  # type: ignore[return-value]


def _split_found(emit: Emitter, node: fx.Node) -> Parts | None:
    """Where what is looked for stands, which carries no gradient, and a look-up there, which has the same gradient."""
    v = arguments(node)
    x, dim = v["self"], v["dim"]
    if not shape_of(x):
        return None
    where = _places(emit, node.target, v)

    def part(i: int) -> fx.Node:
        value = where if i == 1 else emit(aten.gather.default, x, dim, where)
        return value if v.get("keepdim", True) else emit(aten.squeeze.dim, value, dim)

    return part


def _places(emit: Emitter, target: Any, v: dict[str, Any]) -> fx.Node:
    """Where what an operator looks for along a dim stands; a dim that it reduces stays, with size one."""
    x, dim = v["self"], v["dim"]
    if target in (aten.max.dim, aten.min.dim):
        return emit(aten.argmax.default if target is aten.max.dim else aten.argmin.default, x, dim, True)
    if target is aten.topk.default:
        return emit(operators.topk_indices, x, v["k"], dim, v["largest"], v["sorted"])
    if target is aten.sort.default:
        return emit(aten.argsort.default, x, dim, v["descending"])
    if target is aten.sort.stable:
        return emit(aten.argsort.stable, x, stable=bool(v["stable"]), dim=dim, descending=v["descending"])
    return emit(operators.indices_along, x, dim, str(target).split(".")[1], v.get("k"))


def _split_pool(emit: Emitter, node: fx.Node) -> Parts | None:
    """The largest of each window: the dims that are pooled become one, in which the places are."""
    x, dims = node.args[0], int(str(node.target).split("pool")[1][0])
    assert isinstance(x, fx.Node)
    if node.target is aten.max_pool2d_with_indices.default and all(user.args[1] == 0 for user in node.users):
        pooled = emit(aten.max_pool2d.default, *node.args)
        return lambda i: pooled
    lead = emit.sizes(x)[:-dims]
    inner, outer = shape_of(x)[-dims:], tuple(node.meta["val"][0].shape)[-dims:]
    if not all(isinstance(s, int) for s in (*inner, *outer)):
        return None
    where = emit(operators.pool_indices, x, str(node.target).split(".")[1], list(node.args[1:]))

    def part(i: int) -> fx.Node:
        if i == 1:
            return where
        flat = emit(aten.reshape.default, x, [*lead, math.prod(inner)])
        at = emit(aten.reshape.default, where, [*lead, math.prod(outer)])
        return emit(aten.reshape.default, emit(aten.gather.default, flat, -1, at), [*lead, *outer])

    return part


def _split_extrema(emit: Emitter, node: fx.Node) -> Parts | None:
    """The smallest and the largest."""
    v = arguments(node)
    dims = [v["dim"]] if v["dim"] is not None else []
    return lambda i: emit((aten.amin.default, aten.amax.default)[i], v["self"], dims, v["keepdim"])


LAYER_REWRITES: dict[Any, Rewrite] = {
    aten.lstm.input: _split_recurrent,
    aten.gru.input: _split_recurrent,
    aten.rnn_tanh.input: _split_recurrent,
    aten.rnn_relu.input: _split_recurrent,
    aten.embedding_bag.padding_idx: _split_bag,
    aten.cummax.default: _split_found,
    aten.cummin.default: _split_found,
    aten.mode.default: _split_found,
    aten.median.dim: _split_found,
    aten.nanmedian.dim: _split_found,
    aten.kthvalue.default: _split_found,
    aten.max.dim: _split_found,
    aten.min.dim: _split_found,
    aten.sort.default: _split_found,
    aten.sort.stable: _split_found,
    aten.topk.default: _split_found,
    aten.adaptive_max_pool2d.default: _split_pool,
    aten.adaptive_max_pool3d.default: _split_pool,
    aten.max_pool2d_with_indices.default: _split_pool,
    aten.aminmax.default: _split_extrema,
}
