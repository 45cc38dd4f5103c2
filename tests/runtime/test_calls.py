"""The kinds of calls: modes, batch sizes, what goes in and what comes out."""

from __future__ import annotations

import copy
import os
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import autoparallel
from autoparallel.plan import Plan
from tests.distributed import open_pool, run_distributed, run_in
from tests.runtime.support import (
    Net,
    SideBySide,
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
from tests.runtime.test_state import Normed

# --------------------------------------------------------------------------------------------------- kinds of calls


def _modes() -> dict[str, Any]:
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
        from autoparallel.planner import planner

        self.module, self.saved, self.count = planner, planner.capture, [0]

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count[0] += 1
            return self.saved(*args, **kwargs)

        planner.capture = counted
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


@pytest.mark.wide_where(lambda plan: plan != "tensor_parallel")
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
        results[f"{name}: refused"] = 'outputs="gather"' in raised(partial(a["out"].sum().backward, retain_graph=True))
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
    return run_on_ranks(_inputs_and_outputs, world_size=2)


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
        assert results[f"{outputs}, loss: refused"] == (outputs == "auto")
        assert results[f"{outputs}, loss: plain loss"]


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
    refusals = [raised(lambda name=name: a[1][name].sum().backward()) for name in ("l1", "out")]
    results["beside a loss"] = 0.0 if all("is not the loss" in text for text in refusals) else 1.0
    a[0].backward(), b[0].backward()
    results["of the loss"] = gradients_off(model, plain)
    model, plain = compiled_pair(Net, 2, plan="fsdp", loss_fn=two_losses, outputs="gather")
    a, b = model(x, y), two_losses(plain(x), y)
    for out in (a, b):
        (out[0] + 2 * out[1]["l1"] + out[1]["out"].exp().mean()).backward()
    results["of two losses"] = gradients_off(model, plain)
    model.zero_grad(), plain.zero_grad()
    model(x, y)[1]["l1"].backward(), two_losses(plain(x), y)[1]["l1"].backward()
    results["of one of two"] = gradients_off(model, plain)
    return results


@pytest.mark.wide
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


@pytest.mark.wide
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


@pytest.mark.slow_where(lambda plan: plan != "auto")
@pytest.mark.parametrize("plan", ["fsdp", "tensor_parallel", "auto"])
def test_rows_of_each_rank_equal_the_global_batch(plan: str) -> None:
    for results in run_on_ranks(_rows_of_each_rank, plan, world_size=4):
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
    for results in run_on_ranks(_early, world_size=2):
        assert "no plan yet" in results["plan"]
        assert all(v for v in results.values() if isinstance(v, bool)), results
        assert results["stepped"] < 1e-12


def _without_a_launcher() -> tuple[float, Any]:
    dist.destroy_process_group()
    assert not os.environ.keys() & {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}
    model, plain = make(Net), make(Net)
    model = autoparallel.compile(model, loss_fn=F.mse_loss)
    x, y = batch()
    model(x, y).backward(), F.mse_loss(plain(x), y).backward()
    both = SideBySide(model, plain)
    both.step()
    assert model.plan.explain()
    return both.worst, model.plan.mesh


def test_without_a_mesh_and_without_a_launcher() -> None:
    with open_pool(1) as pool:  # of its own, as it leaves its process group
        ((worst, mesh),) = run_in(pool, _without_a_launcher)
    assert worst < 1e-12 and mesh == (("dp", 1),)


class _Labelled(nn.Module):
    """As models of transformers are called: ``model(ids, labels=ids)``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.head = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 12)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.up(self.embed(ids)).tanh()
        hidden = hidden + F.scaled_dot_product_attention(hidden, hidden, hidden, is_causal=True)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def _other_calls_of_a_saved_plan(preset: str, microbatches: int) -> dict[str, Any]:
    torch.manual_seed(0)
    plain = _Labelled().double()
    mesh = mesh_of(2)
    ids = torch.arange(32).view(4, 8) % 12
    model = autoparallel.compile(copy.deepcopy(plain), mesh, plan=preset, microbatches=microbatches)
    model.prepare(ids, labels=ids)
    text = model.plan.to_json()
    results = {}
    for rows, length in ((4, 8), (4, 7), (6, 3), (3, 8), (1, 5)):
        ids = torch.arange(rows * length).view(rows, length) * 5 % 12
        calls: dict[str, Any] = {
            "by position": lambda m, ids=ids: m(ids, ids.roll(1)),
            "by keyword": lambda m, ids=ids: m(labels=torch.where(ids > 8, -100, ids), ids=ids),
        }
        for name, call in calls.items():
            given = autoparallel.compile(copy.deepcopy(plain), mesh, plan=Plan.from_json(text))
            plain.zero_grad()
            loss, expected = call(given), call(plain)
            loss.backward(), expected.backward()
            results[f"{rows} x {length} {name}"] = max(off(loss, expected), gradients_off(given, plain))
            alike = [a.placements == b.placements for a, b in zip(model.parameters(), given.parameters(), strict=True)]
            assert all(alike), "parameters lie as the plan says"
    return results


class _Scored(nn.Module):
    """It is also called without a target, and by another method."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(8, width), nn.Linear(width, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(F.gelu(self.up(x))))

    def encode(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class _Deeper(_Scored):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


def _a_saved_plan_behind_another_call() -> dict[str, Any]:
    torch.manual_seed(0)
    plain, mesh = _Scored().double(), mesh_of(2)
    pins = {"down": (Replicate(),), "up.weight": (Shard(0),)}  # what no search would take by itself
    options: dict[str, Any] = {"loss_fn": F.mse_loss, "forward_methods": ("encode",)}
    x, y = torch.rand(2, 4, 8, dtype=torch.float64)
    model = autoparallel.compile(copy.deepcopy(plain), mesh, pins=pins, **options)
    model.prepare(x, y)
    plan = Plan.from_json(model.plan.to_json())
    calls: dict[str, Any] = {
        "evaluation": lambda m: m.eval()(x),
        "evaluation, of a loss": lambda m: m.eval()(x, y) if m is not plain else F.mse_loss(plain.eval()(x), y),
        "evaluation, of odd rows": lambda m: m.eval()(x[:3]),
        "without a target": lambda m: m(x),
        "another method": lambda m: m.encode(x),
    }
    results = {}
    for name, call in calls.items():
        given = autoparallel.compile(copy.deepcopy(plain), mesh, plan=plan, **options)
        with torch.no_grad():
            results[name] = off(call(given), call(plain))
        given.train()
        given(x, y).backward()
        plain.zero_grad()
        F.mse_loss(plain(x), y).backward()
        results[name] = max(results[name], gradients_off(given, plain))
        assert given.plan.operators == plan.operators, name
    for name, other in {"operators": _Deeper(), "shapes": _Scored(15), "parameters": nn.Linear(8, 8)}.items():
        methods = {"forward_methods": ()} if name == "parameters" else {}
        given = autoparallel.compile(other.double(), mesh, plan=plan, **{**options, **methods})
        results[f"other {name}"] = raised(lambda given=given: (given.eval()(x), given.train()(x, y)))
    return results


def test_a_saved_plan_is_carried_out_behind_calls_that_it_is_not_about() -> None:
    for results in run_on_ranks(_a_saved_plan_behind_another_call, world_size=2):
        errors = {name: results.pop(f"other {name}") for name in ("operators", "shapes", "parameters")}
        assert len(results) == 5 and max(results.values()) < 1e-12, results
        assert "the plan is for another model (the model has /aten.tanh#0" in errors["operators"], errors
        assert "the plan is for another model (shapes differ" in errors["shapes"], errors
        assert "the plan is for another model (the plan has up.weight, the model has not)" in errors["parameters"]


@pytest.mark.parametrize(("preset", "microbatches"), [("fsdp", 1), ("data_parallel", 1), ("fsdp", 2)])
def test_a_saved_plan_serves_other_lengths_numbers_of_rows_and_ways_to_call(preset: str, microbatches: int) -> None:
    for results in run_on_ranks(_other_calls_of_a_saved_plan, preset, microbatches, world_size=2):
        assert len(results) == 10 and max(results.values()) < 1e-12, results
