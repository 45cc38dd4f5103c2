"""Builds the program that computes global gradient norms with one all-reduce.

Gradients are gathered into sets: those that are sharded over the same mesh axes and count in the same norms.  A set's
local sum counts every element of the gradients exactly once over the mesh: on the ranks along the axes that shard
them, and on the first of the replicas along the others.  So the sums of all sets can be added before they travel,
together with a flag for non-finite values: one row of two numbers for each norm.

Before (w is sharded over "tp", b is replicated; mesh axes "dp" and "tp"; one norm of both):
    w_grad; b_grad
After:
    grads_0 = placeholder: [w_grad];  grads_1 = placeholder: [b_grad]
    local_sum = norm.local_sum(grads_0, 2.0);    count_once = norm.count_once(local_sum, ['mesh0/dp'])
    local_sum_1 = norm.local_sum(grads_1, 2.0);  count_once_1 = norm.count_once(local_sum_1, ['mesh0/dp', 'mesh0/tp'])
    pack = norm.pack([count_once, count_once_1], [local_sum, local_sum_1], 2.0, [[0, 1]])
    reduce_packed = norm.reduce_packed(pack, 2.0, 'mesh0/dp+tp')
    finish_norm = norm.finish_norm(reduce_packed, 2.0)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn

from autoparallel.comm.groups import group_name
from autoparallel.placements import Layout
from autoparallel.runtime import norm


@dataclass(frozen=True)
class NormProgram:
    """The norms of some gradients as a graph of their local tensors.

    Attributes:
        module: takes one list of local tensors for each set, returns the norms, float64 [norms].
        sets: the names of the gradients of each set, in the order of the graph's inputs.
    """

    module: fx.GraphModule
    sets: tuple[tuple[str, ...], ...]


def reduce_gradient_norm(
    gradients: Mapping[str, Layout],
    norm_type: float,
    axis_names: Sequence[str],
    axis_sizes: Sequence[int],
    prefix: str,
    norms: Sequence[Collection[str]] | None = None,
    everyone: str | None = None,
    device: str = "cpu",
) -> NormProgram:
    """The program for some gradients.

    Args:
        gradients: parameter name to its layout at rest; at least one.
        norm_type: p, positive or infinite.
        axis_names, axis_sizes, prefix: the mesh, and the name under which it is bound.
        norms: the names that each norm is of, which may overlap; None: one norm of all.
        everyone: the group to take the norms over, where ranks outside of the mesh hold other gradients; any number
            of gradients then, also none. None: the whole mesh.
        device: where to begin from, where there are none.

    Raises:
        ValueError: when ``norm_type`` is not positive, or when no norm has any gradient.
    """
    norm_type = norm.require_norm_type(norm_type)
    wanted = [frozenset(gradients)] if norms is None else [frozenset(names) for names in norms]
    sets: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = {}
    for name, layout in gradients.items():
        replicas = tuple(a for a, p in enumerate(layout) if p.kind != "S" and axis_sizes[a] > 1)
        counted = tuple(i for i, names in enumerate(wanted) if name in names)
        if counted:
            sets.setdefault((replicas, counted), []).append(name)
    if not sets and everyone is None:
        raise ValueError("none of the gradients counts in any of the norms")
    graph = fx.Graph()
    inputs = [graph.placeholder(f"grads_{i}") for i in range(len(sets))]
    sums = [graph.call_function(norm.local_sum, (grads, norm_type)) for grads in inputs]
    shares = [
        graph.call_function(norm.count_once, (total, [group_name(prefix, axis_names, (a,)) for a in replicas]))
        for total, (replicas, _) in zip(sums, sets, strict=True)
    ]
    parts = [[k for k, (_, counted) in enumerate(sets) if i in counted] for i in range(len(wanted))]
    if sets:
        packed = graph.call_function(norm.pack, (shares, sums, norm_type, parts))
    else:
        packed = graph.call_function(torch.zeros, (2, len(wanted)), {"dtype": torch.float64, "device": device})
    if everyone is not None or any(n > 1 for n in axis_sizes):
        every = everyone or group_name(prefix, axis_names, range(len(axis_names)))
        packed = graph.call_function(norm.reduce_packed, (packed, norm_type, every))
    graph.output(graph.call_function(norm.finish_norm, (packed, norm_type)))
    return NormProgram(fx.GraphModule(nn.Module(), graph), tuple(map(tuple, sets.values())))
