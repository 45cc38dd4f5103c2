"""Builds the program that computes the global gradient norm with one all-reduce.

Parameters are grouped by the set of mesh axes that shard them; each group's local sum counts every element of the
gradient exactly once over the mesh: on the ranks along the axes that shard it, and on the first of the replicas along
the others.  So all groups' sums can be added before they travel, together with a flag for non-finite values.

Before (w is sharded over "tp", b is replicated; mesh axes "dp" and "tp"):
    w_grad = placeholder; b_grad = placeholder
After:
    local_sum = norm.local_sum([w_grad], 2.0);    count_once = norm.count_once(local_sum, ['mesh0/dp'])
    local_sum_1 = norm.local_sum([b_grad], 2.0);  count_once_1 = norm.count_once(local_sum_1, ['mesh0/dp', 'mesh0/tp'])
    pack = norm.pack([count_once, count_once_1], [local_sum, local_sum_1], 2.0)
    reduce_packed = norm.reduce_packed(pack, 2.0, 'mesh0/dp+tp')
    finish_norm = norm.finish_norm(reduce_packed, 2.0)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import fx, nn

from autoparallel.passes.insert_collectives import group_name
from autoparallel.placements import Layout
from autoparallel.runtime import norm


def reduce_gradient_norm(
    gradients: Mapping[str, Layout], norm_type: float, axis_names: Sequence[str], axis_sizes: Sequence[int], prefix: str
) -> fx.GraphModule:
    """The norm of some gradients as a graph of their local tensors.

    Args:
        gradients: parameter name to its layout at rest, in the order of the graph's inputs.
        norm_type: p, positive or infinite.
        axis_names, axis_sizes, prefix: the mesh, and the name under which it is bound.

    Raises:
        ValueError: when ``norm_type`` is not positive.
    """
    if math.isnan(norm_type) or norm_type <= 0:
        raise ValueError(f"norm_type must be positive or inf, got {norm_type}")
    graph = fx.Graph()
    groups: dict[tuple[int, ...], list[fx.Node]] = {}
    for i, layout in enumerate(gradients.values()):
        replicas = tuple(a for a, p in enumerate(layout) if p.kind != "S" and axis_sizes[a] > 1)
        groups.setdefault(replicas, []).append(graph.placeholder(f"grad_{i}"))
    sums = [graph.call_function(norm.local_sum, (members, norm_type)) for members in groups.values()]
    counted = [
        graph.call_function(norm.count_once, (total, [group_name(prefix, axis_names, (a,)) for a in replicas]))
        for total, replicas in zip(sums, groups, strict=True)
    ]
    packed = graph.call_function(norm.pack, (counted, sums, norm_type))
    active = [a for a, n in enumerate(axis_sizes) if n > 1]
    if active:
        every = group_name(prefix, axis_names, range(len(axis_names)))
        packed = graph.call_function(norm.reduce_packed, (packed, norm_type, every))
    graph.output(graph.call_function(norm.finish_norm, (packed, norm_type)))
    return fx.GraphModule(nn.Module(), graph)
