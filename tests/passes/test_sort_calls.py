"""`sort_calls`: ranks that have traced the same calls in other orders come to one graph."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

import autoparallel
from autoparallel.passes.sort_calls import sort_calls
from tests.captures import captured
from tests.distributed import run_distributed
from tests.runtime.support import gradients_off, make, mesh_of, off

KINDS = ("full", "sliding", "local")


class Positions(nn.Module):
    """As Gemma 3 makes its positions: for each kind of its layers, in the order of a set of strings."""

    def __init__(self, order: tuple[str, ...] = KINDS) -> None:
        super().__init__()
        self.order = order
        for place in order:
            self.register_buffer(place, torch.full((8,), 1.0 + KINDS.index(place)))
            self.register_buffer(f"{place}_calls", torch.zeros(()))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        places = {}
        for kind in self.order:
            places[kind] = getattr(self, kind).cos().exp()
            getattr(self, f"{kind}_calls").add_(1)
        for number, layer in enumerate(self.layers):
            x = layer(x).tanh() * places[KINDS[number % 3]]
        return x


def test_before_and_after() -> None:
    class Two(nn.Module):
        def __init__(self, first: str, second: str) -> None:
            super().__init__()
            self.order = first, second
            self.register_buffer("a", torch.ones(8))
            self.register_buffer("b", torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            made = {name: getattr(self, name).cos() for name in self.order}
            return x * made["b"] * made["a"]

    graphs = [captured(Two(*order), torch.randn(4, 8)) for order in ("ab", "ba")]
    before, after = ([str(sort_calls(g).graph if after else g.graph) for g in graphs] for after in (False, True))
    assert before[0] != before[1] and after[0] == after[1]
    calls = [line.split(" : ")[0].strip() for line in after[0].splitlines() if "call_function" in line]
    assert calls == ["%cos_default", "%mul_tensor", "%cos_default_1", "%mul_tensor_1"]


def test_all_orders_come_to_one_graph() -> None:
    sorted_ones = [sort_calls(captured(Positions(order), torch.randn(8, 8))) for order in itertools.permutations(KINDS)]
    assert len({str(g.graph) for g in sorted_ones}) == 1
    (names,) = {tuple(g.mutated) for g in sorted_ones}
    assert names == ("full_calls", "local_calls", "sliding_calls")
    keys = [[node.meta["key"] for node in g.graph.nodes] for g in sorted_ones]
    assert keys.count(keys[0]) == len(keys) and len({*keys[0]}) == len(keys[0])


def _ordered_by_rank(plan: str) -> dict[str, float]:
    order = KINDS if torch.distributed.get_rank() else KINDS[::-1]
    plain = make(lambda: Positions(order))
    model: Any = autoparallel.compile(make(lambda: Positions(order)), mesh_of(2), plan=plan)
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    worst = {}
    for step in range(2):
        for m in (model, plain):
            m(x).square().mean().backward()
        worst[f"step {step}"] = max(gradients_off(model, plain), off(model(x), plain(x)))
    buffers = dict(plain.named_buffers())
    worst["buffers"] = max(off(b, buffers[name]) for name, b in model.named_buffers())
    worst["vacuous"] = float(not model._kinds.maker.planner.sorts_calls)
    assert "layers.0" in str(model.plan.explain())
    return worst


def test_ranks_that_trace_in_other_orders_train_alike() -> None:
    for worst in run_distributed(_ordered_by_rank, "fsdp", world_size=2):
        assert max(worst.values()) < 1e-12, worst
