"""Many layouts in one model: a weight over both mesh axes, its bias over one, a norm over none.

The layout of a tensor-parallel linear in two dimensions, as older systems have it. Global norms went wrong there
first, because every parameter is sharded over axes of its own. Plans are edited by hand from searched ones.
"""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.runtime.support import (
    compiled_pair,
    gradients_off,
    make,
    mesh_of,
    off,
    parameters_off,
    placements,
    raised,
    run_on_ranks,
)

NORMS = (1.0, 2.0, 3.0, math.inf)
VOCABULARY = 10


class Mixed(nn.Module):
    """A tied embedding, two linears, a norm, a frozen linear, an unused one, and a bias of odd size."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCABULARY, 8)
        self.up = nn.Linear(8, 12)
        self.norm = nn.LayerNorm(12)
        self.frozen = nn.Linear(12, 12)
        self.frozen.requires_grad_(False)
        self.down = nn.Linear(12, 8)
        self.odd = nn.Linear(8, 5)
        self.back = nn.Linear(5, 8)
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.head.weight = self.tok.weight
        self.unused = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tok(x)
        x = x + self.down(self.norm(torch.tanh(self.frozen(self.up(x)))))
        return self.head(x + self.back(torch.tanh(self.odd(x))))


def tokens(step: int) -> tuple[Tensor, Tensor]:
    """Other tokens in every row, and another number of valid targets."""
    generator = torch.Generator().manual_seed(step + 1)
    x, y = (torch.randint(0, VOCABULARY, (8, 6), generator=generator) for _ in range(2))
    for row in range(8):
        y[row, : row % 5] = -100
    return x, y


def loss_of(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), y.reshape(-1))


# How parameters lie on the axes (dp, tp); what is not named lies as the searched plan says.
LAYOUTS: dict[str, dict[str, str]] = {
    "data_parallel": {
        "tok.weight": "S0,S1",
        "up.weight": "S0,S1",
        "up.bias": "S0,I",
        "norm.weight": "I,I",
        "norm.bias": "I,I",
        "frozen.weight": "S1,S0",
        "frozen.bias": "I,S0",
        "down.weight": "S1,S0",
        "down.bias": "I,S0",
        "odd.weight": "S1,S0",
        "odd.bias": "I,S0",
        "back.weight": "S1,S1",
        "back.bias": "S0,S0",
        "unused.weight": "S0,S1",
        "unused.bias": "I,S0",
    },
    # used sharded over "tp": over "dp" at rest only
    "tensor_parallel": {
        "up.weight": "S1,S0",
        "up.bias": "S0,S0",  # other rows than where it is used
        "norm.weight": "I,I",
        "norm.bias": "S0,I",
        "down.weight": "S0,S1",
        "down.bias": "S0,I",
        "odd.bias": "I,S0",
    },
}


def _edited(plan: str) -> tuple[Any, nn.Module]:
    import autoparallel
    from autoparallel.plan import Plan

    options = {"loss_fn": loss_of, "example_inputs": tokens(0)}
    data = json.loads(compiled_pair(Mixed, 2, 2, plan=plan, **options)[0].plan.to_json())
    for name, layout in LAYOUTS[plan].items():
        data["parameters"][name]["at_rest"] = layout
    edited = Plan.from_json(json.dumps(data))
    return autoparallel.compile(make(Mixed), mesh_of(2, 2), plan=edited, **options), make(Mixed)


def _window(model: Any, plain: nn.Module, microbatches: int, step: int) -> None:
    """The first microbatch and the last are reduced: whole gradients become summands again in between."""
    for micro in range(microbatches):
        x, y = tokens(10 * step + micro)
        with model.no_sync() if 0 < micro < microbatches - 1 else nullcontext():
            model(x, y).backward()
        loss_of(plain(x), y).backward()


def _train(plan: str) -> dict[str, Any]:
    model, plain = _edited(plan)
    results: dict[str, Any] = {"layouts": placements(model), "numbers": {}, "norms": {}}
    for p in NORMS:
        for microbatches in (1, 4):
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.3) for m in (model, plain)]
            worst = 0.0
            for step in range(2):
                model.zero_grad(), plain.zero_grad()
                _window(model, plain, microbatches, step)
                worst = max(worst, gradients_off(model, plain))
                used = [q for q in plain.parameters() if q.grad is not None]
                whole = float(torch.linalg.vector_norm(torch.cat([q.grad.flatten() for q in used]), p))
                norm, expected = model.clip_grad_norm_(0.1, p), nn.utils.clip_grad_norm_(used, 0.1, p)
                assert whole > 0.11, "the limit bites"
                worst = max(worst, abs(float(norm) - whole), off(norm, expected), gradients_off(model, plain))
                for optimizer in optimizers:
                    optimizer.step()
                worst = max(worst, parameters_off(model, plain))
            results["numbers"][f"p {p}, {microbatches} microbatches"] = worst
    model.zero_grad(), plain.zero_grad()
    _window(model, plain, 1, 7)
    results["counted once"] = _miscounted(model)
    for name in ("up.weight", "up.bias", "norm.weight", "odd.bias", "tok.weight"):
        results["norms"][name] = _nan(model, plain, name)
    return results


def _miscounted(model: Any) -> float:
    """What the 2-norm would be, were replicas counted as often as they are held: not what it is."""
    squares = torch.stack([p.grad.to_local().square().sum() for p in model.parameters() if p.grad is not None]).sum()
    torch.distributed.all_reduce(squares)
    return abs(float(squares.sqrt()) - float(model.clip_grad_norm_(math.inf)))


def _nan(model: Any, plain: nn.Module, name: str) -> list[bool]:
    """A NaN in what the last rank alone holds, be it a replica that is not counted, is seen by all, for each p."""
    model.zero_grad(), plain.zero_grad()
    _window(model, plain, 1, 8)
    local = model.get_parameter(name).grad.to_local()
    if torch.distributed.get_rank() == 3:
        local.view(-1)[-1] = math.nan
    seen = [bool(model.clip_grad_norm_(math.inf, p).isnan()) for p in NORMS]
    refused = "cannot be clipped" in raised(lambda: model.clip_grad_norm_(1.0, error_if_nonfinite=True))
    return [*seen, refused]


@pytest.mark.slow_where(lambda plan: plan in ("data_parallel", "tensor_parallel"))
@pytest.mark.parametrize("plan", LAYOUTS)
def test_parameters_sharded_over_different_axes(plan: str) -> None:
    for rank, results in enumerate(run_on_ranks(_train, plan, world_size=4, timeout=240)):
        for name, layout in LAYOUTS[plan].items():
            assert results["layouts"][name] == layout.replace("I", "R"), name
        axes = {tuple(how != "R" for how in layout.split(",")) for layout in results["layouts"].values()}
        assert len(axes) == 4, "sharded over both axes, the first, the second, and none"
        assert len(results["numbers"]) == 2 * len(NORMS)
        wrong = {what: far for what, far in results["numbers"].items() if not far < 1e-9}
        assert not wrong, f"rank {rank}: {wrong}"
        assert results["counted once"] > 1e-3, "counting replicas often would be seen"
        assert all(all(seen) for seen in results["norms"].values()), results["norms"]
