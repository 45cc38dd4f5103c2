"""Why something was decided is asked of the search, on a model that is traced once."""

from __future__ import annotations

import re
from typing import Any

import pytest

from autoparallel.decisions.parameters import PlanError
from autoparallel.hardware import CPU
from autoparallel.plan import Plan
from autoparallel.planner import planner as planning
from autoparallel.planner.draft import call_of, draft_captured
from autoparallel.planner.reasons import PlanAgain
from autoparallel.planner.request.request import Request
from tests.plan_factories import net


def test_all_questions_trace_the_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, loss_fn = net(16)
    request = Request(axes=(("dp", 2),), profile=CPU, plan="data_parallel", loss_fn=loss_fn)
    planner, call = planning.Planner(model, request), call_of(inputs, with_target=True)
    made = draft_captured(planner, planner.capture(call), call)
    plan = made.plan.with_reasons(PlanAgain(planner, call))
    traced: list[Any] = []
    capture = planning.capture

    def counted(*args: Any, **options: Any) -> Any:
        traced.append(args)
        return capture(*args, **options)

    monkeypatch.setattr(planning, "capture", counted)
    text = plan.explain("layers.0.0")
    assert len(traced) == 1 and "decisions" in text and "next best" in text
    assert plan.explain("layers.0.0") == text, "an answer leaves nothing behind"
    assert len(traced) == 1
    rows = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    (weight,) = [row for row in rows if row[0] == "weight"]
    assert weight[1] == "whole" and weight[2] != "whole"
    with pytest.raises(PlanError, match="nothing in the plan matches 'up'"):
        plan.explain("up")
    with pytest.raises(PlanError, match="loaded from a file"):
        Plan.from_json(plan.to_json()).explain("layers.0.0")
