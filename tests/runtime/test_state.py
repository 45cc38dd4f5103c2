"""Parameters and buffers at rest: names, layouts, loading and saving, meta models; and the kinds of calls.

Layouts at rest are forced by plans edited from a searched one, so that every layout that plans produce is met.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.distributed import run_distributed
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


@pytest.mark.parametrize("mix", MIXES)
def test_state_of_every_layout(mix: str, tmp_path) -> None:
    shape, _ = MIXES[mix]
    for results in run_distributed(_state, mix, str(tmp_path), world_size=torch.Size(shape).numel()):
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
    for results in run_distributed(_tied_state, world_size=2):
        assert results["names"] and results["once"] and results["one tensor"] and results["still one"]
        assert results["loaded"] == 0.0 and results["either name sets both"] == 0.0
        assert "Missing key" in results["one name"], "as in plain torch"


# ----------------------------------------------------------------------------------------------------------- buffers


class Normed(nn.Module):
    """Batch norm, a buffer that is not saved, and a buffer that the model itself changes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.bn = nn.BatchNorm1d(8)
        self.down = nn.Linear(8, 4)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8), persistent=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.add_(1)
        return self.down(self.bn(self.up(x * self.scale)))


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


@pytest.mark.parametrize("plan", ["fsdp", "auto"])
def test_buffers_equal_one_process_and_each_other(plan: str) -> None:
    ranks = run_distributed(_buffers, plan, world_size=4)
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


@pytest.mark.parametrize("late", [False, True], ids=["example inputs", "first call"])
@pytest.mark.parametrize("kind", [NormedNet, Tied], ids=lambda k: k.__name__)
def test_a_meta_model_is_materialised_shard_by_shard(kind: type[nn.Module], late: bool) -> None:
    inputs = tied_batch(0) if kind is Tied else batch(0, dtype=torch.float32)
    loss = tied_loss if kind is Tied else F.mse_loss
    for results in run_distributed(_meta, "fsdp", kind, inputs, loss, late, world_size=4):
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
    for messages in run_distributed(_meta_without_reset, world_size=2):
        for message in messages:
            assert "inner.1" in message and "_Scale" in message and "factor" in message, message
            assert "no reset_parameters()" in message


# --------------------------------------------------------------------------------------------------- kinds of calls


def _modes() -> dict[str, Any]:
    import autoparallel

    results: dict[str, Any] = {}
    model, plain = compiled_pair(Normed, 2, plan="fsdp")
    x, y = batch(0)
    model.eval(), plain.eval()
    with torch.no_grad():
        out = model(x)
    results["eval first"] = off(out, plain(x))
    results["plain and whole"] = type(out) is Tensor and not out.requires_grad
    results["layouts"] = placements(model)
    model.train(), plain.train()
    model(x, y).backward()
    F.mse_loss(plain(x), y).backward()
    results["then train"] = gradients_off(model, plain)
    results["kept"] = placements(model) == results["layouts"]
    trained, _ = compiled_pair(Normed, 2, plan="fsdp", example_inputs=(x, y))
    results["as planned for training"] = placements(trained) == results["layouts"]
    results["flags"] = [m.training for m in model.modules()] == [m.training for m in plain.modules()]
    model.bn.eval(), plain.bn.eval()
    results["one layer in eval"] = max(
        off(model(x, y), F.mse_loss(plain(x), y)), off(model.bn.running_mean, plain.bn.running_mean)
    )
    model.train(), plain.train()

    # outputs: plain, whole and differentiable where there is no loss
    model.zero_grad(), plain.zero_grad()
    out = model(x)
    results["differentiable"] = off(out, plain(x))
    F.mse_loss(out, y).backward()
    F.mse_loss(plain(x), y).backward()
    results["a loss outside"] = gradients_off(model, plain)
    results["type outside"] = type(out) is Tensor
    del autoparallel
    return results


def test_modes() -> None:
    for results in run_distributed(_modes, world_size=2):
        assert all(v for v in results.values() if isinstance(v, bool)), results
        numbers = {k: v for k, v in results.items() if isinstance(v, float)}
        assert not {k: v for k, v in numbers.items() if not v < 1e-12}, numbers
        assert "S0" in results["layouts"].values()


class _CountCaptures:
    """Counts captures; those are what one trace per kind of call is about."""

    def __enter__(self) -> list[int]:
        from autoparallel import planning

        self.module, self.saved, self.count = planning, planning.capture, [0]

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count[0] += 1
            return self.saved(*args, **kwargs)

        planning.capture = counted
        return self.count

    def __exit__(self, *_: object) -> None:
        self.module.capture = self.saved


def _batches(plan: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    model, plain = compiled_pair(Normed, 2, plan=plan)
    with _CountCaptures() as count:
        for rows in (8, 4, 2, 12, 6, 8):
            model.zero_grad(), plain.zero_grad()
            x, y = batch(rows, rows=rows)
            loss = model(x, y)
            loss.backward()
            expected = F.mse_loss(plain(x), y)
            expected.backward()
            results[f"{rows} rows"] = max(off(loss, expected), gradients_off(model, plain))
        results["captures"] = count[0]
        with model.no_sync():
            model(*batch(1))
        results["in no_sync"] = count[0]
        model.up.requires_grad_(False)
        model(*batch(1))
        results["frozen"] = count[0]
        model.up.requires_grad_(True)
        model(*batch(1))
        results["thawed"] = count[0]
        model.eval()
        model(batch(1)[0])
        results["eval"] = count[0]
        model(batch(2, rows=4)[0])
        results["eval again"] = count[0]
    return results


@pytest.mark.parametrize("plan", ["data_parallel", "fsdp", "tensor_parallel"])
def test_a_new_batch_size_needs_no_new_trace(plan: str) -> None:
    for results in run_distributed(_batches, plan, world_size=2):
        numbers = {k: v for k, v in results.items() if isinstance(v, float)}
        assert len(numbers) == 5 and all(v < 1e-12 for v in numbers.values()), numbers
        counts = [results[k] for k in ("captures", "in no_sync", "frozen", "thawed", "eval", "eval again")]
        assert counts == [1, 1, 2, 2, 3, 3], counts


def _batch_of_one_first() -> dict[str, Any]:
    """A first batch of one row, which no rank can have a part of, is no reason for a second trace."""
    model, plain = compiled_pair(Net, 2, plan="tensor_parallel")
    results: dict[str, Any] = {}
    with _CountCaptures() as count:
        for rows in (1, 8, 3):
            model.zero_grad(), plain.zero_grad()
            x, y = batch(rows, rows=rows)
            loss = model(x, y)
            loss.backward()
            expected = F.mse_loss(plain(x), y)
            expected.backward()
            results[f"{rows} rows"] = max(off(loss, expected), gradients_off(model, plain))
        results["captures"] = count[0]
    return results


def test_a_first_batch_of_one() -> None:
    for results in run_distributed(_batch_of_one_first, world_size=2):
        assert results.pop("captures") == 1
        assert all(v < 1e-12 for v in results.values()), results


# --------------------------------------------------------------------------------------------- inputs and outputs


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor, *, shift: Tensor | None = None, scale: float = 1.0, y: Tensor | None = None) -> Any:
        out = self.net(x) * scale
        if shift is not None:
            out = out + shift
        result: dict[str, Any] = {"out": out, "more": (out.sum(-1), [out.relu()]), "count": 2}
        if y is not None:
            result["loss"] = F.mse_loss(out, y)
        return result


def _inputs_and_outputs() -> dict[str, Any]:
    results: dict[str, Any] = {}
    x, y = batch(0)
    shift = batch(1)[1]
    mesh = mesh_of(2)
    for outputs in ("auto", "gather", "sharded"):
        model, plain = compiled_pair(Keywords, 2, plan="data_parallel", loss_fn=None, outputs=outputs)
        a, b = model(x, shift=shift, scale=2.0), plain(x, shift=shift, scale=2.0)
        name = f"{outputs}, no loss"
        results[f"{name}: values"] = max(
            off(a["out"], b["out"]), off(a["more"][0], b["more"][0]), off(a["more"][1][0], b["more"][1][0])
        )
        results[f"{name}: form"] = list(a) == list(b) and type(a["more"]) is tuple and a["count"] == 2
        results[f"{name}: sharded"] = isinstance(a["out"], DTensor)
        results[f"{name}: flows"] = a["out"].requires_grad
        if outputs != "sharded":
            (a["out"] ** 2).sum().backward()
            (b["out"] ** 2).sum().backward()
            results[f"{name}: gradients"] = gradients_off(model, plain)
        a, b = model(x, scale=3.0, y=y), plain(x, scale=3.0, y=y)
        name = f"{outputs}, loss"
        results[f"{name}: values"] = max(off(a["loss"], b["loss"]), off(a["out"], b["out"]))
        results[f"{name}: sharded"] = isinstance(a["out"], DTensor)
        results[f"{name}: detached"] = not a["out"].requires_grad and a["loss"].requires_grad
        results[f"{name}: plain loss"] = type(a["loss"]) is Tensor
        model.zero_grad(), plain.zero_grad()
        a["loss"].backward(), b["loss"].backward()
        results[f"{name}: gradients"] = gradients_off(model, plain)
        # a model with sharded inputs
        model.zero_grad(), plain.zero_grad()
        rows = [distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None) for t in (x, y)]
        a, b = model(rows[0], scale=3.0, y=rows[1]), plain(x, scale=3.0, y=y)
        a["loss"].backward(), b["loss"].backward()
        results[f"{outputs}, DTensor inputs"] = max(off(a["loss"], b["loss"]), gradients_off(model, plain))
    return results


@pytest.fixture(scope="module")
def inputs_and_outputs() -> list[dict[str, Any]]:
    return run_distributed(_inputs_and_outputs, world_size=2)


@pytest.mark.parametrize("outputs", ["auto", "gather", "sharded"])
def test_inputs_and_outputs(outputs: str, inputs_and_outputs) -> None:
    for everything in inputs_and_outputs:
        results = {k: v for k, v in everything.items() if k.startswith(outputs)}
        numbers = {k: v for k, v in results.items() if isinstance(v, float)}
        assert numbers and all(v < 1e-12 for v in numbers.values()), numbers
        assert results[f"{outputs}, no loss: form"]
        assert results[f"{outputs}, no loss: sharded"] == (outputs == "sharded")
        assert results[f"{outputs}, no loss: flows"]
        assert results[f"{outputs}, loss: sharded"] == (outputs != "gather")
        assert results[f"{outputs}, loss: detached"] and results[f"{outputs}, loss: plain loss"]


class Odd(nn.Module):
    """Returns what it computes twice, its input, a parameter, a buffer, nothing and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 4)
        self.register_buffer("table", torch.ones(3))

    def forward(self, x: Tensor, factor: Tensor | None = None) -> Any:
        y = self.lin(x) if factor is None else self.lin(x) * factor
        return y, y, x, self.lin.bias, self.table, None, 3


def two_losses(out: Tensor, y: Tensor) -> Any:
    return F.mse_loss(out, y), {"l1": F.l1_loss(out, y), "worst": (out - y).abs().amax().detach(), "out": out}


def _odd_outputs() -> dict[str, Any]:
    results: dict[str, Any] = {}
    x, y = batch(0)
    model, plain = compiled_pair(Odd, 2, plan="fsdp", loss_fn=None)
    factor = torch.tensor(2.0, dtype=torch.float64)
    a, b = model(x, factor), plain(x, factor)
    results["values"] = max(off(u, v) for u, v in zip(a[:5], b[:5], strict=True))
    results["constants"] = 0.0 if a[5:] == (None, 3) else 1.0
    for out in (a, b):
        ((out[0] ** 2).sum() + (out[1] * out[3]).sum()).backward()
    results["gradients"] = gradients_off(model, plain)
    model, plain = compiled_pair(Net, 2, plan="fsdp", loss_fn=two_losses)
    a, b = model(x, y), two_losses(plain(x), y)
    results["losses"] = max(off(a[0], b[0]), *(off(a[1][k], b[1][k]) for k in b[1]))
    results["beside a loss"] = 1.0 if a[1]["out"].requires_grad else 0.0
    (a[0] + 2 * a[1]["l1"]).backward(), (b[0] + 2 * b[1]["l1"]).backward()
    results["of two losses"] = gradients_off(model, plain)
    model.zero_grad(), plain.zero_grad()
    model(x, y)[1]["l1"].backward(), two_losses(plain(x), y)[1]["l1"].backward()
    results["of one of two"] = gradients_off(model, plain)
    return results


def test_odd_outputs() -> None:
    for results in run_distributed(_odd_outputs, world_size=2):
        assert all(v < 1e-12 for v in results.values()), results


def _without_gradients(how: str) -> dict[str, float]:
    """What is captured without gradients is used with them."""
    mode = torch.inference_mode if how == "inference_mode" else torch.no_grad
    model, plain = compiled_pair(Normed, 2, plan="fsdp")
    x, y = batch(0)
    results: dict[str, float] = {}
    with mode():
        results["first"] = off(model(x, y), F.mse_loss(plain(x), y))
        model.eval(), plain.eval()
        results["eval"] = off(model(x), plain(x))
    for m in (model, plain):
        m.train()
    loss = model(x, y)
    loss.backward()
    expected = F.mse_loss(plain(x), y)
    expected.backward()
    results["then"] = max(off(loss, expected), gradients_off(model, plain))
    for m in (model, plain):
        torch.optim.SGD(m.parameters(), lr=0.1).step()
    results["step"] = parameters_off(model, plain)
    results["buffers"] = max(off(dict(model.named_buffers())[n], b) for n, b in plain.named_buffers())
    return results


@pytest.mark.parametrize("how", ["no_grad", "inference_mode"])
def test_a_first_call_without_gradients(how: str) -> None:
    for results in run_distributed(_without_gradients, how, world_size=2):
        assert all(v < 1e-12 for v in results.values()), results


def _rows_of_each_rank(plan: str) -> dict[str, float]:
    """Each rank passes its own rows as a DTensor, sharded over the data axis only."""
    mesh = mesh_of(2, 2)
    model, plain = compiled_pair(Net, 2, 2, plan=plan)
    results: dict[str, float] = {}
    for step in range(2):
        x, y = batch(step)
        mine = mesh.get_coordinate()[0]
        rows = [DTensor.from_local(t.chunk(2)[mine], mesh, [Shard(0), Replicate()], run_check=False) for t in (x, y)]
        model.zero_grad(), plain.zero_grad()
        loss = model(*rows)
        loss.backward()
        expected = F.mse_loss(plain(x), y)
        expected.backward()
        results[f"{step}"] = max(off(loss, expected), gradients_off(model, plain))
        loss = model(x, y)
        results[f"{step} plain"] = off(loss, expected)
    return results


@pytest.mark.parametrize("plan", ["fsdp", "tensor_parallel", "auto"])
def test_rows_of_each_rank_equal_the_global_batch(plan: str) -> None:
    for results in run_distributed(_rows_of_each_rank, plan, world_size=4):
        assert all(v < 1e-12 for v in results.values()), results


def _early() -> dict[str, Any]:
    """What may be done before the first call, and that it holds after it."""
    results: dict[str, Any] = {}
    model, plain = compiled_pair(Net, 2, plan="fsdp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01)
    state = {n: v.clone() for n, v in make(Net, seed=4).state_dict().items()}
    model.load_state_dict(state), plain.load_state_dict(state)
    results["plan"] = raised(lambda: model.plan)
    results["names"] = [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    results["whole before"] = set(placements(model).values()) == {"R"}
    for step in range(2):
        x, y = batch(step)
        model(x, y).backward(), F.mse_loss(plain(x), y).backward()
        for o in (optimizer, reference):
            o.step(), o.zero_grad()
    results["stepped"] = parameters_off(model, plain)
    results["sharded after"] = "S0" in placements(model).values()
    results["states"] = all(
        s["exp_avg"].placements == p.placements for p, s in optimizer.state.items() if isinstance(p, DTensor)
    )
    planned, _ = compiled_pair(Net, 2, plan="fsdp", example_inputs=batch(0))
    results["planned at once"] = placements(planned) == placements(model) and "dp" in planned.plan.explain()
    results["repr"] = "dp=2" in repr(model) and "(up): Linear" in repr(model)
    results["attributes"] = model.up is plain.up or model.up.in_features == 8
    return results


def test_before_the_first_call() -> None:
    for results in run_distributed(_early, world_size=2):
        assert "no plan yet" in results["plan"]
        assert all(v for v in results.values() if isinstance(v, bool)), results
        assert results["stepped"] < 1e-12


def test_without_a_mesh_and_without_a_launcher() -> None:
    script = """
        import torch, torch.nn.functional as F
        from torch import nn
        import autoparallel
        torch.manual_seed(0)
        plain = nn.Linear(4, 2)
        model = nn.Linear(4, 2)
        model.load_state_dict(plain.state_dict())
        model = autoparallel.compile(model, loss_fn=F.mse_loss)
        x, y = torch.randn(3, 4), torch.randn(3, 2)
        model(x, y).backward()
        F.mse_loss(plain(x), y).backward()
        for a, b in zip(model.parameters(), plain.parameters()):
            assert torch.allclose(a.grad.full_tensor(), b.grad), (a.grad, b.grad)
        norm = model.clip_grad_norm_(0.1)
        assert torch.allclose(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        print("mesh", model.plan.mesh)
        print(len(model.plan.explain()) > 0)
    """
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "mesh (('dp', 1),)" in done.stdout and "True" in done.stdout
