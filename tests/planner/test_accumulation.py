"""When gradients are reduced: what each way costs, and the choice within what memory is left."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from autoparallel.decisions.parameters import REDUCTIONS
from autoparallel.decisions.prediction import ReductionCost
from autoparallel.graph.sizes import Sizes
from autoparallel.hardware import profile_for
from autoparallel.passes.bucket_collectives import Bucket, bucket_collectives
from autoparallel.passes.hoist_parameter_chains import hoist_parameter_chains
from autoparallel.predict.reductions import choose_reductions, reduction_cost, total_costs
from tests.passes.support import captured, localized, redistributor

PROFILE = profile_for("cpu")
WIDTHS = (256, 512, 1024)


class Stack(nn.Module):
    """Linears of different sizes, one of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, width, bias=False) for width in WIDTHS)
        self.frozen = nn.Linear(64, 64, bias=False).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([layer(self.frozen(x)) for layer in self.layers], dim=1)


def buckets(at_rest: str, sizes: tuple[int, ...]) -> Sequence[Bucket]:
    graph = captured(Stack(), torch.rand(16, 64))
    count = len(sizes)
    modes = {n.meta["key"]: ["shard:...0"] * count for n in graph.graph.nodes if "linear" in str(n.target)}
    parameters = dict.fromkeys(graph.parameters.values(), at_rest)
    axes = list(zip(("dp", "fsdp"), sizes, strict=False))
    module = localized(graph, modes, parameters, axes=axes, outputs=[None])
    chains = hoist_parameter_chains(module, graph.parameters, redistributor(*sizes), Sizes(graph.actual)).chains
    return bucket_collectives(module, chains, {}, bucket_bytes=1).buckets


def total(made: Sequence[Bucket], chosen: dict[str, str], sizes: tuple[int, ...]) -> ReductionCost:
    costs = [reduction_cost(b, chosen[b.chains[0].name], sizes, PROFILE) for b in made if b.chains[0].trainable]
    return sum(costs, ReductionCost())


def test_what_each_way_costs() -> None:
    """Full-size accumulators and nothing sent; none and everything sent; hybrid sharding lies between."""
    made = buckets("I,S0", (2, 2))
    elements = sum(64 * width for width in WIDTHS)
    costs = total_costs(made, (2, 2), PROFILE)
    assert costs["per_step"] == ReductionCost(4.0 * elements, 0.0)
    assert costs["per_microbatch"].accumulators == 0
    assert costs["across_replicas_per_step"].accumulators == 4 * elements / 2
    assert 0 < costs["across_replicas_per_step"].seconds < costs["per_microbatch"].seconds


def test_with_room_everything_is_deferred_and_without_it_nothing() -> None:
    made = buckets("S0", (2,))
    trained = {f"layers.{i}.weight" for i in range(len(WIDTHS))}
    assert choose_reductions(made, (2,), PROFILE, 1e12) == dict.fromkeys(trained, "per_step")
    assert choose_reductions(made, (2,), PROFILE, 0.0) == dict.fromkeys(trained, "per_microbatch")
    least = choose_reductions(made, (2,), PROFILE, -1e9)
    assert least == dict.fromkeys(trained, "per_microbatch"), "the least there is"


@pytest.mark.parametrize(("at_rest", "sizes"), [("S0", (2,)), ("I,S0", (2, 2))], ids=str)
def test_the_choice_fits_and_is_near_the_best(at_rest: str, sizes: tuple[int, ...]) -> None:
    made = buckets(at_rest, sizes)
    names = [b.chains[0].name for b in made if b.chains[0].trainable]
    everything = total_costs(made, sizes, PROFILE)["per_step"].accumulators
    before = float("inf")
    for share in (0.0, 0.2, 0.35, 0.5, 0.7, 0.9, 1.0):
        memory = share * everything
        found = total(made, dict(choose_reductions(made, sizes, PROFILE, memory)), sizes)
        assert found.accumulators <= memory and found.seconds <= before
        before = found.seconds
        every = [
            total(made, dict(zip(names, ways, strict=True)), sizes)
            for ways in itertools.product(REDUCTIONS, repeat=len(names))
        ]
        most = max(cost.seconds for cost in every)
        best = min(cost.seconds for cost in every if cost.accumulators <= memory)
        assert most - found.seconds >= 0.5 * (most - best), "at least half of what could be saved is saved"
