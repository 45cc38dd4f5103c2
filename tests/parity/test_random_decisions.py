"""Any decisions are right: when parameters are gathered, gradients reduced and layers run again, drawn at random.

What is drawn are the decisions that a limit on memory leads to, in mixes that no search would take, for models that
share weights between layers, and with what stands outside of them.  Each trains for several steps, by a call, by a
window and by a call of other rows, because what is kept too long shows in the next step only.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoparallel
from autoparallel.decisions.parameters import GATHERS
from autoparallel.plan import Plan
from tests.distributed import run_distributed
from tests.runtime.support import gradients_off, mesh_of, off, parameters_off

WIDTH, CLASSES, LAYERS = 8, 12, 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Sharing(nn.Module):
    """Layers between an embedding and a head, and a weight of the first layer behind the last one."""

    def __init__(self, share: Callable[[Sharing], None], reads: str = "") -> None:
        super().__init__()
        self.reads = reads
        self.embed, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)
        self.layers, self.norm = nn.ModuleList(Layer() for _ in range(LAYERS)), nn.LayerNorm(WIDTH)
        share(self)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        if self.reads:
            weight = self.get_parameter(self.reads)
            x = x + F.linear(F.linear(x, weight).tanh(), weight.t())
        return self.head(self.norm(x))


def _one_layer(model: Sharing) -> None:
    model.layers[2] = model.layers[0]


def _a_part(model: Sharing) -> None:
    model.layers[1].up = model.layers[0].up
    model.layers[2].norm = model.norm


def _tied(model: Sharing) -> None:
    model.head.weight = model.embed.weight


def _all(model: Sharing) -> None:
    _one_layer(model)
    _tied(model)


SHARES: dict[str, tuple[Callable[[Sharing], None], str]] = {
    "a layer": (_one_layer, ""),
    "parts of layers": (_a_part, ""),
    "what is read outside": (lambda model: None, "layers.0.up.weight"),
    "what is read outside, of the last": (lambda model: None, "layers.2.up.weight"),
    "embedding and head": (_tied, ""),
    "all of it": (_all, "layers.1.up.weight"),
}


def _drawn(plan: Plan, draw: random.Random) -> Plan:
    data = json.loads(plan.to_json())
    for parameter in data["parameters"].values():
        if "S" in parameter["at_rest"]:
            parameter["gather"] = draw.choice((*GATHERS, "per_use"))
        parameter["reduce"] = draw.choice(("per_step", "per_microbatch"))
    return Plan.from_json(json.dumps(data))


def _recomputing(plan: Plan, layers: list[str], draw: random.Random) -> Plan:
    again = {name: draw.choice(("full", "selective")) for name in layers if draw.random() < 0.7}
    return Plan.from_json(json.dumps({**json.loads(plan.to_json()), "recompute": again}))


def _batch(step: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids, labels = (torch.randint(0, CLASSES, (rows, 5), generator=generator) for _ in range(2))
    return ids, torch.where(torch.rand(rows, 5, generator=generator) < 0.3, -100, labels)


def _loss(out: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), labels.flatten())


def _train(preset: str, shared: str, seeds: range) -> dict[str, Any]:
    mesh, (share, reads) = mesh_of(2), SHARES[shared]
    results: dict[str, Any] = {"worst": 0.0, "layers": 0, "again": 0, "per use": 0}
    for seed in seeds:
        torch.manual_seed(seed)
        plain, draw = Sharing(share, reads).double(), random.Random(seed)
        first = autoparallel.compile(copy.deepcopy(plain), mesh, loss_fn=_loss, plan=preset)
        first.prepare(*_batch(0, 4))
        layers = _layers(first)
        plan = _recomputing(_drawn(first.plan, draw), layers, draw)
        model = autoparallel.compile(copy.deepcopy(plain), mesh, loss_fn=_loss, plan=plan)
        results["worst"] = max(results["worst"], _steps(model, plain))
        results["layers"] += len(layers)
        results["again"] += len(plan.recompute)
        results["per use"] += sum(p.gather == "per_use" for p in plan.parameters.values())
    return results


def _steps(model: Any, plain: nn.Module) -> float:
    """How far the model is off after any of some steps."""
    optimizers = [torch.optim.SGD(m.parameters(), 0.5, momentum=0.9) for m in (model, plain)]
    worst = 0.0
    for step in range(3):
        batches = [_batch(10 * step + i, 4 if step else 6) for i in range(1 + step % 2)]
        for window in model.accumulate(2, batches):
            for batch in window:
                loss = model(*batch)
                loss.backward()
                worst = max(worst, off(loss, _loss(plain(batch[0]), batch[1])))
        ids, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        _loss(plain(ids), labels).backward()
        worst = max(worst, gradients_off(model, plain))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return max(worst, parameters_off(model, plain))


def _layers(model: Any) -> list[str]:
    """Those that can run again."""
    from autoparallel.passes.recompute_layers import find_layers

    (kind,) = model._kinds
    return list(find_layers(kind.runner.captured.graph))


@pytest.mark.parametrize("shared", [pytest.param(x, marks=[pytest.mark.wide] * (x != "a layer")) for x in SHARES])
@pytest.mark.parametrize("preset", ["fsdp", pytest.param("tensor_parallel", marks=pytest.mark.slow)])
def test_decisions_drawn_at_random_are_those_of_one_process(preset: str, shared: str) -> None:
    for results in run_distributed(_train, preset, shared, range(3), world_size=2):
        assert results["worst"] < 1e-9, results
        assert results["again"] or not results["layers"], "something was drawn"
        assert results["per use"] > 10 or preset != "fsdp"
