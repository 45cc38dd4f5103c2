"""A profile reads like the plan: modules, buckets, stages, and collectives with their axes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from tests.runtime.support import make, run_on_ranks


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _names(axes: dict[str, int], options: dict[str, Any]) -> set[str]:
    """The names, beside torch's own, in the profile of a step, whose loss and gradients are right."""
    import autoparallel

    plain, x = make(Layers), torch.linspace(-1, 1, 8 * 16, dtype=torch.float64).view(8, 16)
    expected = F.mse_loss(plain(x), x.flip(0))
    expected.backward()
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    recompute = options.pop("recompute", {})
    model = autoparallel.compile(make(Layers), mesh, loss_fn=F.mse_loss, **options)
    if recompute:
        model.prepare(x, x.flip(0))
        plan = replace(model.plan, recompute=recompute)
        model = autoparallel.compile(make(Layers), mesh, loss_fn=F.mse_loss, plan=plan)
    model(x, x.flip(0))
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        loss = model(x, x.flip(0))
        loss.backward()
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    mine = set()
    for name, p in model.named_parameters():  # in a pipeline those of this rank
        if p.grad is not None:
            mine.add(name)
            torch.testing.assert_close(p.grad.full_tensor(), plain.get_parameter(name).grad, rtol=0, atol=1e-12)
    assert mine
    return {event.key for event in profiled.key_averages()}


def test_modules_buckets_and_collectives_have_names() -> None:
    for names in run_on_ranks(_names, {"dp": 1, "tp": 2}, {"plan": "tensor_parallel"}, world_size=2):
        layer = {"layers.1", "layers.1.up", "layers.1.down", "layers.1.up, backward"}
        sent = {"all_reduce tp", "wait for all_reduce tp"}
        bucket = "layers.0.up.weight to layers.1.down.weight (6 parameters)"
        assert names >= {*layer, *sent, f"take {bucket}", f"take gradients of {bucket}"}
        assert "layers" not in names


@pytest.mark.wide
def test_stages_and_layers_that_are_compiled_or_run_again_have_names() -> None:
    bucket = "layers.0.up.weight to layers.1.down.bias (8 parameters)"
    buckets = {f"gather {bucket}", f"reduce gradients of {bucket}", "wait for reduce_scatter dp"}
    compiled = run_on_ranks(_names, {"dp": 2}, {"plan": "fsdp", "backend": "aot_eager"}, world_size=2)[1]
    assert compiled >= {*buckets, "layers.0", "layers.1"}
    again = run_on_ranks(_names, {"dp": 2}, {"plan": "fsdp", "recompute": {"layers.0": "full"}}, world_size=2)[1]
    assert again >= {"layers.0", "layers.0, computed again", "layers.1.up"}
    assert "layers.1, computed again" not in again
    staged = run_on_ranks(_names, {"pp": 2, "dp": 1}, {}, world_size=2)[1]
    passed = {
        "receive value of microbatch 1 between stages 0 and 1",
        "send gradient of microbatch 0 between stages 0 and 1",
    }
    assert staged >= {"stage 1: forward of microbatch 1", "stage 1: backward of microbatch 0", "layers.1.up", *passed}
