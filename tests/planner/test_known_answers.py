"""Plans that are known to be right, found by the search."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autoparallel.capture import capture, describe_inputs
from autoparallel.placements import parse_layout
from autoparallel.plan import Plan
from autoparallel.planner.cost import OPTIMIZER_COPIES
from autoparallel.planner.hardware import H100
from autoparallel.planner.presets import constraints_for
from autoparallel.planner.search import search
from autoparallel.planner.space import SearchSpace
from autoparallel.program import wanted_outputs
from autoparallel.redistribution import Redistributor

RANKS = (8,)


class Head(nn.Module):
    """Hidden states to a vocabulary."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


def _plan(
    make: Callable[[], tuple[nn.Module, Tensor, Tensor]], loss_fn: Any, memory_limit: float | None = None
) -> Plan:
    with torch.device("meta"):
        model, x, y = make()
    leaves, spec = pytree.tree_flatten(((x, y), {}))
    specs, batch = describe_inputs(leaves)
    graph = capture(model, specs, spec, loss_fn=loss_fn, least_batch=16, batch=batch)
    redistributor = Redistributor(RANKS, lambda kind, axes, size: H100.step_seconds(RANKS, kind, axes, size))
    outputs = wanted_outputs(graph, "auto", 1)
    space = SearchSpace(graph, (("x", 8),), H100, constraints_for("auto", ["x"]), redistributor, outputs)
    return search(space, "auto", memory_limit)


def test_a_limit_too_small_for_replication_shards_parameters_at_rest() -> None:
    width, layers = 1024, 6

    def make() -> tuple[nn.Module, Tensor, Tensor]:
        model = nn.Sequential(*[m for _ in range(layers) for m in (nn.Linear(width, width), nn.GELU())])
        return model, torch.empty(4096, width), torch.empty(4096, width)

    def sharded(plan: Plan) -> int:
        return sum(parse_layout(p.at_rest)[0].kind == "S" for p in plan.parameters.values())

    free = _plan(make, F.mse_loss)
    replicated = OPTIMIZER_COPIES * layers * width * width * 4
    tight = _plan(make, F.mse_loss, memory_limit=0.8 * replicated)
    assert sharded(tight) > sharded(free)
    assert tight.gap is not None and tight.gap <= 0.01


def test_a_large_vocabulary_is_cut_through_the_softmax() -> None:
    def make() -> tuple[nn.Module, Tensor, Tensor]:
        return Head(4096, 131072), torch.empty(64, 4096), torch.empty(64, dtype=torch.long)

    plan = _plan(make, F.cross_entropy)
    assert plan.operators["head/aten.linear#0"] == ("shard:n",)
    assert ("shard:c",) in [modes for key, modes in plan.operators.items() if "cross_entropy_sum" in key]


def test_large_layers_and_few_rows_are_cut_by_columns_and_then_rows_with_one_sum() -> None:
    def make() -> tuple[nn.Module, Tensor, Tensor]:
        model = nn.Sequential(nn.Linear(8192, 32768), nn.GELU(), nn.Linear(32768, 8192))
        return model, torch.empty(16, 8192), torch.empty(16, 8192)

    plan = _plan(make, F.mse_loss)
    assert plan.operators["0/aten.linear#0"] == ("shard:n",)
    assert plan.operators["1/aten.gelu#0"] == ("shard:...1",)
    assert plan.operators["2/aten.linear#0"] == ("shard:k",)
    assert plan.gap == 0.0
