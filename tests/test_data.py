"""Files from anywhere: what is not what it must be is refused, and the message says where."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autoparallel.decisions.frontier import Frontier
from autoparallel.decisions.means import Means, OpenMeans
from autoparallel.decisions.parameters import ParameterPlan, PlanError
from autoparallel.decisions.pipeline import PipelinePlan
from autoparallel.hardware import PROFILES, Link, Profile, profile_for
from autoparallel.plan import Plan

PLAN = Plan((("dp", 2),), "auto", "f", {"w": ParameterPlan("S0", rows=8)}, {"m/aten.mm#0": ("I",)}, {}, cost=0.5)
STAGED = replace(
    PLAN, pipeline=PipelinePlan("pp", 2, "1f1b", 4, ("m/aten.mm#0",)), frontier=Frontier((PLAN.tried(1.0, 2.0),))
)
PROFILE = replace(profile_for("cuda", "h100"), links=(Link("all_reduce", 8, 1, 1e-5, 1e11),))


@pytest.mark.parametrize("plan", [PLAN, STAGED, replace(PLAN, cost=None)], ids=["plain", "pipeline", "no cost"])
def test_a_plan_survives_its_text(plan: Plan) -> None:
    again = Plan.from_json(plan.to_json())
    assert again == plan and again.cost == plan.cost


def test_a_plan_says_first_what_it_is_for_and_has_its_means_among_its_own() -> None:
    plan = replace(PLAN, loss_chunks=8, offload_optimizer=True)
    assert list(json.loads(plan.to_json()))[:4] == ["format", "mesh", "origin", "fingerprint"]
    assert plan.means == Means(loss_chunks=8, offload_optimizer=True)
    assert {field.name for field in fields(Means)} == {field.name for field in fields(OpenMeans)}
    assert json.loads(plan.to_json()).items() >= vars(plan.means).items()
    assert vars(plan.tried(1.0, 2.0)).items() >= vars(plan.means).items()


@pytest.mark.parametrize("profile", [PROFILE, *(profile_for("cuda", name) for name in PROFILES)], ids=lambda p: p.name)
def test_a_profile_survives_its_text(profile: Profile) -> None:
    assert Profile.from_json(profile.to_json()) == profile
    assert torch.bfloat16 in profile.flops


def _changed(text: str, path: tuple[str | int, ...], value: Any) -> str:
    data = part = json.loads(text)
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("cost",), float("nan"), "cost must be a finite number, not NaN"),
        (("cost",), float("inf"), "cost must be a finite number"),
        (("cost",), -1.0, "a cost is not negative"),
        (("cost",), True, "cost must be a finite number, not true"),
        (("mesh",), [["dp", 0]], "at least one rank"),
        (("mesh",), [["dp", 2], ["dp", 2]], "different names"),
        (("mesh",), [["dp", "2"]], r"mesh\[0\]\[1\] must be a whole number, not \"2\""),
        (("mesh",), [["dp"]], r"mesh\[0\] must be a list of 2"),
        (("parameters", "w", "rows"), 1.5, r"parameters\['w'\]\.rows must be a whole number, not 1\.5"),
        (("parameters", "w", "colour"), "red", r"'colour' is not known in parameters\['w'\]"),
        (("parameters", "w"), ["S0"], r"parameters\['w'\] must be an object"),
        (("operators",), [], "operators must be an object"),
        (("origin",), None, "origin must be a text, not null"),
        (("unruled",), {"aten.mm": -2}, "counted from 1"),
        (("pipeline", "microbatches"), 0, "microbatches"),
        (("frontier", "tried", 0, "seconds"), -1.0, "takes no negative time"),
        (("frontier", "tried", 0, "loss_chunks"), 0, "loss_chunks must be positive, got 0"),
        (("pipeline", "schedule"), "waltz", "waltz"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(path: tuple[str | int, ...], value: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.from_json(_changed(STAGED.to_json(), path, value))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("bandwidth",), float("nan"), "bandwidth must be a finite number"),
        (("memory_bandwidth",), -1.0, "memory_bandwidth must be positive, got -1"),
        (("launch",), -1e-6, "launch must not be negative"),
        (("overlap",), 1.5, "overlap must not be negative"),
        (("memory",), 0, "memory must be positive"),
        (("memory",), "80GB", 'memory must be a finite number, not "80GB"'),
        (("flops", "bfloat16"), -1.0, r"flops\[torch.bfloat16\] must be positive, got -1"),
        (("optimizer", "states"), -1.0, "optimizer.states must not be negative, got -1"),
        (("flops", "bfloat16"), "fast", r"flops\['bfloat16'\] must be a finite number"),
        (("flops", "bfloat99"), 1.0, "must be a dtype"),
        (("links", 0, "kind"), "gossip", r"links\[0\]\.kind must be one of all_reduce"),
        (("links", 0, "ranks"), 0, r"links\[0\]\.ranks must be positive"),
        (("node",), 2.5, "node must be a whole number"),
    ],
)
def test_a_profile_that_cannot_be_is_refused(path: tuple[str | int, ...], value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"not a hardware profile: .*{message}"):
        Profile.from_json(_changed(PROFILE.to_json(), path, value))


CONTENTS = {"binary": b"\xff\xfe\x00", "deep": b"[" * 100_000, "empty": b"", "list": b"[]"}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_a_file_that_is_no_plan_and_no_profile(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(PlanError, match="not a plan"):
        Plan.load(path)
    with pytest.raises(ValueError, match="not a hardware profile"):
        Profile.load(path)
