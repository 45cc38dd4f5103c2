"""Fused projections (q, k and v in one linear, gate and up in one) are sharded by head, and train as they are."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import autoparallel
from autoparallel.hardware import CPU, H100, Profile
from autoparallel.planner.draft import call_of
from autoparallel.planner.request.request import Request
from tests.captures import draft
from tests.distributed import run_distributed
from tests.models.fused import FusedConfig, FusedModel
from tests.parity.harness import Recipe, check
from tests.runtime.support import (
    SideBySide,
    compiled_pair,
    muon_in_the_gradients_dtype,
    parameters_off,
    run_on_ranks,
    weights_off,
)
from tests.runtime.test_optimizer_steps import Lamb

SLOW = replace(H100, name="slow", overlap=0.0, flops={dtype: rate / 1e4 for dtype, rate in H100.flops.items()})
ROWS, LENGTH = 3, 9  # neither can be cut


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [
        Recipe("fused", (2,), "tensor_parallel", 1),
        Recipe("fused", (2, 2), "tensor_parallel", 3),
        Recipe("fused", (2,), "auto", 3),
        Recipe("fused", (2, 2), "auto", 1),
        Recipe("fused", (2, 2), "fsdp", 1),
        Recipe("fused_odd", (2,), "tensor_parallel", 1),
    ],
    ids=str,
)
def test_parity_of_every_way_of_writing(recipe: Recipe) -> None:
    check(recipe)


class Trained:
    """Two steps of two microbatches beside the plain model, and what they sent."""

    def __init__(
        self, shape: tuple[int, ...], plan: str, hardware: Profile, config: FusedConfig, ways: tuple[str, ...]
    ) -> None:
        torch.manual_seed(0)
        plain = FusedModel(config, ways).double()
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])
        model = autoparallel.compile(copy.deepcopy(plain), mesh, loss_fn=F.mse_loss, plan=plan, hardware=hardware)
        both = SideBySide(model, plain)
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            rows = ROWS * math.prod(shape[:-1]) ** 2
            batches = torch.randn(2, 2, rows, LENGTH, config.width, generator=generator, dtype=torch.float64)
            with autoparallel.count_traffic(mesh) as first, model.no_sync():
                both.backward(model(*batches[0]) / 2, F.mse_loss(plain(batches[0][0]), batches[0][1]) / 2)
            with autoparallel.count_traffic(mesh) as second:
                both.backward(model(*batches[1]) / 2, F.mse_loss(plain(batches[1][0]), batches[1][1]) / 2)
            both.step()
        assert list(model.state_dict()) == list(plain.state_dict())
        self.worst = max(both.worst, weights_off(model.state_dict(), plain.state_dict()))
        prediction = model.plan.prediction
        self.exact = (first.result() + second.result()) == prediction.step(2)
        self.forward, self.backward = prediction.forward.collectives, prediction.backward.collectives
        self.modes = {key: modes for key, modes in model.plan.operators.items() if "piece#" in key}


def _train(*args: Any) -> Trained:
    return Trained(*args)


def test_tensor_parallelism_needs_one_all_reduce_each_way_for_each_half_of_a_block() -> None:
    for found in run_distributed(
        _train, (2,), "tensor_parallel", CPU, FusedConfig(), ("conv1d", "groups"), world_size=2
    ):
        assert found.worst < 1e-9
        assert set(found.modes.values()) == {("shard:o",)}
        # Two halves of two blocks, and four products whose weights are dealt out; the model's input has no gradient.
        assert found.forward == {("all_reduce", "tp"): 4, ("all_to_all", "tp"): 4}
        assert found.backward == {("all_reduce", "tp"): 3, ("all_to_all", "tp"): 4}
        assert found.exact


@pytest.mark.wide
def test_beside_data_parallelism_it_is_the_same() -> None:
    for found in run_distributed(_train, (2, 2), "tensor_parallel", CPU, FusedConfig(), ("groups",), world_size=4):
        assert found.worst < 1e-9
        attention = {modes for key, modes in found.modes.items() if "attention/" in key}
        assert attention == {("shard:d0", "shard:o")}
        assert found.exact


@pytest.mark.wide
def test_auto_shards_by_head_what_else_every_rank_would_compute() -> None:
    config = FusedConfig(width=32, heads=4, hidden=64)
    for found in run_distributed(_train, (2,), "auto", SLOW, config, ("unbind",), world_size=2):
        assert found.worst < 1e-9
        assert set(found.modes.values()) == {("shard:o",)}
        assert found.exact


def _step_on_whole_matrices(ways: tuple[str, ...]) -> dict[str, Any]:
    """How far the matrices are from one process's after two steps of optimizers that look at them as a whole."""
    autoparallel.register_optimizer(Lamb, per="parameter")
    model, plain = compiled_pair(lambda: FusedModel(FusedConfig(), ways), plan="tensor_parallel")
    start, found = copy.deepcopy(plain.state_dict()), dict[str, Any]()
    for kind in (torch.optim.Muon, torch.optim.Adafactor, Lamb):
        model.load_state_dict(start), plain.load_state_dict(start)
        matrices = [[p for p in m.parameters() if p.ndim == 2] for m in (model, plain)]
        optimizers = [kind(some, lr=0.02) for some in matrices]  # type: ignore[operator]
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            x, y = torch.randn(2, ROWS, LENGTH, 16, generator=generator, dtype=torch.float64)
            model(x, y).backward(), F.mse_loss(plain(x), y).backward()
            with muon_in_the_gradients_dtype():
                for optimizer, m in zip(optimizers, (model, plain), strict=True):
                    optimizer.step(), m.zero_grad()
        found[kind.__name__] = parameters_off(model, plain)
    modes = {modes for key, modes in model.plan.operators.items() if "piece#" in key}
    whole = [n for n, p in model.named_parameters() if p.ndim == 2 and 2 * p.to_local().numel() != p.numel()]
    return {"far": found, "modes": modes, "whole": whole}


@pytest.mark.wide
def test_optimizers_of_whole_matrices_step_on_rows_in_the_users_order() -> None:
    for found in run_on_ranks(_step_on_whole_matrices, ("groups",), world_size=2):
        assert all(far < 1e-9 for far in found["far"].values()), found
        assert found["modes"] == {("shard:o",)} and not found["whole"]


class TestWhatDoesNotDivide:
    def planned(self, config: FusedConfig, mesh: tuple[tuple[str, int], ...]) -> autoparallel.Plan:
        with torch.device("meta"):
            model, x = FusedModel(config, ("split",)), torch.empty(8, 4, config.width)
        request = Request(mesh, CPU, "tensor_parallel", loss_fn=F.mse_loss)
        return draft(model, call_of((x, x), with_target=True), request).plan

    def test_heads_are_said_and_kept_together(self) -> None:
        plan = self.planned(FusedConfig(width=12, heads=3), (("tp", 2),))
        assert plan.operators["blocks.0.attention/aten.scaled_dot_product_attention#0"] == ("I",)
        assert (
            "blocks.0.attention.qkv is not sharded by its pieces: its product is cut into pieces of 3, 3, 3 heads, "
            "which do not divide by the 2 ranks of 'tp'"
        ) in " ".join(plan.explain().split())

    def test_rows_are_said(self) -> None:
        plan = self.planned(FusedConfig(width=16, heads=2, hidden=5), (("tp", 2),))
        assert list(plan.notes) == ["blocks.0.mlp.up"]
        assert "pieces of 5, 5 rows" in plan.notes["blocks.0.mlp.up"]

    def test_nothing_is_said_where_all_divides(self) -> None:
        assert not self.planned(FusedConfig(), (("dp", 2), ("tp", 2))).notes
