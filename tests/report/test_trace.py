"""The trace of a predicted step: well-formed, without gaps, and as long as the prediction says."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoparallel import Plan, PlanError
from autoparallel.hardware import PROFILES
from autoparallel.planner.draft import call_of
from autoparallel.planner.request.request import Request
from autoparallel.report.trace import TICK
from tests.captures import draft
from tests.runtime.test_profile import Layers


def _plan(axes: tuple[tuple[str, int], ...], **options: Any) -> Plan:
    request = Request(axes=axes, profile=PROFILES["h100"], loss_fn=F.mse_loss, **options).on(axes)
    x = torch.zeros(32, 16)
    return draft(Layers(), call_of((x, x), with_target=True), request).plan


def _require_chrome_format(path: Path) -> None:
    """What the format asks of each event, and that slices lie one after another or in each other."""
    trace = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    predicted = {e["pid"] for e in trace["traceEvents"] if e.get("args") == {"name": "autoparallel, predicted"}}
    assert len(predicted) == 1
    events = [e for e in trace["traceEvents"] if e["pid"] in predicted]
    named = {e["tid"] for e in events if e["name"] == "thread_name"}
    ends: dict[int, list[int]] = {}
    for event in events:
        assert isinstance(event["name"], str) and type(event["pid"]) is int and type(event["tid"]) is int
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name") and isinstance(event["args"]["name"], str)
            continue
        assert event["ts"] >= 0 and 1000 * event["ts"] == int(1000 * event["ts"]), "whole nanoseconds"
        if event["ph"] == "C":
            assert event["args"] and all(isinstance(size, (int, float)) for size in event["args"].values())
            continue
        assert event["ph"] == "X" and event["tid"] in named and event["dur"] >= 0
        begin, end = int(1000 * event["ts"]), int(1000 * event["ts"]) + int(1000 * event["dur"])
        around = ends.setdefault(event["tid"], [])
        while around and around[-1] <= begin:
            around.pop()
        assert not around or end <= around[-1], "slices overlap"
        around.append(end)
    assert ends


def _events(path: Path, kind: str = "X") -> list[dict[str, Any]]:
    return [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == kind]


@pytest.mark.wide_where(lambda options: options != {"microbatches": 4})
@pytest.mark.parametrize("options", [{}, {"plan": "fsdp"}, {"plan": "tensor_parallel"}, {"microbatches": 4}], ids=str)
def test_what_a_rank_does_adds_up_to_the_step(options: dict[str, Any], tmp_path: Path) -> None:
    plan = _plan((("dp", 2), ("tp", 2)), **options)
    assert plan.prediction is not None
    plan.save_trace(tmp_path / "trace.json")
    _require_chrome_format(tmp_path / "trace.json")
    lines = {e["tid"]: e["args"]["name"] for e in _events(tmp_path / "trace.json", "M") if e["name"] == "thread_name"}
    assert list(lines.values()) == ["phases", "computes", "sends"]
    for number in (0, 1):
        spans = [e for e in _events(tmp_path / "trace.json") if e["tid"] == number]
        end = 0.0
        for span in spans:  # one after another, without a gap
            assert span["ts"] == end
            end = span["ts"] + span["dur"]
        assert math.isclose(end, 1e6 * plan.prediction.seconds(), abs_tol=TICK)
        assert sum(s["dur"] for s in spans) == end
    computed = {e["name"] for e in _events(tmp_path / "trace.json") if e["tid"] == 1}
    assert computed >= {"layers.0.up", "layers.1.down", "update"}
    sent = [e for e in _events(tmp_path / "trace.json") if e["tid"] == 2]
    assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in itertools.pairwise(sent))
    assert max(e["args"]["bytes"] for e in _events(tmp_path / "trace.json", "C")) <= plan.prediction.total_memory


@pytest.mark.wide
def test_a_pipeline_shows_the_schedule_of_its_ranks(tmp_path: Path) -> None:
    plan = _plan((("pp", 2), ("dp", 2)))
    assert plan.pipeline is not None
    plan.save_trace(tmp_path / "trace.json")
    _require_chrome_format(tmp_path / "trace.json")
    spans = _events(tmp_path / "trace.json")
    assert len(spans) == 2 * plan.pipeline.count * plan.pipeline.microbatches
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(1e6 * plan.pipeline.seconds, abs=TICK)


def test_a_measured_trace_is_kept_and_begins_at_the_same_moment(tmp_path: Path) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        nn.Linear(4, 4)(torch.ones(2, 4))
    profiled.export_chrome_trace(str(tmp_path / "measured.json"))
    measured = _events(tmp_path / "measured.json")
    _plan((("dp", 2),)).save_trace(tmp_path / "both.json", tmp_path / "measured.json")
    _require_chrome_format(tmp_path / "both.json")
    both = _events(tmp_path / "both.json")
    predicted = [e for e in both if e.get("cat") == "predicted"]
    assert both[: len(measured)] == measured and predicted
    assert abs(min(e["ts"] for e in predicted) - min(e["ts"] for e in measured)) <= TICK / 2
    assert not {e["pid"] for e in predicted} & {e["pid"] for e in measured}


def test_a_plan_that_predicts_nothing_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="compile it"):
        Plan.from_json(_plan((("dp", 2),)).to_json()).save_trace(tmp_path / "trace.json")
