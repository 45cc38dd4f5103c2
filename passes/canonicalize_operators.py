"""Brings a captured graph into the few operators that sharding rules speak of.

Reductions whose divisor depends on the data are split, so that a mean over a sharded batch is the global mean;
operators that return several tensors become several operators; views become reshapes, because a rank's local tensor
may have other strides than the global one; randomness becomes a function of the global position.

Before:
    native_dropout = aten.native_dropout(x, 0.1, True);  getitem = native_dropout[0]
    cross_entropy_loss = aten.cross_entropy_loss(getitem, target)
After:
    dropout = autoparallel.ops.dropout(x, 0.1, 0)
    cross_entropy_sum = autoparallel.ops.cross_entropy_sum(dropout, target)
    cross_entropy_weight = autoparallel.ops.cross_entropy_weight(target, None, -100, torch.float32)
    div = aten.div(cross_entropy_sum, cross_entropy_weight)
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autoparallel import ops
from autoparallel.rules.calls import arguments, shape_of

aten = torch.ops.aten


class _Emitter:
    """Inserts calls before a node and computes their fake values; the new nodes inherit its module and line."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self.graph, self.node = graph, node

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self.graph.inserting_before(self.node):
            new = self.graph.call_function(target, args, kwargs)
        new.meta = {k: v for k, v in self.node.meta.items() if k in ("nn_module_stack", "stack_trace")}
        values, named = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        mode = next((v.fake_mode for v in _fakes((values, named))), None) or self.node.meta["mode"]
        with mode, torch.no_grad():
            new.meta["val"] = target(*values, **named)
        return new


def _fakes(values: Any) -> list[Any]:
    leaves = torch.utils._pytree.tree_leaves(values)
    return [v for v in leaves if isinstance(v, torch.Tensor) and hasattr(v, "fake_mode")]


def canonicalize_operators(module: fx.GraphModule) -> fx.GraphModule:
    """Rewrites the graph of ``module`` in place, and returns it."""
    graph = module.graph
    mode = next((v.fake_mode for n in graph.nodes for v in _fakes(n.meta.get("val"))), None)
    dropouts = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or node._erased:
            continue
        node.meta["mode"] = mode
        emit = _Emitter(graph, node)
        if node.target in _DROPOUTS:
            dropouts += _replace_dropout(emit, node, dropouts)
        elif node.target is aten.scaled_dot_product_attention.default and arguments(node)["dropout_p"]:
            _expand_attention(emit, node, dropouts)
            dropouts += 1
        elif node.target in _REWRITES:
            _REWRITES[node.target](emit, node)
        elif node.target in _SPLITS:
            _replace_split(emit, node)
    graph.eliminate_dead_code()
    _drop_dead(graph)
    return module


def _drop_dead(graph: fx.Graph) -> None:
    """Erases checks of the trace and what only they used; fx keeps them as side effects."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)


def _replace(node: fx.Node, new: fx.Node) -> None:
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def _replace_parts(node: fx.Node, part: Callable[[int], Any]) -> None:
    """Replaces ``node[i]`` by ``part(i)`` and erases the node."""
    for user in list(node.users):
        if user.target is not operator.getitem:
            raise AssertionError(f"{user} uses all results of {node} at once")
        new = part(int(user.args[1]))  # type: ignore[call-overload]
        user.replace_all_uses_with(new)
        node.graph.erase_node(user)
    node.graph.erase_node(node)


_DROPOUTS = (aten.native_dropout.default, aten.dropout.default)


def _replace_dropout(emit: _Emitter, node: fx.Node, number: int) -> int:
    x, p, train = node.args[:3]
    active = bool(train) and p != 0
    new = emit(ops.dropout, x, p, number) if active else x
    if node.target is aten.dropout.default:
        _replace(node, new)  # type: ignore[arg-type]
    else:
        _replace_parts(node, lambda i: new)
    return int(active)


def _expand_attention(emit: _Emitter, node: fx.Node, number: int) -> None:
    """Attention whose weights are dropped out, in elementary operators."""
    v = arguments(node)
    q, k, value, mask = v["query"], v["key"], v["value"], v["attn_mask"]
    if v["enable_gqa"]:
        k, value = (_repeat_heads(emit, t, shape_of(q)[-3]) for t in (k, value))
    scale = v["scale"] if v["scale"] is not None else 1.0 / math.sqrt(shape_of(q)[-1])
    scores = emit(aten.matmul.default, emit(aten.mul.Tensor, q, scale), emit(aten.transpose.int, k, -2, -1))
    if v["is_causal"]:
        rows, columns = shape_of(q)[-2], shape_of(k)[-2]
        ones = emit(aten.ones.default, [rows, columns], dtype=torch.bool, device=torch.device("cpu"))
        mask = emit(aten.tril.default, ones)
    if mask is not None and mask.meta["val"].dtype == torch.bool:
        scores = emit(aten.masked_fill.Scalar, scores, emit(aten.logical_not.default, mask), float("-inf"))
    elif mask is not None:
        scores = emit(aten.add.Tensor, scores, mask)
    weights = emit(ops.dropout, emit(aten._safe_softmax.default, scores, -1), v["dropout_p"], number)
    _replace(node, emit(aten.matmul.default, weights, value))


def _repeat_heads(emit: _Emitter, x: fx.Node, heads: int) -> fx.Node:
    shape = shape_of(x)
    ratio = heads // shape[-3]
    if ratio == 1:
        return x
    sizes: list[Any] = [_size(emit, x, d) for d in range(len(shape))]
    wide = emit(aten.unsqueeze.default, x, len(shape) - 2)
    wide = emit(aten.expand.default, wide, [*sizes[:-2], ratio, *sizes[-2:]])
    return emit(aten.reshape.default, wide, [*sizes[:-3], heads, *sizes[-2:]])


def _size(emit: _Emitter, x: fx.Node, dim: int) -> Any:
    size = shape_of(x)[dim]
    return size if isinstance(size, int) else emit(aten.sym_size.int, x, dim)


def _count(emit: _Emitter, x: fx.Node, dims: list[int]) -> Any:
    """The number of elements over some dims, as a node where a size is symbolic."""
    total: Any = 1
    for dim in dims:
        size = _size(emit, x, dim)
        if isinstance(size, int) and isinstance(total, int):
            total = total * size
        else:
            total = emit(operator.mul, total, size)
    return total


def _replace_cross_entropy(emit: _Emitter, node: fx.Node) -> None:
    v = arguments(node)
    x, target, weight = v["self"], v["target"], v["weight"]
    if v["reduction"] == 0 or target.meta["val"].is_floating_point():
        return
    new = emit(ops.cross_entropy_sum, x, target, weight, v["ignore_index"], v["label_smoothing"])
    if v["reduction"] == 1:
        divisor = emit(ops.cross_entropy_weight, target, weight, v["ignore_index"], x.meta["val"].dtype)
        new = emit(aten.div.Tensor, new, divisor)
    _replace(node, new)


def _normalize(emit: _Emitter, x: fx.Node, mean: Any, inverse: Any, weight: Any, bias: Any) -> fx.Node:
    y = emit(aten.mul.Tensor, emit(aten.sub.Tensor, x, mean), inverse)
    if weight is not None:
        y = emit(aten.mul.Tensor, y, _channels(emit, weight, x))
    return emit(aten.add.Tensor, y, _channels(emit, bias, x)) if bias is not None else y


def _channels(emit: _Emitter, x: fx.Node, like: fx.Node) -> fx.Node:
    """A [C] tensor as [1, C, 1, ...] to broadcast over ``like``."""
    out = emit(aten.unsqueeze.default, x, 0)
    for _ in range(len(shape_of(like)) - 2):
        out = emit(aten.unsqueeze.default, out, -1)
    return out


def _replace_batch_norm(emit: _Emitter, node: fx.Node) -> None:
    """Batch norm with the statistics of the global batch (Ioffe and Szegedy 2015), mean and then variance."""
    x, weight, bias, running_mean, running_var, training, momentum, eps = node.args
    assert isinstance(x, fx.Node)
    dims = [d for d in range(len(shape_of(x))) if d != 1]
    if not training:
        _replace_parts(node, lambda i: _frozen_norm(emit, x, weight, bias, running_mean, running_var, eps))
        return
    mean = emit(aten.mean.dim, x, dims, True)
    centred = emit(aten.sub.Tensor, x, mean)
    variance = emit(aten.mean.dim, emit(aten.mul.Tensor, centred, centred), dims, True)
    inverse = emit(aten.rsqrt.default, emit(aten.add.Tensor, variance, eps))
    y = emit(aten.mul.Tensor, centred, inverse)
    if weight is not None:
        y = emit(aten.mul.Tensor, y, _channels(emit, weight, x))  # type: ignore[arg-type]
    if bias is not None:
        y = emit(aten.add.Tensor, y, _channels(emit, bias, x))  # type: ignore[arg-type]
    cache: dict[int, fx.Node] = {0: y}

    def part(i: int) -> fx.Node:
        if i not in cache:
            statistic, running = (mean, running_mean) if i == 3 else (variance, running_var)
            value = emit(aten.squeeze.dims, emit(aten.detach.default, statistic), dims)
            if i == 4:
                count = _count(emit, x, dims)
                value = emit(aten.mul.Tensor, value, _ratio(emit, count))
            kept = emit(aten.mul.Tensor, running, 1 - momentum)  # type: ignore[operator]
            cache[i] = emit(aten.add.Tensor, kept, emit(aten.mul.Tensor, value, momentum))
        return cache[i]

    _replace_parts(node, part)


def _ratio(emit: _Emitter, count: Any) -> Any:
    """n / (n - 1), which turns the biased variance into the unbiased one."""
    if isinstance(count, int):
        return count / (count - 1)
    return emit(operator.truediv, count, emit(operator.sub, count, 1))


def _frozen_norm(
    emit: _Emitter, x: fx.Node, weight: Any, bias: Any, running_mean: Any, running_var: Any, eps: Any
) -> fx.Node:
    mean = _channels(emit, running_mean, x)
    inverse = emit(aten.rsqrt.default, emit(aten.add.Tensor, _channels(emit, running_var, x), eps))
    return _normalize(emit, x, mean, inverse, weight, bias)


def _replace_frozen_batch_norm(emit: _Emitter, node: fx.Node) -> None:
    x, weight, bias, running_mean, running_var, _, eps = node.args
    y = _frozen_norm(emit, x, weight, bias, running_mean, running_var, eps)  # type: ignore[arg-type]
    _replace_parts(node, lambda i: y)


def _replace_whole_batch_norm(emit: _Emitter, node: fx.Node) -> None:
    v = arguments(node)
    if v["training"]:
        return  # without running statistics to update; handled as an operator without a rule
    _replace(
        node,
        _frozen_norm(emit, v["input"], v["weight"], v["bias"], v["running_mean"], v["running_var"], v["eps"]),
    )


def _replace_view(emit: _Emitter, node: fx.Node) -> None:
    _replace(node, emit(aten.reshape.default, node.args[0], node.args[1]))


def _drop_full_slice(emit: _Emitter, node: fx.Node) -> None:
    v = arguments(node)
    size = shape_of(v["self"])[v["dim"]]
    whole = v["end"] is None or (isinstance(v["end"], int) and v["end"] >= (size if isinstance(size, int) else 2**62))
    if v["start"] in (None, 0) and v["step"] == 1 and whole:
        _replace(node, v["self"])


_SPLITS = (
    aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int, aten.split.sizes
)  # fmt: skip


def _replace_split(emit: _Emitter, node: fx.Node) -> None:
    v = arguments(node)
    x, dim = v["self"], v["dim"]
    if any(user.target is not operator.getitem for user in node.users):
        return
    if node.target is aten.unbind.int:
        _replace_parts(node, lambda i: emit(aten.select.int, x, dim, i))
        return
    sizes = [part.shape[dim] for part in node.meta["val"]]
    if not all(isinstance(s, int) for s in sizes):
        return
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    _replace_parts(node, lambda i: emit(aten.slice.Tensor, x, dim, starts[i], starts[i] + sizes[i]))


_REWRITES: dict[Any, Callable[[_Emitter, fx.Node], None]] = {
    aten.cross_entropy_loss.default: _replace_cross_entropy,
    aten._native_batch_norm_legit_functional.default: _replace_batch_norm,
    aten._native_batch_norm_legit_no_training.default: _replace_frozen_batch_norm,
    aten.batch_norm.default: _replace_whole_batch_norm,
    aten.view.default: _replace_view,
    aten._unsafe_view.default: _replace_view,
    aten.slice.Tensor: _drop_full_slice,
}
