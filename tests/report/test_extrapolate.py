"""What a deep model costs, told from two short ones, is what its whole program is predicted to cost."""

from __future__ import annotations

import gc
from collections.abc import Hashable, Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autoparallel.decisions.prediction import Prediction
from autoparallel.graph.captured import Captured
from autoparallel.hardware import H100
from autoparallel.plan import Plan
from autoparallel.planner.candidates.evaluation import Evaluator
from autoparallel.planner.draft import call_of
from autoparallel.planner.planner import Planner
from autoparallel.planner.request.request import Request
from autoparallel.predict import predict
from autoparallel.predict.dry_run import DryRun, dry_run
from autoparallel.predict.forecast import Short, extrapolated
from tests.captures import shared_captures

LAYERS, WIDTH, ROWS = 18, 512, 4096


@pytest.fixture(scope="module", autouse=True)
def one_trace_for_all_plans() -> Iterator[None]:
    with shared_captures():
        yield


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(64, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("preset", "recompute", "rows"),
    [("auto", 0, ROWS), ("data_parallel", 0, ROWS), ("fsdp", 0, ROWS), ("tensor_parallel", 0, ROWS), ("fsdp", 5, ROWS),
     ("data_parallel", 5, 64), ("fsdp", 0, 64)],
)  # fmt: skip
def test_it_equals_the_prediction_of_the_whole(preset: str, recompute: int, rows: int) -> None:
    """With many rows the worst moment is that of the loss, with few of them it is late in the backward."""
    request = Request((("dp", 4), ("tp", 4)), H100, preset, loss_fn=nn.functional.mse_loss)
    planner = Planner(Model(), request)
    x = torch.empty(rows, 64, device="meta")
    call = call_of((x, x), with_target=True)
    captured = planner.capture(call)
    layers = dict.fromkeys((f"blocks.{i}" for i in range(recompute)), "full")
    plan = planner.search(captured, call)
    evaluator = Evaluator(request, captured, call)
    plan = replace(plan, recompute=layers)
    nodes: list[int] = []

    def predict(graph: Captured, plan: Plan) -> Prediction:
        nodes.append(len(graph.graph.nodes))
        return evaluator.predict_program(graph, plan)[1]

    known: dict[Hashable, Short] = {}
    found = extrapolated(captured, plan, predict, known)
    assert found is not None and not found.parts and len(nodes) > 1 and max(nodes) < 0.8 * len(captured.graph.nodes)
    # Plans that differ only in how many layers are recomputed have the same short models.
    predicted = len(nodes)
    more = extrapolated(captured, replace(plan, recompute=dict.fromkeys([*layers][:-1], "full")), predict, known)
    assert len(nodes) == predicted and (recompute or more == found)
    if preset == "fsdp" and recompute:
        assert more.seconds < found.seconds
    else:  # a step of few rows takes what its reductions take, whatever runs again beside them
        assert more.seconds == pytest.approx(found.seconds, rel=1e-9)
    whole = predict(captured, plan)
    assert found.seconds == pytest.approx(whole.seconds(), rel=0.02 if recompute else 1e-6)
    assert found.memory == pytest.approx(whole.total_memory, rel=1e-6)
    assert max(whole.most.values()) == whole.total_memory


def test_the_whole_of_a_shallow_model_is_predicted() -> None:
    request = Request((("dp", 2),), H100, "data_parallel", loss_fn=nn.functional.mse_loss)
    planner = Planner(nn.Linear(8, 8), request)
    x = torch.empty(8, 8, device="meta")
    call = call_of((x, x), with_target=True)
    captured = planner.capture(call)
    plan = planner.search(captured, call)
    evaluator = Evaluator(request, captured, call)
    assert extrapolated(captured, plan, lambda *about: evaluator.predict_program(*about)[1], {}) is None
    found = evaluator.forecast(plan)
    assert found.parts and found.seconds == evaluator.predict_program(captured, plan)[1].seconds()


@pytest.mark.wide
def test_a_timeline_does_not_depend_on_when_python_frees_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[tuple[DryRun, DryRun]] = []

    def observed(*args: Any) -> DryRun:
        run = dry_run(*args)
        runs.append((run, deepcopy(run)))
        return run

    monkeypatch.setattr(predict, "dry_run", observed)
    x = torch.empty(8, 8, device="meta")
    request = Request((("dp", 2),), H100, "fsdp", loss_fn=nn.functional.mse_loss)
    planner = Planner(nn.Linear(8, 8), request)
    call = call_of((x, x), with_target=True)
    captured = planner.capture(call)
    Evaluator(request, captured, call).predict_program(captured, planner.search(captured, call))
    gc.collect()
    assert runs and all(now == then for now, then in runs)
