"""Brings a captured graph into the few operators that sharding rules speak of.

Reductions whose divisor depends on the data are split, so that a mean over a sharded batch is the global mean;
operators that return several tensors become several operators; views become reshapes, because a rank's local tensor
may have other strides than the global one.

Before:
    view = aten.view(x, [-1, 10])
    cross_entropy_loss = aten.cross_entropy_loss(view, target)
After:
    reshape = aten.reshape(x, [-1, 10])
    cross_entropy_sum = autoparallel.operators.cross_entropy_sum(reshape, target)
    cross_entropy_weight = autoparallel.operators.cross_entropy_weight(target, None, -100, torch.float32)
    div = aten.div(cross_entropy_sum, cross_entropy_weight)
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import fx

from autoparallel import operators
from autoparallel.operators.draws import traced_dropout
from autoparallel.passes.canonicalize_layers import LAYER_REWRITES
from autoparallel.passes.emitter import Emitter, Rewrite, rewrite_calls
from autoparallel.passes.settle_memory import MEMORY_REWRITES
from autoparallel.passes.ungroup_experts import ungroup_experts
from autoparallel.rules.calls import COPIES, arguments, shape_of
from autoparallel.rules.shapes import expression, order_of

aten = torch.ops.aten

BATCH_STATISTIC = "batch_statistic"
"""Marks, in a node's ``meta``, what batch norm takes over the batch."""


def canonicalize_operators(module: fx.GraphModule) -> None:
    """Rewrites the graph of ``module`` in place."""
    graph = module.graph
    rewrite_calls(graph, _REWRITES)
    _drop_dead(graph)
    if ungroup_experts(module):
        _drop_dead(graph)


def _drop_dead(graph: fx.Graph) -> None:
    """Erases what is not used, and checks of the trace with what only they used; fx keeps them as side effects."""
    graph.eliminate_dead_code()
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)


def _count(emit: Emitter, x: fx.Node, dims: list[int]) -> Any:
    """The number of elements over some dims, as a node where a size is symbolic."""
    return functools.reduce(lambda total, dim: _times(emit, total, emit.size(x, dim)), dims, 1)


def _times(emit: Emitter, a: Any, b: Any) -> Any:
    return a * b if isinstance(a, int) and isinstance(b, int) else emit(operator.mul, a, b)


def _cross_entropy(emit: Emitter, node: fx.Node) -> Any:
    v = arguments(node)
    x, target, weight = v["self"], v["target"], v["weight"]
    if v["reduction"] == 0 or target.meta["val"].is_floating_point():
        return None
    original = x
    x, target = _rows_of(emit, x, target)
    total = emit(operators.cross_entropy_sum, x, target, weight, v["ignore_index"], v["label_smoothing"])
    if v["reduction"] == 1:
        total = emit(aten.div.Tensor, total, _valid_weight(emit, total, target, weight, v["ignore_index"]))
    return _as(emit, total, original)  # half precision is summed in float32


def _rows_of(emit: Emitter, x: fx.Node, target: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Logits [..., C] and targets [...] of those that torch takes, [N, C, ...] and [N, ...].

    Rows that were flattened for the loss stay in their dims: flattened ones could be cut along the first of these only.
    """
    rank = len(shape_of(x))
    if rank < 2:
        return x, target
    if rank > 2:
        order = [0, *range(2, rank), 1]
        if x.target in (aten.transpose.int, aten.permute.default) and [order_of(x)[d] for d in order] == [*range(rank)]:
            return cast(fx.Node, x.args[0]), target
        return emit(aten.permute.default, x, order), target
    (rows, *casts), (classes, *_) = _before_reshape(x), _before_reshape(target)
    shapes = [[expression(size) for size in shape_of(node)] for node in (rows, classes, x)]
    if len(shapes[1]) < 2 or shapes[0] != [*shapes[1], shapes[2][-1]]:
        return x, target
    return functools.reduce(partial(_as, emit), casts, rows), _as(emit, classes, target)


def _before_reshape(node: fx.Node) -> list[fx.Node]:
    """What a reshape reads whose result is at most copied after it, and these copies, each of which may round; the node
    itself where there is none."""
    source, copies = node, []
    while source.target in COPIES:
        copies.append(source)
        source = cast(fx.Node, source.args[0])
    return [cast(fx.Node, source.args[0]), *reversed(copies)] if source.target is aten.reshape.default else [node]


def _nll_loss(emit: Emitter, node: fx.Node) -> Any:
    v = arguments(node)
    if v["reduction"] != 1:
        return None
    total = emit(aten.nll_loss_nd.default, v["self"], v["target"], v["weight"], 2, v["ignore_index"])
    return emit(aten.div.Tensor, total, _valid_weight(emit, total, v["target"], v["weight"], v["ignore_index"]))


def _valid_weight(emit: Emitter, total: fx.Node, target: fx.Node, weight: Any, ignore_index: int) -> fx.Node:
    return emit(operators.cross_entropy_weight, target, weight, ignore_index, total.meta["val"].dtype)


def _scale(emit: Emitter, centred: fx.Node, inverse: fx.Node, weight: Any, bias: Any, original: fx.Node) -> fx.Node:
    """The result of a batch norm, in the dtype of what it was given.

    What is centred is multiplied once, by all that its channel is multiplied with: the backward finds one tensor of its
    size, as that of torch's own batch norm does.
    """
    scale = inverse if weight is None else emit(aten.mul.Tensor, inverse, _channels(emit, weight, original))
    y = emit(aten.mul.Tensor, centred, scale)
    if bias is not None:
        y = emit(aten.add.Tensor, y, _channels(emit, bias, original))
    return _as(emit, y, original)


def _channels(emit: Emitter, x: fx.Node, like: fx.Node) -> fx.Node:
    """A [C] tensor as [1, C, 1, ...] to broadcast over ``like``."""
    out = emit(aten.unsqueeze.default, x, 0)
    for _ in range(len(shape_of(like)) - 2):
        out = emit(aten.unsqueeze.default, out, -1)
    return out


def _functional_batch_norm(emit: Emitter, node: fx.Node) -> Any:
    x, weight, bias, running_mean, running_var, training, momentum, eps = node.args
    assert isinstance(x, fx.Node)
    if not training:
        frozen = _frozen_norm(emit, x, weight, bias, running_mean, running_var, eps)
        return {0: frozen, 3: running_mean, 4: running_var}.__getitem__
    y, mean, variance, dims = _batch_statistics_norm(emit, x, weight, bias, eps)
    parts: dict[int, fx.Node] = {0: y}

    def part(i: int) -> fx.Node:
        if i not in parts:
            statistic, running = (mean, running_mean) if i == 3 else (variance, running_var)
            value = emit(aten.squeeze.dims, emit(aten.detach.default, statistic), dims)
            if i == 4:
                count = _count(emit, x, dims)
                value = emit(aten.mul.Tensor, value, _ratio(emit, count))
            decayed = emit(aten.mul.Tensor, running, 1 - momentum)  # type: ignore[operator]
            parts[i] = emit(aten.add.Tensor, decayed, emit(aten.mul.Tensor, value, momentum))
        return parts[i]

    return part


def _batch_statistics_norm(
    emit: Emitter, x: fx.Node, weight: Any, bias: Any, eps: Any
) -> tuple[fx.Node, fx.Node, fx.Node, list[int]]:
    """Batch norm with the statistics of the global batch (Ioffe and Szegedy 2015), mean and then variance: the result,
    both statistics, and the dims they are taken over."""
    dims = [d for d in range(len(shape_of(x))) if d != 1]
    original, x = x, _in_float32(emit, x)
    mean = emit(aten.mean.dim, x, dims, True)
    centred = emit(aten.sub.Tensor, x, mean)
    variance = emit(aten.mean.dim, emit(aten.mul.Tensor, centred, centred), dims, True)
    mean.meta[BATCH_STATISTIC] = variance.meta[BATCH_STATISTIC] = True
    inverse = emit(aten.rsqrt.default, emit(aten.add.Tensor, variance, eps))
    return _scale(emit, centred, inverse, weight, bias, original), mean, variance, dims


def _in_float32(emit: Emitter, x: fx.Node) -> fx.Node:
    """What is normalised, in the precision in which torch does so; weights may have another dtype than it."""
    half = x.meta["val"].dtype in (torch.bfloat16, torch.float16)
    return emit(aten._to_copy.default, x, dtype=torch.float32) if half else x


def _as(emit: Emitter, y: fx.Node, x: fx.Node) -> fx.Node:
    return emit.cast(y, emit.value(x).dtype)


def _batch_norm_without_statistics(emit: Emitter, node: fx.Node) -> Any:
    x, weight, bias, _, _, eps = node.args
    y = _batch_statistics_norm(emit, x, weight, bias, eps)[0]  # type: ignore[arg-type]
    return lambda i: y


def _ratio(emit: Emitter, count: Any) -> Any:
    """n / (n - 1), which turns the biased variance into the unbiased one."""
    if isinstance(count, int):
        return count / (count - 1)
    return emit(operator.truediv, count, emit(operator.sub, count, 1))


def _frozen_norm(
    emit: Emitter, x: fx.Node, weight: Any, bias: Any, running_mean: Any, running_var: Any, eps: Any
) -> fx.Node:
    original, x = x, _in_float32(emit, x)
    mean = _channels(emit, running_mean, x)
    inverse = emit(aten.rsqrt.default, emit(aten.add.Tensor, _channels(emit, running_var, x), eps))
    return _scale(emit, emit(aten.sub.Tensor, x, mean), inverse, weight, bias, original)


def _frozen_batch_norm(emit: Emitter, node: fx.Node) -> Any:
    x, weight, bias, running_mean, running_var, _, eps = node.args
    y = _frozen_norm(emit, x, weight, bias, running_mean, running_var, eps)  # type: ignore[arg-type]
    return lambda i: y


def _is_whole(node: fx.Node) -> bool:
    """Whether a slice is all of its dim."""
    v = arguments(node)
    size = shape_of(v["self"])[v["dim"]]
    whole = v["end"] is None or (isinstance(v["end"], int) and v["end"] >= (size if isinstance(size, int) else 2**62))
    return v["start"] in (None, 0) and v["step"] == 1 and whole


def _full_slice(emit: Emitter, node: fx.Node) -> Any:
    return node.args[0] if _is_whole(node) else None


def _scatter(emit: Emitter, node: fx.Node) -> Any:
    """What is written over all of a tensor takes its place; what is written into complex numbers, which torch does not
    differentiate, is written into their pairs."""
    v = arguments(node)
    same = v["src"].meta["val"].dtype == node.meta["val"].dtype
    if node.target is aten.slice_scatter.default and same and _is_whole(node):
        return v["src"]
    if not node.meta["val"].is_complex():
        return None
    x, source = (emit(aten.view_as_real.default, v[name]) for name in ("self", "src"))
    pairs = emit(node.target, x, source, v["dim"] % len(shape_of(node)), *node.args[3:], **node.kwargs)
    return emit(aten.view_as_complex.default, pairs)


def _repeat(emit: Emitter, node: fx.Node) -> fx.Node:
    """A tensor with its dims repeated as a whole, as a view."""
    x, repeats = cast(tuple[fx.Node, Sequence[Any]], node.args)
    shape = (1,) * (len(repeats) - len(shape_of(x))) + shape_of(x)
    sizes = emit.sizes(x)
    sizes = [1] * (len(shape) - len(sizes)) + sizes
    split, wide, result = [], [], []
    for size, length, count in zip(sizes, shape, repeats, strict=True):
        if _is_one(count):
            parts = [size], [size]
        elif isinstance(length, int) and length == 1:
            parts = [1], [count]
        else:
            parts = [1, size], [count, size]
        split += parts[0]
        wide += parts[1]
        result.append(parts[1][0] if len(parts[1]) == 1 else _times(emit, size, count))
    out = emit(aten.reshape.default, x, split) if len(split) != len(shape_of(x)) else x
    out = emit(aten.expand.default, out, wide)
    return emit(aten.reshape.default, out, result) if len(result) != len(wide) else out


def _is_one(count: Any) -> bool:
    """Whether something is repeated once; by the quotient of two equal sizes, as those of two inputs' batches, it is:
    the trace takes for granted from then on that they are equal."""
    if not isinstance(count, fx.Node):
        return bool(count == 1)
    sizes = [x.meta["val"] if isinstance(x, fx.Node) else x for x in count.args]
    return count.target is operator.floordiv and bool(sizes[0] == sizes[1])


_FILLS: dict[Any, float | None] = {
    aten.new_zeros.default: 0, aten.new_ones.default: 1, aten.new_empty.default: 0, aten.new_full.default: None
}  # fmt: skip


def _new(emit: Emitter, node: fx.Node) -> Any:
    """A new constant needs nothing of the tensor that it is made after."""
    v = arguments(node)
    value = _FILLS[node.target] if _FILLS[node.target] is not None else v["fill_value"]
    dtype = node.meta["val"].dtype
    return emit(aten.full.default, v["size"], value, dtype=dtype, device=node.meta["val"].device)


def _sparse_embedding(emit: Emitter, node: fx.Node) -> Any:
    """Gradients of parameters are dense: they are sharded, and have the same numbers."""
    v = arguments(node)
    args = (v["weight"], v["indices"], v["padding_idx"], v["scale_grad_by_freq"])
    return emit(aten.embedding.default, *args) if v["sparse"] else None


def _sparse_embedding_bag(emit: Emitter, node: fx.Node) -> Any:
    """As :func:`_sparse_embedding`; the call stays one, of which several results may be read."""
    if arguments(node)["sparse"]:
        weight, indices, offsets, scales, mode, _, *others = node.args
        node.args = (weight, indices, offsets, scales, mode, False, *others)


def _variance_and_mean(emit: Emitter, node: fx.Node) -> Any:
    v = arguments(node)
    dims, keepdim = v["dim"], v["keepdim"]
    dims = dims or list(range(len(shape_of(v["self"]))))
    correction = 1 if v["correction"] is None else v["correction"]

    def part(i: int) -> fx.Node:
        if i == 1:
            return emit(aten.mean.dim, v["self"], dims, keepdim)
        spread = aten.std.correction if node.target is aten.std_mean.correction else aten.var.correction
        return emit(spread, v["self"], dims, correction=correction, keepdim=keepdim)

    return part


def _split(emit: Emitter, node: fx.Node) -> Any:
    v = arguments(node)
    x, dim = v["self"], v["dim"]
    if node.target is aten.unbind.int:
        return lambda i: emit(aten.select.int, x, dim, i)
    sizes = [part.shape[dim] for part in node.meta["val"]]
    if not all(isinstance(s, int) for s in sizes):
        return None
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return lambda i: emit(aten.slice.Tensor, x, dim, starts[i], starts[i] + sizes[i])


CLASS_LOSSES: dict[Any, Rewrite] = {
    aten.cross_entropy_loss.default: _cross_entropy,
    aten.nll_loss_nd.default: _nll_loss,
}
"""Losses of classes whose mean is a quotient: the sum, and the weight of the targets that are valid."""

_REWRITES: dict[Any, Rewrite] = {
    **MEMORY_REWRITES,
    **LAYER_REWRITES,
    **dict.fromkeys(_FILLS, _new),
    **dict.fromkeys(
        (aten._unsafe_view.default, aten.view.default), lambda emit, node: emit(aten.reshape.default, *node.args)
    ),
    **dict.fromkeys((aten.select_scatter.default, aten.slice_scatter.default), _scatter),
    **dict.fromkeys((aten.std_mean.correction, aten.var_mean.correction), _variance_and_mean),
    **dict.fromkeys(
        (aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.unsafe_split.Tensor), _split
    ),
    aten._native_batch_norm_legit.no_stats: _batch_norm_without_statistics,
    aten._native_batch_norm_legit_functional.default: _functional_batch_norm,
    aten._native_batch_norm_legit_no_training.default: _frozen_batch_norm,
    **CLASS_LOSSES,
    # Dropout that drops nothing; what drops something was replaced before.
    aten.native_dropout.default: lambda emit, node: lambda i: node.args[0],
    aten.embedding.default: _sparse_embedding,
    **dict.fromkeys((aten.embedding_bag.default, aten.embedding_bag.padding_idx), _sparse_embedding_bag),
    aten.empty_like.default: lambda emit, node: emit(
        aten.zeros_like.default, node.args[0], dtype=node.meta["val"].dtype
    ),
    aten.repeat.default: _repeat,
    aten.slice.Tensor: _full_slice,
    traced_dropout: lambda emit, node: emit(operators.dropout, *node.args),
}
