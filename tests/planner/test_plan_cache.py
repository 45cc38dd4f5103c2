"""Plans that are kept from run to run."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from autoparallel import Plan
from autoparallel.hardware import CPU
from autoparallel.planner import planner as planning
from autoparallel.planner.draft import call_of
from autoparallel.planner.plan_cache import PlanCache
from autoparallel.planner.planner import Planner
from autoparallel.planner.request.request import Request, Settled

REQUEST = Request((("dp", 2), ("tp", 2)), CPU)


class Net(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.sum()


def plan_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch, request: Request = REQUEST, width: int = 16, rows: int = 8
) -> tuple[Plan, int]:
    """The plan of a net, and how many searches it took."""
    searches: list[object] = []

    def counted(*args: object) -> object:
        searches.append(args)
        return original(*args)

    original = planning.Evaluator
    with monkeypatch.context() as patch:
        patch.setattr(planning, "Evaluator", counted)
        planner = Planner(Net(width), request, cache=PlanCache(folder))
        call = call_of((torch.randn(rows, width),), {}, False)
        return planner.search(planner.capture(call), call), len(searches)


def test_a_plan_is_searched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, searches = plan_of(tmp_path / "new" / "folder", monkeypatch)
    again, more = plan_of(tmp_path / "new" / "folder", monkeypatch)
    assert (searches, more) == (1, 0)
    assert first == again and first.to_json() == again.to_json()


@pytest.mark.wide
def test_what_the_search_depends_on_is_another_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan_of(tmp_path, monkeypatch)
    for options in (
        {"width": 32},
        {"rows": 16},
        {"request": replace(REQUEST, plan="fsdp")},
        {"request": replace(REQUEST, memory_limit=1e9)},
        {"request": replace(REQUEST, profile=replace(CPU, latency=2 * CPU.latency))},
        {"request": replace(REQUEST, axes=(("dp", 4),))},
    ):
        assert plan_of(tmp_path, monkeypatch, **options)[1] == 1, options  # type: ignore[arg-type]


@pytest.mark.wide
@pytest.mark.parametrize("damage", ["", "{}", "half", "other", "[" * 100_000, "\0"])
def test_what_does_not_fit_is_searched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    plan, _ = plan_of(tmp_path, monkeypatch)
    (file,) = tmp_path.iterdir()
    text = file.read_text()
    other = text.replace(plan.fingerprint, "0" * 16)
    file.write_text({"half": text[: len(text) // 2], "other": other}.get(damage, damage))
    again, searches = plan_of(tmp_path, monkeypatch)
    assert searches == 1 and again == plan
    assert plan_of(tmp_path, monkeypatch)[1] == 0


@pytest.mark.wide
def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    assert plan_of(tmp_path / "file" / "below", monkeypatch)[1] == 1


@pytest.mark.parametrize("full", [False, True])
def test_what_cannot_be_kept_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool) -> None:
    cache, fdopen = PlanCache(tmp_path), os.fdopen

    def on_a_full_disk(handle: int, mode: str) -> object:
        device = os.open("/dev/full", os.O_WRONLY)
        os.dup2(device, handle)
        os.close(device)
        return fdopen(handle, mode)

    if full and not Path("/dev/full").exists():
        pytest.skip("there is no full disk")
    if full:
        monkeypatch.setattr(os, "fdopen", on_a_full_disk)
    else:
        (tmp_path / "key.txt").mkdir()  # what stands in the way of a file
    cache.put("key", "text")
    assert cache.get("key", str) is None
    assert not list(tmp_path.glob("*.part"))


def _key() -> str | None:
    planner = Planner(Net(), REQUEST)
    call = call_of((torch.randn(8, 16),), {}, False)
    return PlanCache("unused").key(REQUEST, planner.capture(call), call, Settled())


@pytest.mark.wide
def test_processes_agree_on_the_key() -> None:
    """Sets are hashed in another order in each."""
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    code = f"from {__name__} import _key; print(_key())"
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=300
    )
    assert found.stdout.strip() == _key()
