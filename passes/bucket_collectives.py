"""Groups parameters whose chains do the same, so that one collective serves many of them.

A bucket gathers its parameters with one collective and reduces their gradients with one.  The buckets of parameters
that are gathered per use become calls in the body, right before the first use of any of their parameters; those of
the others are run before the body, which takes their results as inputs.

Before (w1 and w2 are gathered per use):
    w1 = placeholder; w2 = placeholder
    linear = aten.linear(x, w1);  linear_1 = aten.linear(linear, w2)
After:
    unshard_0 = self.unshard_0();  getitem = unshard_0[0];  getitem_1 = unshard_0[1]
    linear = aten.linear(x, getitem);  linear_1 = aten.linear(linear, getitem_1)
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx, nn

from autoparallel.graph.layers import layer_of
from autoparallel.passes.emitter import replace_node
from autoparallel.passes.hoist_parameter_chains import ParameterChain
from autoparallel.placements.redistribution import BUCKET_BYTES, Step


@dataclass(frozen=True)
class Bucket:
    """Parameters that are gathered, and whose gradients are reduced, together.

    Attributes:
        number: its place in the order of first uses.
        chains: the parameters, alike in steps (for every way of reducing), dtype and trainability.
        gather: ``"per_use"`` in the body, before its first use, and again in the backward; ``"per_microbatch"`` before
            the body; ``"per_step"`` before the body of a step's first microbatch; empty where nothing is gathered.
    """

    number: int
    chains: tuple[ParameterChain, ...]
    gather: str

    @property
    def name(self) -> str:
        return f"unshard_{self.number}"

    @property
    def per_use(self) -> bool:
        return self.gather == "per_use"


@dataclass(frozen=True)
class Buckets:
    """All buckets, in the order of their first uses."""

    buckets: tuple[Bucket, ...]


_SILENT_BYTES = 16 * BUCKET_BYTES
"""The size of a bucket that sends nothing: it keeps gradients until it is complete, but each takes time of the host."""


class Unattached(nn.Module):
    """Stands for a bucket that is gathered in the body until the runtime puts the parameters themselves there."""


def _kind(chain: ParameterChain, gather: str) -> Hashable:
    def forms(steps: Sequence[Step]) -> Hashable:
        return tuple(step.form for step in steps)

    paths = tuple(map(forms, chain.paths))
    dtypes = chain.dtype, chain.rest_dtype, chain.reduce_dtype
    # A bucket is reduced at one time, whichever is chosen in the end: so its chains are alike in every way of reducing.
    ways = tuple((when, forms(each), forms(sync)) for when, (each, sync) in chain.ways.items())
    return gather, chain.trainable, dtypes, paths, forms(chain.each), forms(chain.sync), ways


def _sharded_axes(chain: ParameterChain) -> tuple[bool, ...]:
    """Parameters that are sharded over the same axes lie side by side, so that one kernel serves their norm."""
    return tuple(p.kind != "S" for p in chain.at_rest)


def _is_silent(chain: ParameterChain) -> bool:
    """Whether a parameter is used as it lies, and its gradient, too: nothing is sent that could run beside others."""
    ways = itertools.chain.from_iterable(chain.ways.values())
    return not chain.gathered and not any(map(any, (*chain.paths, *ways)))


def _bytes(chain: ParameterChain) -> int:
    return chain.dtype.itemsize * math.prod(chain.shape)


def bucket_collectives(
    module: fx.GraphModule,
    chains: Sequence[ParameterChain],
    gather: Mapping[str, str],
    *,
    layers: Collection[str] = (),
    bucket_bytes: int = BUCKET_BYTES,
) -> Buckets:
    """Rewrites ``module`` in place and returns the buckets.

    Args:
        chains: in the order of first uses.
        gather: parameter name to when it is gathered, as ``plan.ParameterPlan`` says.
        layers: those that will run again in the backward: they share no bucket that is gathered per use.
        bucket_bytes: the size of a bucket's whole parameters at which a new one is begun.
    """

    def when(chain: ParameterChain) -> str:
        return gather.get(chain.name, "per_microbatch") if chain.gathered else ""

    placeholders = {node.name: node for node in module.graph.find_nodes(op="placeholder")}

    def layer(chain: ParameterChain) -> str | None:
        readers = {layer_of(user) for name in chain.placeholders for user in placeholders[name].users}
        return readers.pop() if len(readers) == 1 and readers <= {*layers} and when(chain) == "per_use" else None

    groups: list[list[ParameterChain]] = []
    open_groups: dict[Hashable, tuple[list[ParameterChain], int]] = {}
    for chain in chains:
        kind = _kind(chain, when(chain)), layer(chain)
        members, size = open_groups.get(kind, ([], 0))
        if members and size + _bytes(chain) > (_SILENT_BYTES if _is_silent(chain) else bucket_bytes):
            members, size = [], 0
        if not members:
            groups.append(members)
        members.append(chain)
        open_groups[kind] = (members, size + _bytes(chain))
    buckets = [Bucket(i, tuple(sorted(m, key=_sharded_axes)), when(m[0])) for i, m in enumerate(groups)]
    for bucket in buckets:
        if bucket.per_use:
            module.add_submodule(bucket.name, Unattached())
            _call_in_body(
                module.graph, bucket, [placeholders[n] for chain in bucket.chains for n in chain.placeholders]
            )
    return Buckets(tuple(buckets))


def _call_in_body(graph: fx.Graph, bucket: Bucket, uses: Sequence[fx.Node]) -> None:
    first = min(user for use in uses for user in use.users)
    with graph.inserting_before(first):
        call = graph.create_node("call_module", bucket.name, (), {})
        call.meta["bucket"] = bucket.number
        for i, use in enumerate(uses):
            item = graph.call_function(operator.getitem, (call, i))
            item.meta = {**use.meta, "bucket": bucket.number}
            replace_node(use, item)
