"""Parameters and buffers at rest: names, layouts, loading and saving, meta models.

Layouts at rest are forced by plans edited from a searched one, so that every layout that plans produce is met.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.runtime.support import (
    Net,
    batch,
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
from tests.runtime.test_gradients import Tied, tied_batch, tied_loss


def laid_out(layouts: dict[str, str], *shape: int, build: Callable[[], nn.Module] = Net, **options: Any) -> Any:
    """A compiled model whose parameters lie as said, by name; "*" stands for all others."""
    import autoparallel
    from autoparallel.plan import Plan

    data = json.loads(_searched(build, *shape))
    for name, parameter in data["parameters"].items():
        parameter["at_rest"] = layouts.get(name, layouts.get("*", parameter["at_rest"]))
    plan = Plan.from_json(json.dumps(data))
    options = {"loss_fn": F.mse_loss, "example_inputs": batch(0), **options}
    return autoparallel.compile(make(build), mesh_of(*shape), plan=plan, **options)


@functools.cache
def _searched(build: Callable[[], nn.Module], *shape: int) -> str:
    """A plan's text; kept, because the same worker is asked for it many times."""
    return compiled_pair(build, *shape, plan="data_parallel", example_inputs=batch(0))[0].plan.to_json()


@functools.cache
def _elsewhere(*shape: int) -> tuple[Any, nn.Module]:
    """A model on another mesh, to load into."""
    return compiled_pair(Net, *shape, plan="fsdp", example_inputs=batch(0))


MIXES: dict[str, tuple[tuple[int, ...], dict[str, str]]] = {
    "whole": ((2,), {"*": "I"}),
    "rows": ((2,), {"*": "S0"}),
    "columns": ((2,), {"*": "I", "up.weight": "S1", "down.weight": "S1"}),
    "two axes on one dim": ((2, 2), {"*": "S0,S0"}),
    "two axes on two dims": ((2, 2), {"*": "I,S0", "up.weight": "S0,S1", "down.weight": "S1,S0"}),
    "second axis only": ((2, 2), {"*": "I,I", "up.weight": "I,S1", "up.bias": "I,S0"}),
    "a mix": ((2, 2), {"*": "S0,I", "up.weight": "S1,S1", "norm.bias": "I,I", "down.weight": "S0,S0"}),
}


def _state(mix: str, directory: str) -> dict[str, Any]:
    shape, layouts = MIXES[mix]
    results: dict[str, Any] = {}
    model = laid_out(layouts, *shape)
    names = list(make(Net).state_dict())
    expected = {
        n: torch.randn(v.shape, dtype=v.dtype, generator=torch.Generator().manual_seed(5))
        for n, v in make(Net).state_dict().items()
    }
    results["names"] = list(model.state_dict()) == names == [n for n, _ in model.named_parameters()]
    results["layouts"] = {n: placements(model)[n] for n in names}
    asked = {n: layouts.get(n, layouts["*"]).replace("I", "R") for n in names}
    results["as planned"] = results["layouts"] == asked
    results["values"] = max(off(v, make(Net).state_dict()[n]) for n, v in model.state_dict().items())

    report = model.load_state_dict(expected)
    results["plain"] = max(off(v, expected[n]) for n, v in model.state_dict().items())
    results["report"] = not report.missing_keys and not report.unexpected_keys
    results["kept"] = placements(model) == results["layouts"]

    mesh = mesh_of(*shape)
    other = [Shard(0)] + [Replicate()] * (len(shape) - 1)
    twice = {n: distribute_tensor(2 * v, mesh, other, src_data_rank=None) for n, v in expected.items()}
    model.load_state_dict(twice)
    results["DTensors"] = max(off(v, 2 * expected[n]) for n, v in model.state_dict().items())
    own = {n: v.detach().clone() for n, v in model.state_dict().items()}
    model.load_state_dict(expected), model.load_state_dict(own)
    results["own"] = max(off(v, 2 * expected[n]) for n, v in model.state_dict().items())

    # torch.distributed.checkpoint, there and back, and into a model that lies otherwise
    path = os.path.join(directory, mix.replace(" ", "_"))
    dcp.save({"model": model.state_dict()}, checkpoint_id=path)
    model.load_state_dict(expected)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    results["checkpoint"] = max(off(v, 2 * expected[n]) for n, v in model.state_dict().items())
    if dist.get_world_size() == 4:
        for elsewhere in ((4,), (2, 2)):
            target, plain = _elsewhere(*elsewhere)
            target.zero_grad(), plain.zero_grad()
            state = {"model": target.state_dict()}
            dcp.load(state, checkpoint_id=path)
            target.load_state_dict(state["model"])
            plain.load_state_dict({n: 2 * v for n, v in expected.items()})
            results[f"checkpoint on {elsewhere}"] = parameters_off(target, plain)
            target(*batch(1)).backward()
            x, y = batch(1)
            F.mse_loss(plain(x), y).backward()
            results[f"trains on {elsewhere}"] = gradients_off(target, plain)
    bad = {**expected, "up.weight": torch.zeros(4, 4, dtype=torch.float64)}
    results["wrong shape"] = raised(lambda: model.load_state_dict(bad))
    bad = {n: v for n, v in expected.items() if n != "up.weight"}
    results["missing"] = raised(lambda: model.load_state_dict(bad))
    return results


@pytest.mark.wide_where(lambda mix: mix not in ("rows", "columns"))
@pytest.mark.parametrize("mix", MIXES)
def test_state_of_every_layout(mix: str, tmp_path) -> None:
    shape, _ = MIXES[mix]
    for results in run_on_ranks(_state, mix, str(tmp_path), world_size=torch.Size(shape).numel()):
        assert results["names"] and results["report"] and results["kept"]
        assert results["as planned"], results["layouts"]
        numbers = {k: v for k, v in results.items() if isinstance(v, float)}
        assert len(numbers) >= 5 and all(v < 1e-12 for v in numbers.values()), numbers
        assert "size mismatch" in results["wrong shape"] and "up.weight" in results["wrong shape"]
        assert "Missing key" in results["missing"]


def _tied_state() -> dict[str, Any]:
    results: dict[str, Any] = {}
    model, plain = compiled_pair(Tied, 2, plan="fsdp", loss_fn=tied_loss, example_inputs=tied_batch(0))
    names = list(plain.state_dict())
    results["names"] = list(model.state_dict()) == names and "tok.weight" in names and "head.weight" in names
    results["once"] = [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    results["one tensor"] = model.tok.weight is model.head.weight
    state = {n: torch.full_like(v, float(i + 1)) for i, (n, v) in enumerate(plain.state_dict().items())}
    state["head.weight"] = state["tok.weight"]
    model.load_state_dict(state), plain.load_state_dict(state)
    results["loaded"] = parameters_off(model, plain)
    results["still one"] = model.tok.weight is model.head.weight
    only = {n: v + 1 for n, v in state.items() if n != "head.weight"}
    results["one name"] = raised(lambda: model.load_state_dict(only))
    model.load_state_dict(only, strict=False)
    results["either name sets both"] = off(model.head.weight, only["tok.weight"])
    return results


def test_both_names_of_a_tied_weight() -> None:
    for results in run_on_ranks(_tied_state, world_size=2):
        assert results["names"] and results["once"] and results["one tensor"] and results["still one"]
        assert results["loaded"] == 0.0 and results["either name sets both"] == 0.0
        assert "Missing key" in results["one name"], "as in plain torch"


# ----------------------------------------------------------------------------------------------------------- buffers


class Normed(nn.Module):
    """Batch norm, a buffer that is not saved, one of few bits, and a buffer that the model itself changes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.bn = nn.BatchNorm1d(8)
        self.down = nn.Linear(8, 4)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8), persistent=False)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("places", torch.arange(8, dtype=torch.int16))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.add_(1)
        return self.down(self.bn(self.up(x * self.scale + self.places)))


def _buffers(plan: str) -> dict[str, Any]:
    model, plain = compiled_pair(Normed, 2, 2, plan=plan)
    results: dict[str, Any] = {"names": list(model.state_dict()) == list(plain.state_dict())}
    for step in range(3):
        x, y = batch(step)
        x = x * torch.linspace(0.5, 2, 8, dtype=x.dtype).view(-1, 1) + step
        loss = model(x, y)
        expected = F.mse_loss(plain(x), y)
        results[f"loss {step}"] = off(loss, expected)
        mine = dict(model.named_buffers())
        for name, value in plain.named_buffers():
            results[f"{name} {step}"] = off(mine[name], value)
    with torch.no_grad():
        model(x, y)
        F.mse_loss(plain(x), y)
    results["under no_grad"] = max(off(dict(model.named_buffers())[n], b) for n, b in plain.named_buffers())
    model.eval(), plain.eval()
    results["evaluation"] = off(model(x), plain(x))
    results["not changed"] = max(off(dict(model.named_buffers())[n], b) for n, b in plain.named_buffers())
    results["bits"] = [b.numpy().tobytes() for b in model.buffers()]
    return results


@pytest.mark.wide_where(lambda plan: plan != "fsdp")
@pytest.mark.parametrize("plan", ["fsdp", "auto"])
def test_buffers_equal_one_process_and_each_other(plan: str) -> None:
    ranks = run_on_ranks(_buffers, plan, world_size=4)
    for results in ranks:
        wrong = {k: v for k, v in results.items() if isinstance(v, float) and not v < 1e-12}
        assert not wrong and results["names"], wrong
        assert results["bits"] == ranks[0]["bits"], "the same on every rank, bit for bit"


# ------------------------------------------------------------------------------------------------------- meta models


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 4), _Scale())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class NormedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.bn = nn.BatchNorm1d(4)
        self.net.up.weight.note = "kept"  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.net(x))


def _meta(plan: str, kind: type[nn.Module], inputs: Any, loss: Any, late: bool) -> dict[str, Any]:
    import autoparallel

    results: dict[str, Any] = {}
    torch.manual_seed(11)
    plain = kind()  # every module draws its numbers once, in the order of construction
    with torch.device("meta"):
        model = kind()
    torch.manual_seed(11 if dist.get_rank() == 0 else 99)
    x, y = inputs
    compiled: Any = autoparallel.compile(
        model, mesh_of(2, 2), loss_fn=loss, plan=plan, example_inputs=None if late else (x, y)
    )
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    before = [id(p) for p in compiled.parameters()]
    if late:
        results["still meta"] = all(p.to_local().is_meta for p in compiled.parameters())
        results["load"] = raised(lambda: compiled.load_state_dict(plain.state_dict()))
        compiled.prepare(x, y)
    results["same objects"] = before == [id(p) for p in compiled.parameters()]
    results["values"] = parameters_off(compiled, plain)
    results["buffers"] = max((off(dict(compiled.named_buffers())[n], b) for n, b in plain.named_buffers()), default=0.0)
    value = compiled(x, y)
    value.backward()
    expected = loss(plain(x), y)
    expected.backward()
    results["loss"] = off(value, expected)
    results["gradients"] = gradients_off(compiled, plain)
    optimizer.step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    results["step"] = parameters_off(compiled, plain)
    results["note"] = getattr(next(compiled.parameters()), "note", "kept")
    results["local"] = sum(p.to_local().numel() for p in compiled.parameters())
    results["total"] = sum(p.numel() for p in compiled.parameters())
    results["devices"] = {p.to_local().device.type for p in compiled.parameters()}
    return results


@pytest.mark.wide_where(lambda kind, late: (kind, late) != (Tied, True))
@pytest.mark.parametrize("late", [False, True], ids=["example inputs", "first call"])
@pytest.mark.parametrize("kind", [NormedNet, Tied], ids=lambda k: k.__name__)
def test_a_meta_model_is_materialised_shard_by_shard(kind: type[nn.Module], late: bool) -> None:
    inputs = tied_batch(0) if kind is Tied else batch(0, dtype=torch.float32)
    loss = tied_loss if kind is Tied else F.mse_loss
    for results in run_on_ranks(_meta, "fsdp", kind, inputs, loss, late, world_size=4):
        assert results["same objects"] and results.get("still meta", True)
        assert not late or "meta device" in results["load"] and "example_inputs" in results["load"]
        assert results["values"] == 0.0 and results["buffers"] == 0.0, results
        assert all(results[k] < 1e-5 for k in ("loss", "gradients", "step")), results
        assert results["local"] * 3 < results["total"] and results["devices"] == {"cpu"}
        assert results["note"] == "kept", "attributes of a parameter stay"


def _meta_without_reset() -> list[str]:
    import autoparallel

    with torch.device("meta"):
        model = NoReset()
    compiled: Any = autoparallel.compile(model, mesh_of(2), loss_fn=F.mse_loss, plan="fsdp")
    return [raised(lambda: compiled(*batch(0, dtype=torch.float32))) for _ in range(2)]


def test_a_meta_module_that_cannot_be_reset_is_named() -> None:
    for messages in run_on_ranks(_meta_without_reset, world_size=2):
        for message in messages:
            assert "inner.1" in message and "_Scale" in message and "factor" in message, message
            assert "no reset_parameters()" in message
