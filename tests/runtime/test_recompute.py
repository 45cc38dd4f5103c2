"""Layers that run again in the backward: the same numbers, less memory, and the traffic that was predicted."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import autoparallel
from autoparallel.decisions.parameters import PlanError
from autoparallel.plan import Plan
from autoparallel.predict.meter import Clock, Ledger
from tests.models import build
from tests.runtime.support import SideBySide, off, run_on_ranks


class _Alive(TorchDispatchMode):
    """Counts the bytes that calls have made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(Clock(0.0))
        self.ledger.kind = "all"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.ledger.add(result)
        return result


def _train(name: str, shape: tuple[int, ...], preset: str, layers: Any, gather: str) -> dict[str, Any]:
    case = build(name)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
    rows = 32 if name == "resnet" else 8  # so that what is kept, not the gradients, makes the worst moment
    batches = [case.make_batch(step, rows) for step in range(3)]
    kept: list[int] = []

    def compiled(plan: Any) -> Any:
        torch.manual_seed(3)
        return autoparallel.compile(copy.deepcopy(case.model), mesh, loss_fn=case.loss_fn, plan=plan)

    def call(model: Any, step: int) -> torch.Tensor:
        args, kwargs = batches[step]
        out = model(*args, **kwargs)
        return out if case.loss_fn is not None else out["loss"]

    def losses(model: Any) -> list[torch.Tensor]:
        """Three microbatches; the third one's forward runs before the second one's backward."""
        torch.manual_seed(5)  # both models draw the same numbers
        found = []
        with model.no_sync():
            found.append(call(model, 0))
            found[0].backward()
            found.append(call(model, 1))
        alive = _Alive()
        with alive:
            found.append(call(model, 2))
        kept.append(sum(alive.ledger.live.values()))
        with model.no_sync():
            found[1].backward()
        found[2].backward()
        return [x.detach() for x in found]

    plain = compiled(preset)
    call(plain, 0)
    data = json.loads(plain.plan.to_json())
    for parameter in data["parameters"].values():
        parameter["gather"] = gather if "S" in parameter["at_rest"] else parameter["gather"]
    plain, ours = (compiled(Plan.from_json(json.dumps({**data, "recompute": x}))) for x in ([], layers))
    both = SideBySide(ours, plain, momentum=0.0)
    for _ in range(2):
        for a, b in zip(losses(ours), losses(plain), strict=True):
            both.see(a, b)
        both.step()
    with autoparallel.count_traffic(mesh) as traffic:
        call(ours, 0).backward()
    (kind,) = ours._kinds
    around = [region.around for region in kind.runner.program.regions.values()]
    predicted = ours.plan.prediction.step()
    assert around == [region.around for region in kind.runner.program.regions.values()], (
        "a prediction leaves it as it is"
    )
    return {
        "worst": both.worst,
        "kept": kept[:2],
        "traffic": (dict(traffic.collectives), dict(traffic.bytes)),
        "predicted": (dict(predicted.collectives), dict(predicted.bytes)),
        "explained": ours.plan.explain(),
        "activations": (ours.plan.prediction.memory["activations"], plain.plan.prediction.memory["activations"]),
    }


PARTLY = {"blocks.0": "selective", "blocks.1": "selective"}
CASES = [
    pytest.param("gpt_dropout", (2,), "data_parallel", ["blocks.0"], "per_step", marks=pytest.mark.slow),
    ("gpt_dropout", (2,), "fsdp", {"blocks.0": "selective", "blocks.1": "full"}, "per_use"),
    pytest.param("gpt_dropout", (2, 2), "tensor_parallel", PARTLY, "per_use", marks=pytest.mark.slow),
    pytest.param("moe", (2,), "fsdp", PARTLY, "per_use", marks=pytest.mark.slow),
    pytest.param(
        "llama",
        (2,),
        "fsdp",
        {"model.layers.0": "selective", "model.layers.1": "selective"},
        "per_use",
        marks=pytest.mark.slow,
    ),
    pytest.param("gpt_dropout", (2, 2), "tensor_parallel", ["blocks.0"], "per_use", marks=pytest.mark.slow),
    pytest.param("llama", (2,), "fsdp", ["model.layers.0"], "per_use", marks=pytest.mark.slow),
    pytest.param(
        "resnet", (2,), "data_parallel", [f"blocks.{i}" for i in range(4)], "per_step", marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize(("name", "shape", "preset", "layers", "gather"), CASES, ids=str)
def test_recomputed_layers_give_the_same_numbers_for_less_memory(
    name: str, shape: tuple[int, ...], preset: str, layers: Any, gather: str
) -> None:
    tolerance = 1e-6 if name == "llama" else 1e-12
    ranks = run_on_ranks(_train, name, shape, preset, layers, gather, world_size=torch.Size(shape).numel(), timeout=250)
    for found in ranks:
        assert found["worst"] < tolerance, found["worst"]
        ours, plain = found["kept"]
        # A layer keeps what enters it, and what its products make where these are not repeated.
        most = 0.95 if "selective" in str(layers) else 0.8
        assert ours < most * plain
        assert found["activations"][0] < most * found["activations"][1]
        assert found["traffic"] == found["predicted"]
        assert "Recomputed in the backward" in found["explained"]


class _Shared(nn.Module):
    """A weight of a layer that runs again is used outside of it, too."""

    def __init__(self) -> None:
        super().__init__()
        layers = ((nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3))
        self.blocks = nn.ModuleList(nn.Sequential(*layer) for layer in layers)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        weight = self.blocks[0][1].weight  # type: ignore[index]
        return self.head(x + F.linear(F.linear(x, weight), weight.t()))


def _share() -> tuple[float, float, list[str]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(3)
    plain = _Shared().double()
    x, y = torch.randn(8, 8, dtype=torch.float64), torch.arange(8) % 4
    first = autoparallel.compile(copy.deepcopy(plain), mesh, loss_fn=F.cross_entropy, plan="fsdp")
    first.prepare(x, y)
    data = json.loads(first.plan.to_json())
    for name, parameter in data["parameters"].items():  # so that the shared one is gathered by itself, before its layer
        parameter.update(gather="per_use", reduce="per_step" if name == "blocks.0.1.weight" else "per_microbatch")
    plan = Plan.from_json(json.dumps({**data, "recompute": ["blocks.0", "blocks.1"]}))
    model = autoparallel.compile(copy.deepcopy(plain), mesh, loss_fn=F.cross_entropy, plan=plan)
    optimizers = [torch.optim.SGD(m.parameters(), 0.5) for m in (model, plain)]
    worst = 0.0
    for _ in range(3):
        loss, expected = model(x, y), F.cross_entropy(plain(x), y)
        worst = max(worst, off(loss, expected))
        loss.backward(), expected.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    (kind,) = model._kinds
    return worst, float(expected), [b.bucket.name for b in kind.runner.per_use if b._started is not None]


def test_what_a_layer_that_runs_again_shares_is_gathered_anew_in_each_step() -> None:
    for worst, loss, started in run_on_ranks(_share, world_size=2):
        assert worst < 1e-12 and loss < 1.3, "losses that fall: a copy of the step before would show"
        assert not started


def _three_ways() -> list[dict[str, Any]]:
    """What a step with two layers keeps, computes and sends in its backward, where nothing, all but the products or all
    of them runs again."""
    case = build("gpt_dropout")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    args, kwargs = case.make_batch(0, 8)

    def compiled(plan: Any) -> Any:
        return autoparallel.compile(copy.deepcopy(case.model), mesh, loss_fn=case.loss_fn, plan=plan)

    model = compiled("tensor_parallel")
    model.prepare(*args, **kwargs)
    found = []
    for much in (None, "selective", "full"):
        again = {} if much is None else {"blocks.0": much, "blocks.1": much}
        model = compiled(dataclasses.replace(model.plan, recompute=again))
        model.prepare(*args, **kwargs)
        torch.manual_seed(5)
        alive = _Alive()
        with alive:
            loss = model(*args, **kwargs)
            kept = sum(alive.ledger.live.values())
            with autoparallel.count_traffic(mesh) as traffic, FlopCounterMode(display=False) as flops:
                loss.backward()
        found.append(
            {
                "loss": loss.detach(),
                "gradients": [p.grad.full_tensor() for p in model.parameters()],
                "kept": kept,
                "peak": sum(alive.ledger.peak.values()),
                "flops": flops.get_total_flops(),
                "sent": sum(n for (kind, _), n in traffic.collectives.items() if kind != "all_gather"),
                "predicted": model.plan.prediction.seconds(),
            }
        )
    return found


def test_products_attention_and_collectives_that_do_not_gather_are_not_repeated_where_they_are_kept() -> None:
    for nothing, selective, full in run_on_ranks(_three_ways, world_size=2):
        for ours in (selective, full):
            assert off(ours["loss"], nothing["loss"]) == 0
            # Where products are kept, the gradients of what several layers read are added up one by one.
            assert all(off(a, b) < 1e-14 for a, b in zip(ours["gradients"], nothing["gradients"], strict=True))
        for what in ("kept", "peak"):
            assert full[what] < selective[what] < 0.95 * nothing[what], what
        for what in ("flops", "sent"):
            assert nothing[what] == selective[what] < full[what], what
        assert nothing["predicted"] < selective["predicted"] < full["predicted"]


def _refusal() -> str:
    case = build("gpt")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    batch = case.make_batch(0, 8)[0]
    model = autoparallel.compile(copy.deepcopy(case.model), mesh, loss_fn=case.loss_fn, example_inputs=batch)
    plan = dataclasses.replace(model.plan, recompute={"blocks.9": "full"})
    try:
        autoparallel.compile(copy.deepcopy(case.model), mesh, loss_fn=case.loss_fn, plan=plan, example_inputs=batch)
    except PlanError as error:
        return str(error)
    return ""


@pytest.mark.wide
def test_what_cannot_be_recomputed_is_refused() -> None:
    for unknown in run_on_ranks(_refusal, world_size=2):
        assert "'blocks.9'" in unknown and "blocks.0, blocks.1" in unknown


# ---------------------------------------------------------------------------------------------------------- in stages


class _Wide(nn.Module):
    """A layer that saves much more than enters it."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.dropout(torch.tanh(self.up(self.norm(x))), 0.3, self.training))


def _train_stages(
    shape: tuple[int, ...], schedule: str, per_rank: int, layers: list[str] | dict[str, str] | None
) -> dict[str, Any]:
    """Trains a pipeline with layers that run again (those given, or that a limit asks for), and without."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp")[: len(shape)])
    generator = torch.Generator().manual_seed(0)
    batches = torch.randn(2, 2, 256, 8, generator=generator, dtype=torch.float64)
    stages = shape[0] * per_rank
    cuts = tuple(f"{4 * i // stages}.norm/aten.layer_norm#0" for i in range(1, stages))
    pipeline = autoparallel.Pipeline(schedule, 4, per_rank, None if layers is None else cuts)
    options: dict[str, Any] = {"loss_fn": F.mse_loss, "plan": "data_parallel", "pipeline": pipeline}

    def compiled(**changed: Any) -> Any:
        torch.manual_seed(3)
        model = nn.Sequential(*(_Wide() for _ in range(4))).double()
        return autoparallel.compile(model, mesh, **{**options, **changed})

    plain = compiled(example_inputs=tuple(batches[0]))
    data = json.loads(plain.plan.to_json())
    if layers is None:
        limit = 0.55 * max(plain.plan.pipeline.memory_by_rank())
        ours = compiled(memory_limit=limit, example_inputs=tuple(batches[0]))
        data["pipeline"]["cuts"] = ours.plan.pipeline.cuts
        plain = compiled(plan=Plan.from_json(json.dumps(data)), pipeline=None)
    else:
        limit = 0.0
        ours = compiled(plan=Plan.from_json(json.dumps({**data, "recompute": layers})), pipeline=None)
    for model in (ours, plain):
        model.prepare(*batches[0])
    both, peaks = SideBySide(ours, plain, momentum=0.0), []
    for step in range(2):
        losses = []
        for model in (ours, plain):
            alive = _Alive()
            torch.manual_seed(5 + step)  # both models draw the same numbers
            with autoparallel.count_traffic() as traffic, alive:
                losses.append(model(*batches[step]))
            losses[-1].backward()
            peaks.append((sum(alive.ledger.peak.values()), traffic.result()))
        both.see(*losses)
        both.step()
    rank = mesh.get_local_rank("pp")
    return {
        "worst": both.worst,
        "peaks": [peak for peak, _ in peaks[2:]],
        "as predicted": peaks[2][1] == ours.plan.pipeline.traffic.calls[rank],
        "layers": ours.plan.recompute,
        "kept in the file": Plan.from_json(ours.plan.to_json()).recompute == ours.plan.recompute,
        "memory": max(ours.plan.pipeline.memory_by_rank()),
        "limit": limit,
        "explained": ours.plan.explain(),
    }


STAGES = [
    ((2,), "1f1b", 1, None),
    pytest.param((2, 2), "zero_bubble", 1, ["0", "3"], marks=pytest.mark.slow),
    pytest.param((2, 2), "1f1b", 1, None, marks=pytest.mark.slow),
    pytest.param((2,), "interleaved_1f1b", 2, ["0", "1", "2"], marks=pytest.mark.slow),
    pytest.param((2,), "zero_bubble_v", 2, {"0": "full", "1": "full", "3": "selective"}, marks=pytest.mark.slow),
]


@pytest.mark.wide
@pytest.mark.parametrize(("shape", "schedule", "per_rank", "layers"), STAGES, ids=str)
def test_stages_recompute_layers(
    shape: tuple[int, ...], schedule: str, per_rank: int, layers: list[str] | dict[str, str] | None
) -> None:
    ranks = run_on_ranks(_train_stages, shape, schedule, per_rank, layers, world_size=torch.Size(shape).numel())
    for found in ranks:
        assert found["worst"] < 1e-12
        assert found["as predicted"] and found["kept in the file"]
        assert "Recomputed in the backward" in found["explained"]
        if layers is None:
            assert found["layers"] and found["memory"] <= found["limit"]
    ours, plain = ranks[0]["peaks"]  # of the rank that holds most microbatches
    assert ours < 0.8 * plain, (ours, plain)
