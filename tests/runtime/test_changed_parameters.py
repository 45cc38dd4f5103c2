"""Parameters that a call changes itself, in layers that run again, under plans from files, and in pipelines."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autoparallel
from tests.runtime.support import SideBySide, make, mesh_of, off, raised, run_on_ranks


class Shrinking(nn.Module):
    """Each call makes its weight a little smaller: another one at each run."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.data.mul_(0.9)
        return torch.tanh(self.linear(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Shrinking() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def _x(step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def _loss(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def _under_plans() -> dict[str, Any]:
    def compiled(plan: Any) -> Any:
        return autoparallel.compile(make(Model), mesh_of(2), loss_fn=_loss, plan=plan)

    model = compiled("fsdp")
    model.prepare(_x(0), _x(9))
    plan, layers = model.plan, [f"layers.{i}" for i in range(4)]
    results: dict[str, Any] = {"gathers": {p.gather for n, p in plan.parameters.items() if n.endswith("weight")}}
    for much in ("none", "selective", "full"):
        again = dict.fromkeys(layers, much) if much != "none" else {}
        ours, plain = compiled(dataclasses.replace(plan, recompute=again)), make(Model)
        both = SideBySide(ours, plain)
        for step in range(6):
            mine, theirs = ours(_x(step), _x(9)), _loss(plain(_x(step)), _x(9))
            both.see(mine, theirs)
            with ours.no_sync() if step % 2 == 0 else contextlib.nullcontext():
                mine.backward()
            theirs.backward()
            if step % 2 == 1:
                both.step()
        results[much] = both.worst, ours.plan.recompute == again
        shrunk = dict(plain.named_parameters())["layers.0.linear.weight"].norm()
        results[f"{much}: changed"] = bool(shrunk < 0.7 * make(Model).layers[0].linear.weight.norm())
    for gather in ("per_use", "per_step"):
        parameters = {
            name: dataclasses.replace(p, gather=gather) if "S" in p.at_rest else p
            for name, p in plan.parameters.items()
        }
        results[gather] = raised(
            lambda parameters=parameters: compiled(dataclasses.replace(plan, parameters=parameters))(_x(0), _x(9))
        )
    return results


def test_layers_that_change_their_weights_run_again_from_what_these_were() -> None:
    for results in run_on_ranks(_under_plans, world_size=2):
        assert results["gathers"] == {"per_microbatch"}, "the weights are not sharded, or gathered again"
        for much in ("none", "selective", "full"):
            worst, as_asked = results[much]
            assert worst < 1e-9 and as_asked and results[f"{much}: changed"], (much, results)
        for gather in ("per_use", "per_step"):
            assert f"cannot be gathered '{gather}'" in results[gather]


def _in_a_pipeline() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    model, plain = autoparallel.compile(make(Model), mesh, loss_fn=_loss), make(Model)
    results: dict[str, Any] = {"training": raised(lambda: model(_x(0), _x(9)))}
    model.eval(), plain.eval()
    with torch.no_grad():
        results["evaluation"] = off(model(_x(0)), plain(_x(0)))
    whole = dict(model.full_parameters())
    results["weights"] = max(off(whole[name], p) for name, p in plain.named_parameters())
    return results


@pytest.mark.wide
def test_a_pipeline_changes_parameters_in_evaluation_only() -> None:
    for results in run_on_ranks(_in_a_pipeline, world_size=2):
        assert "microbatches would change the parameter layers.0.linear.weight" in results["training"]
        assert results["evaluation"] < 1e-9 and results["weights"] < 1e-9
