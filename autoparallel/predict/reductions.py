"""When gradients are reduced, where a step is several microbatches.

Adding up full-size summands costs memory and one reduction a step; reducing every microbatch's gradient costs a
reduction each time and no memory beside the gradient at rest; hybrid sharding lies between (see ``ParameterChain``).
What is fastest within the memory that is left is chosen bucket by bucket.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from autoparallel.decisions.parameters import REDUCTIONS
from autoparallel.decisions.prediction import ReductionCost
from autoparallel.hardware import Profile
from autoparallel.passes.bucket_collectives import Bucket
from autoparallel.passes.hoist_parameter_chains import ParameterChain
from autoparallel.placements import COLLECTIVES, action
from autoparallel.placements.redistribution import Step, local_numel, step_bytes
from autoparallel.plan import Plan


def accumulator_bytes(chain: ParameterChain, axis_sizes: Sequence[int], *, apart: bool = False) -> int:
    """What adding up the gradients of several microbatches takes beside the gradient at rest, which may be the sum
    itself, unless that is kept ``apart``."""
    if not apart and not chain.sync and chain.accumulator_dtype == chain.rest_dtype:
        return 0
    return local_numel(chain.shape, chain.accumulator, axis_sizes) * chain.accumulator_dtype.itemsize


def gradient_collectives(
    chains: Sequence[ParameterChain], paths: Sequence[Sequence[Step]], axis_sizes: Sequence[int]
) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """The collectives, each one for all, that take gradients along their paths from where they are made: kind, mesh
    axes, and the bytes of what is whole over them."""
    layouts = [chain.gradient_layout for chain in chains]
    for steps in zip(*paths, strict=True):
        size = 0
        for i, (chain, step) in enumerate(zip(chains, steps, strict=True)):
            size += step_bytes(step, layouts[i], chain.shape, chain.reduce_dtype.itemsize, axis_sizes)
            layouts[i] = step.apply(layouts[i])
        kind = action(steps[0].src, steps[0].dst)
        if kind in COLLECTIVES:
            yield kind, steps[0].axes, size


def reduction_cost(bucket: Bucket, when: str, axis_sizes: Sequence[int], profile: Profile) -> ReductionCost:
    """What it costs to reduce a bucket's gradients ``when``."""
    chains = [replace(chain, when=when) for chain in bucket.chains]
    collectives = gradient_collectives(chains, [chain.each for chain in chains], axis_sizes)
    seconds = sum(profile.step_seconds(tuple(axis_sizes), kind, axes, size) for kind, axes, size in collectives)
    return ReductionCost(sum(accumulator_bytes(chain, axis_sizes) for chain in chains), seconds)


def total_costs(buckets: Sequence[Bucket], axis_sizes: Sequence[int], profile: Profile) -> dict[str, ReductionCost]:
    """What each time of reducing would cost, were it that of every parameter."""
    trained = [b for b in buckets if b.chains[0].trainable]
    return {
        when: sum((reduction_cost(b, when, axis_sizes, profile) for b in trained), ReductionCost())
        for when in REDUCTIONS
    }


def choose_reductions(
    buckets: Sequence[Bucket], axis_sizes: Sequence[int], profile: Profile, memory: float
) -> Mapping[str, str]:
    """When each trained parameter's gradient is reduced, so that all accumulators fit into ``memory`` bytes.

    Starts from the least memory and takes, as long as one fits, the change that saves the most time for its bytes.
    """
    trained = [b for b in buckets if b.chains[0].trainable]
    costs = [{when: reduction_cost(b, when, axis_sizes, profile) for when in REDUCTIONS} for b in trained]
    chosen = [min(REDUCTIONS, key=lambda w, c=c: (c[w].accumulators, c[w].seconds)) for c in costs]  # type: ignore[misc]
    left = memory - sum(c[w].accumulators for c, w in zip(costs, chosen, strict=True))
    while True:
        best: tuple[float, int, str] | None = None
        for i, (cost, now) in enumerate(zip(costs, chosen, strict=True)):
            for when in REDUCTIONS:
                more = cost[when].accumulators - cost[now].accumulators
                saved = cost[now].seconds - cost[when].seconds
                if saved > 0 and more <= left and (best is None or saved / max(more, 1.0) > best[0]):
                    best = saved / max(more, 1.0), i, when
        if best is None:
            break
        _, i, when = best
        left -= costs[i][when].accumulators - costs[i][chosen[i]].accumulators
        chosen[i] = when
    return {c.name: when for b, when in zip(trained, chosen, strict=True) for c in b.chains}


def with_reductions(plan: Plan, when: Mapping[str, str]) -> Plan:
    """The plan with other times of reducing."""
    parameters = {n: replace(p, reduce=when.get(n, p.reduce)) for n, p in plan.parameters.items()}
    return replace(plan, parameters=parameters)
