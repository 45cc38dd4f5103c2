"""`bucket_collectives`: parameters that do the same go together, up to a size, and come before their first use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from autoparallel.graph.sizes import Sizes
from autoparallel.passes.bucket_collectives import Bucket, bucket_collectives
from autoparallel.passes.hoist_parameter_chains import hoist_parameter_chains
from tests.passes.support import captured, localized, redistributor, show


class Stack(nn.Module):
    def __init__(self, layers: int = 2, bias: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=bias) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def bucketed(
    model: nn.Module, gather: dict[str, str], at_rest: dict[str, str] | None = None, **options: Any
) -> tuple[fx.GraphModule, tuple[Bucket, ...]]:
    graph = captured(model, torch.rand(8, 4))
    modes = {n.meta["key"]: ["shard:...0"] for n in graph.graph.nodes if n.op == "call_function"}
    parameters = {name: "S0" for name in graph.parameters.values()} | (at_rest or {})
    module = localized(graph, modes, parameters, axes=[("dp", 2)], outputs=[None])
    chains = hoist_parameter_chains(module, graph.parameters, redistributor(2), Sizes(graph.actual)).chains
    return module, bucket_collectives(module, chains, gather, **options).buckets


def names(buckets: Sequence[Bucket]) -> list[list[str]]:
    return [[c.name.removeprefix("layers.").removesuffix(".weight") for c in b.chains] for b in buckets]


ALL_PER_USE = {f"layers.{i}.weight": "per_use" for i in range(9)}


def test_before_and_after() -> None:
    module, buckets = bucketed(Stack(), ALL_PER_USE)
    assert [b.name for b in buckets] == ["unshard_0"] and buckets[0].per_use
    assert show(module) == [
        "args_0  I",
        "redistribute = collectives.redistribute(args_0, 'I', 'S0', 'mesh0/dp')  S0",
        "unshard_0 = unshard_0()",
        "getitem = _operator.getitem(unshard_0, 0)  R",
        "getitem_1 = _operator.getitem(unshard_0, 1)  R",
        "linear = aten.linear(redistribute, getitem)  S0",
        "linear_1 = aten.linear(linear, getitem_1)  S0",
        "return [linear_1]",
    ]


def test_gathered_per_microbatch_stays_an_input() -> None:
    module, buckets = bucketed(Stack(), {})
    assert not buckets[0].per_use and not any("unshard" in line for line in show(module))
    assert names(buckets) == [["0", "1"]]


def test_a_bucket_is_closed_at_its_size() -> None:
    size = 4 * 4 * 4
    assert names(bucketed(Stack(5), {}, bucket_bytes=2 * size)[1]) == [["0", "1"], ["2", "3"], ["4"]]
    assert names(bucketed(Stack(3), {}, bucket_bytes=1)[1]) == [["0"], ["1"], ["2"]], "one that is too large is alone"
    module, buckets = bucketed(Stack(4), ALL_PER_USE, bucket_bytes=2 * size)
    lines = show(module)
    assert names(buckets) == [["0", "1"], ["2", "3"]]
    second = next(i for i, line in enumerate(lines) if line.startswith("unshard_1"))
    assert "aten.linear(linear" in lines[second - 1], "the second bucket comes right before its first use"


def test_what_differs_is_apart() -> None:
    _, buckets = bucketed(Stack(4), {"layers.1.weight": "per_use"}, {"layers.2.weight": "I"})
    assert names(buckets) == [["0", "3"], ["1"], ["2"]], "gather, and way of the gradient"
    model = Stack(3)
    model.layers[1].requires_grad_(False)
    assert names(bucketed(model, {})[1]) == [["0", "2"], ["1"]], "trained or not"
    mixed = Stack(2, bias=True)
    assert len(bucketed(mixed, {})[1]) == 1, "shapes may differ"


def test_a_parameter_that_is_not_gathered_is_never_per_use() -> None:
    _, buckets = bucketed(Stack(), ALL_PER_USE, {"layers.0.weight": "I", "layers.1.weight": "I"})
    assert [b.gather for b in buckets] == [""]


def test_chains_of_a_bucket_are_alike_in_every_way_of_reducing() -> None:
    graph = captured(Stack(), torch.rand(8, 4))
    modes = {n.meta["key"]: ["shard:...0"] for n in graph.graph.nodes if n.op == "call_function"}
    module = localized(graph, modes, dict.fromkeys(graph.parameters.values(), "S0"), axes=[("dp", 2)], outputs=[None])
    one, two = hoist_parameter_chains(module, graph.parameters, redistributor(2), Sizes(graph.actual)).chains
    # The time of reducing is chosen for a bucket once it is made: it must be one collective at any time.
    assert one.ways["per_microbatch"][0] and one.each == two.each
    other = replace(two, ways={**two.ways, "per_microbatch": ((), two.sync)})
    assert names(bucket_collectives(module, [one, other], {}).buckets) == [["0"], ["1"]]
