"""Global gradient norms with one all-reduce.

Gradients are gathered into sets: those that are sharded over the same mesh axes and count in the same norms.  A set's
local sum counts every element of the gradients exactly once over the mesh: on the ranks along the axes that shard
them, and on the first of the replicas along the others.  So the sums of all sets can be added before they travel,
together with a flag for non-finite values: one row of two numbers for each norm.

With w sharded over "tp" and b replicated, on the mesh axes "dp" and "tp", one norm of both is::

    sums = local_sum([w_grad], 2.0), local_sum([b_grad], 2.0)
    shares = count_once(sums[0], ["mesh0/dp"]), count_once(sums[1], ["mesh0/dp", "mesh0/tp"])
    finish_norm(reduce_packed(pack(shares, sums, 2.0, [[0, 1]]), 2.0, "mesh0/dp+tp"), 2.0)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autoparallel.comm.groups import group_name
from autoparallel.placements import Layout
from autoparallel.runtime.norms.norm import (
    count_once,
    finish_norm,
    local_sum,
    norms_here,
    pack,
    reduce_packed,
    require_norm_type,
)


class NormProgram:
    """The norms of some gradients.

    Args:
        gradients: parameter name to its layout at rest.
        norm_type: p, positive or infinite.
        axis_names, axis_sizes, prefix: the mesh, and the name under which it is bound.
        norms: the names that each norm is of, which may overlap.
        everyone: the group to take the norms over, where ranks outside of the mesh hold other gradients; None: the
            whole mesh.
        device: where to begin from, where there are none.

    Attributes:
        sets: the names of the gradients of each set.
        replicas: for each set, the mesh axes along which its gradients are the same.
        parts: for each norm, the indices of the sets that count in it.
        group: over which sums are added; None where there is one rank, or nothing to add on any.

    Raises:
        ValueError: when ``norm_type`` is not positive.
    """

    def __init__(
        self,
        gradients: Mapping[str, Layout],
        norm_type: float,
        axis_names: Sequence[str],
        axis_sizes: Sequence[int],
        prefix: str,
        norms: Sequence[Collection[str]],
        everyone: str | None = None,
        device: str = "cpu",
    ) -> None:
        self._norm_type = require_norm_type(norm_type)
        self._alike: dict[str, Any] = {"dtype": torch.float64, "device": device}
        sets: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = {}
        for name, layout in gradients.items():
            replicas = tuple(a for a, p in enumerate(layout) if p.kind != "S" and axis_sizes[a] > 1)
            counted = tuple(i for i, names in enumerate(norms) if name in names)
            if counted:
                sets.setdefault((replicas, counted), []).append(name)
        self.sets = tuple(map(tuple, sets.values()))
        self.replicas = [[group_name(prefix, axis_names, (axis,)) for axis in replicas] for replicas, _ in sets]
        self.parts = [[k for k, (_, counted) in enumerate(sets) if i in counted] for i in range(len(norms))]
        sends = any(n > 1 for n in axis_sizes) and sets
        self.group = everyone or (group_name(prefix, axis_names, range(len(axis_names))) if sends else None)

    def __call__(self, *grads: Sequence[Tensor]) -> Tensor:
        """The norms, float64 [norms], from a list of local tensors, at least one, for each set."""
        p = self._norm_type
        sums = [local_sum(some, p) for some in grads]
        if self.group is None:
            return norms_here(sums, p, self.parts) if sums else torch.zeros(len(self.parts), **self._alike)
        if sums:
            shares = [count_once(total, groups) for total, groups in zip(sums, self.replicas, strict=True)]
            packed = pack(shares, sums, p, self.parts)
        else:
            packed = torch.zeros((2, len(self.parts)), **self._alike)
        return finish_norm(reduce_packed(packed, p, self.group), p)
