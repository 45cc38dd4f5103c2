"""The mesh that the search chooses: which factorisations there are, what is compared, and that the choice is run."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autoparallel
from autoparallel.comm.world import Axes
from autoparallel.data import from_data, to_data
from autoparallel.decisions.meshes import Alternative, MeshChoice
from autoparallel.decisions.parameters import PlanError
from autoparallel.hardware import CPU, H100, Profile
from autoparallel.plan import Plan
from autoparallel.planner import layouts
from autoparallel.planner.candidates import evaluation
from autoparallel.planner.candidates.evaluation import Evaluator
from autoparallel.planner.candidates.meshes import MeshSearch, distinct, factored, inside, splits, stage_meshes
from autoparallel.planner.draft import call_of
from autoparallel.planner.planner import Planner
from autoparallel.planner.request.request import Request
from autoparallel.planner.space.problem import Problem
from autoparallel.planner.thresholds import THRESHOLDS
from autoparallel.tools.cli import main
from tests.captures import draft
from tests.distributed import run_distributed
from tests.runtime.support import SideBySide, off


class Deep(nn.Module):
    """Linear layers and tanh, one after the other."""

    def __init__(self, width: int = 16, layers: int = 4, norm: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.norm(x)


class WithLoss(Deep):
    """Returns its outputs beside the loss."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        out = super().forward(x)
        return {"loss": out.square().mean(), "out": out}


def _search(
    model: nn.Module,
    devices: int,
    profile: Profile = CPU,
    rows: int = 16,
    loss: Any = F.mse_loss,
    width: int = 16,
    **options: Any,
) -> MeshSearch:
    x = torch.empty(rows, width)
    call = call_of((x, x) if loss else (x,), with_target=loss is not None)
    request = Request((("dp", devices),), profile, loss_fn=loss, **options)
    captured = Planner(model, request).capture(call)
    return MeshSearch(request, captured, call, devices)


# ------------------------------------------------------------------------------------------------------ factorisations


def test_every_factorisation_is_found_once() -> None:
    for devices in (1, 7, 12, 64):
        for axes in (1, 2, 3):
            found = factored(devices, axes)
            every = [
                (a, b, devices // (a * b))
                for a in range(1, devices + 1)
                for b in range(1, devices + 1)
                if devices % (a * b) == 0
            ]
            kept = {t[3 - axes :] for t in every if all(n == 1 for n in t[: 3 - axes])}
            kept = {t for t in kept if axes == 1 or min(t) > 1}
            assert sorted(found) == sorted(kept)


def test_axes_in_another_order_are_another_mesh_only_where_they_cross_nodes() -> None:
    assert distinct(factored(8, 2), CPU) == [(4, 2)]
    assert distinct(factored(64, 2), H100) == [(32, 2), (16, 4), (8, 8), (4, 16), (2, 32)]
    assert [s for s in factored(64, 2) if inside(s, H100)] == [(32, 2), (16, 4), (8, 8)]
    assert all(math.prod(s) == 64 and inside(s, H100) for s in splits((8, 8), H100))
    assert splits((8, 8), H100)[0] == (4, 2, 8)  # along nodes, the most even


@pytest.mark.wide
def test_searches_are_bounded_and_what_was_not_tried_is_listed() -> None:
    search = _search(Deep(), 64, H100, rows=64)
    priced: list[Any] = []
    choice = search.choose(lambda price, meshes: priced.extend(meshes) or [price(m) for m in meshes])  # type: ignore[func-returns-value]
    plain = {m for m in priced if m[0][0] != "pp"}
    assert len(plain) <= 1 + THRESHOLDS.two_axes + THRESHOLDS.three_axes
    assert len(priced) - len(plain) <= THRESHOLDS.pipelines
    assert sorted(priced) == sorted(a.mesh for a in choice.tried)
    shapes = {tuple(n for _, n in mesh) for mesh in [*plain, *(m for m in choice.untried if m[0][0] != "pp")]}
    assert shapes == {s for axes in (1, 2, 3) for s in distinct(factored(64, axes), H100)}
    assert not set(priced) & set(choice.untried)


# ------------------------------------------------------------------------------------------------------------- choices


@pytest.mark.wide
def test_a_mesh_is_searched_no_further_than_tells_that_it_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    model, limit = Deep(width=64, layers=8), 2.5e6
    options = {"rows": 4096, "width": 64, "memory_limit": limit}
    search = replace(_search(model, 4, H100, **options), refusal="none is asked for")
    limits: set[float | None] = set()

    def cheapest(problem: Problem, memory_limit: float | None = None, *rest: Any, **how: Any) -> Plan:
        limits.add(memory_limit)
        return layouts.cheapest(problem, memory_limit, *rest, **how)

    monkeypatch.setattr(evaluation, "cheapest", cheapest)
    meshes: list[Axes] = [(("dp", 4),), (("dp", 2), ("tp", 2))]
    whole = {mesh: search.price(mesh) for mesh in meshes}
    assert limits == {None, limit}
    limits.clear()
    late = search.price(meshes[1], below=1e-9)
    assert limits == {None}
    assert late.seconds is not None and late.memory is not None and late.memory > limit  # it need not fit
    choice = search.choose()
    assert choice.tried[0] == min(whole.values(), key=lambda a: a.seconds_within(limit))
    assert {a.mesh for a in choice.tried} == {*meshes}

    monkeypatch.setattr(evaluation, "cheapest", None)  # what was searched is not searched again
    planner, evaluator = Planner(model, search.request.on(choice.mesh)), search.evaluator(choice.mesh)
    plan = planner.search(search.captured, search.call, evaluator=evaluator)
    assert evaluator.forecast(plan).seconds == choice.tried[0].seconds


def test_the_choice_is_the_cheapest_and_survives_a_file() -> None:
    choice = _search(Deep(), 8).choose()
    able = [a for a in choice.tried if a.seconds is not None]
    assert choice.mesh == min(able, key=lambda a: a.seconds).mesh  # type: ignore[arg-type, return-value]
    assert choice.best(staged=True) is not None
    assert from_data(MeshChoice, json.loads(json.dumps(to_data(choice), default=to_data))) == choice


def test_prices_are_those_of_the_plan_that_a_given_mesh_gets() -> None:
    model = Deep()
    search = _search(model, 4)
    for alternative in search.choose().tried:
        if not alternative.staged:
            planner = Planner(model, replace(search.request, axes=alternative.mesh))
            evaluator = Evaluator(planner.request, search.captured, search.call)
            plan = planner.search(search.captured, search.call)
            assert evaluator.forecast(plan).seconds == pytest.approx(alternative.seconds)


@pytest.mark.wide
def test_a_pipeline_must_not_change_results_unasked() -> None:
    for model, loss, why in ((Deep(norm=True), F.mse_loss, "batch statistics"), (WithLoss(), None, "beside the loss")):
        choice = _search(model, 4, loss=loss).choose()
        staged = choice.best(staged=True)
        assert staged is not None and why in staged.problem
        assert choice.mesh[0][0] != "pp"
    assert _search(Deep(), 4, loss=None).choose().best(staged=True) is None  # no loss, no pipeline


@pytest.mark.parametrize("seconds", [0.5, 2.0, None], ids=["gains", "gains nothing", "has no plan"])
def test_a_pipeline_that_is_not_taken_is_looked_at_while_it_gains(
    seconds: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged: list[Axes] = []

    def price(_: MeshSearch, mesh: Axes, below: float = math.inf) -> Alternative:
        if mesh[0][0] != "pp":
            return Alternative(mesh, 1.0)
        staged.append(mesh)
        return Alternative(mesh, seconds, problem="it is not taken" if seconds else "no plan")

    monkeypatch.setattr(MeshSearch, "price", price)
    choice = _search(WithLoss(), 8, loss=None).choose()
    assert choice.mesh == (("dp", 8),)
    every = [mesh for ranks in (2, 4, 8) for mesh in stage_meshes(8, ranks, 2, CPU)]
    assert staged == {0.5: every, 2.0: every[:1], None: every[:2]}[seconds]
    assert [mesh for mesh in choice.untried if mesh[0][0] == "pp"] == every[len(staged) :]


@pytest.mark.wide
def test_what_fits_a_device_goes_before_what_is_faster() -> None:
    fast, small = Alternative((("dp", 4),), 1.0, 90e9), Alternative((("pp", 4), ("dp", 1)), 2.0, 20e9)
    refused = Alternative((("pp", 2), ("dp", 2)), 0.5, 10e9, problem="changes results")
    none = Alternative((("dp", 2), ("tp", 2)), problem="no plan")
    every = [none, refused, fast, small]
    assert sorted(every, key=lambda a: a.order(80e9)) == [small, fast, refused, none]
    assert sorted(every, key=lambda a: a.order(None)) == [fast, small, refused, none]
    with pytest.raises(PlanError, match=r"(?s)no mesh of 4 devices has a plan:\n  \(dp=4\): .*raise memory_limit"):
        _search(Deep(), 4, memory_limit=100.0).choose()


def test_a_pipeline_that_is_asked_for_and_cannot_be() -> None:
    with pytest.raises(PlanError, match="cannot be a pipeline: this call makes no loss"):
        _search(Deep(), 4, loss=None, pipeline=autoparallel.Pipeline()).choose()


# ------------------------------------------------------------------------------------------------------- on real ranks


def _train(kind: str, path: str) -> dict[str, Any]:
    """Three steps beside the plain model; then once more by the saved plan, with a search that raises."""
    torch.manual_seed(0)
    model = Deep().double()
    plain, again = copy.deepcopy(model), copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (4,)) if kind == "unnamed" else None
    pipeline = autoparallel.Pipeline(schedule="1f1b") if kind == "pipeline" else None
    module = autoparallel.compile(model, mesh, loss_fn=F.mse_loss, pipeline=pipeline)
    both = SideBySide(module, plain)
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(16, 16, generator=generator, dtype=torch.float64) for _ in range(2))
    if kind == "eval":
        module.eval()
        with torch.no_grad():
            assert off(module(x, y), F.mse_loss(plain(x), y)) < 1e-12
        module.train()
    for _ in range(3):
        both.backward(module(x, y), F.mse_loss(plain(x), y))
        both.step()
    plan, names = module.plan, dict(module.named_parameters())
    module.plan.save(f"{path}.{torch.distributed.get_rank()}")
    kept, evaluation.cheapest = evaluation.cheapest, None  # type: ignore[assignment]
    try:
        saved = autoparallel.compile(
            again, plan=Plan.load(f"{path}.{torch.distributed.get_rank()}"), loss_fn=F.mse_loss
        )
        loss = saved(x, y)
    finally:
        evaluation.cheapest = kept
    torch.manual_seed(0)
    both.see(loss, F.mse_loss(Deep().double()(x), y))
    meshes = {p.device_mesh.mesh_dim_names for p in names.values()}  # type: ignore[union-attr]
    return {
        "worst": both.worst, "mesh": plan.whole_mesh, "again": saved.plan.whole_mesh, "names": meshes,
        "plan": plan.to_json(), "text": plan.explain(),
    }  # fmt: skip


@pytest.mark.wide_where(lambda kind: kind == "pipeline")
@pytest.mark.parametrize(
    "kind", ["open", "pipeline", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("eval", "unnamed"))]
)
def test_the_chosen_mesh_is_the_one_that_trains(kind: str, tmp_path: Path) -> None:
    results = run_distributed(_train, kind, str(tmp_path / "plan"), world_size=4)
    first = results[0]
    for result in results:
        assert result["worst"] < 1e-9
        assert result["plan"] == first["plan"]
    plan = Plan.from_json(first["plan"])
    assert plan.choice is not None and plan.choice.mesh == plan.whole_mesh == first["again"]
    assert (plan.pipeline is not None) == (kind == "pipeline")
    assert first["names"] == {tuple(name for name, _ in plan.mesh)}
    assert "The mesh was chosen by" in first["text"]


def _refused() -> list[str]:
    """What is not open: a preset, pins, a saved plan for other ranks."""
    model, said = Deep(), []
    named = autoparallel.compile(Deep(), plan="data_parallel", loss_fn=F.mse_loss)
    named.prepare(torch.zeros(8, 16), torch.zeros(8, 16))
    said.append(str(named.plan.whole_mesh))
    pinned = autoparallel.compile(Deep(), pins={"*.weight": ("S0",)}, loss_fn=F.mse_loss)
    pinned.prepare(torch.zeros(8, 16), torch.zeros(8, 16))
    said.append(str(pinned.plan.whole_mesh))
    request = Request((("dp", 4), ("tp", 2)), CPU, loss_fn=F.mse_loss)
    x = torch.empty(16, 16)
    plan = draft(Deep(), call_of((x, x), with_target=True), request).plan
    for options in ({"plan": plan}, {"mesh": init_device_mesh("cpu", (2,)), "plan": "fsdp"}):
        try:
            autoparallel.compile(model, **options)  # type: ignore[arg-type]
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.mark.wide
def test_what_is_named_keeps_its_meaning() -> None:
    preset, pinned, plan, unnamed = run_distributed(_refused, world_size=2)[0]
    assert preset == pinned == "(('dp', 2),)"
    assert "the plan is for the mesh (dp=4, tp=2) of 8 ranks, the world has 2" in plan
    assert "the mesh has no axis names" in unnamed


# ------------------------------------------------------------------------------------------------------ without ranks


def test_devices_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, page = tmp_path / "plan.json", tmp_path / "plan.html"
    arguments = ["plan", "--model", "tests.plan_factories:net", "--batch", "16", "--compare", "none"]
    assert main([*arguments, "--mesh", "auto:8", "--hardware", "cpu", "--out", str(out), "--report", str(page)]) == 0
    said, plan = capsys.readouterr().out, Plan.load(out)
    assert plan.choice is not None and plan.choice.mesh == plan.whole_mesh
    assert "Best pipeline: (pp=" in said and "The mesh was chosen by" in page.read_text()
    with pytest.raises(SystemExit):
        main([*arguments, "--devices", "8", "--mesh", "8"])
    with pytest.raises(SystemExit):
        main([*arguments, "--devices", "8", "--plan", "fsdp"])
    assert "give --mesh" in capsys.readouterr().err


def test_a_pipeline_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, page = tmp_path / "plan.json", tmp_path / "plan.html"
    arguments = ["plan", "--model", "tests.plan_factories:net", "--batch", "16", "--compare", "fsdp", "--explain"]
    written = ["--out", str(out), "--report", str(page)]
    assert main([*arguments, "--mesh", "pp=2,dp=2", "--hardware", "cpu", *written]) == 0
    said, plan = capsys.readouterr().out, Plan.load(out)
    assert plan.pipeline is not None and plan.whole_mesh == (("pp", 2), ("dp", 2))
    assert "Pipeline over pp=2" in said and "fsdp" in said
    assert main([*arguments[:-1], "--mesh", "pp=2,dp=2", "--hardware", "cpu", "--plan", str(out)]) == 0
