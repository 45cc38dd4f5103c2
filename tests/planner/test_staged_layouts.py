"""The layouts inside of stages: for a step of several microbatches, within the memory of a stage's device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from autoparallel.decisions.pipeline import Pipeline
from autoparallel.hardware import CPU
from autoparallel.plan import Plan
from autoparallel.planner.draft import call_of
from autoparallel.planner.planner import Planner
from autoparallel.planner.request.request import Request
from tests.captures import shared_captures
from tests.planner.blocks import Blocks

WIDTH, LAYERS = 256, 8


@pytest.fixture(scope="module", autouse=True)
def one_trace_for_all_plans() -> Iterator[None]:
    with shared_captures():
        yield


def _plan(rows: int, pipeline: Pipeline, limit: float | None = None, launch: float = 1e-9) -> Plan:
    profile = replace(CPU, launch=launch, latency=0.0)
    loss_fn = nn.functional.mse_loss
    request = Request((("dp", 2),), profile, loss_fn=loss_fn, memory_limit=limit, stages=2, pipeline=pipeline)
    planner = Planner(Blocks(LAYERS, WIDTH, 4 * WIDTH), request)
    x = torch.empty(rows, WIDTH, device="meta")
    call = call_of((x, x), with_target=True)
    return planner.search(planner.capture(call), call)


def _modes(plan: Plan) -> set[tuple[str, ...]]:
    return {modes for key, modes in plan.operators.items() if "linear" in key}


@pytest.mark.wide
def test_gradients_that_are_reduced_once_a_step_are_shared_by_its_microbatches() -> None:
    """A microbatch's activations are smaller than the gradients; those of all microbatches are not."""
    few, many = _plan(512, Pipeline("1f1b", 2)), _plan(4096, Pipeline("1f1b", 16))
    assert any("shard:k" in mode for modes in _modes(few) for mode in modes)  # column then row: nothing to reduce
    assert _modes(many) == {("shard:...0",)}  # the batch
    assert many.cost is not None and many.lower_bound is not None and many.pipeline is not None
    assert many.pipeline.seconds < many.cost * 1.01  # two stages share what one device would do alone
    assert many.lower_bound <= many.cost


def test_a_limit_changes_the_layouts_of_stages() -> None:
    free = _plan(4096, Pipeline("1f1b", 16))
    assert free.pipeline is not None
    most = max(stage.memory for stage in free.pipeline.stages)
    tight = _plan(4096, Pipeline("1f1b", 16), limit=0.8 * most)
    assert tight.pipeline is not None
    assert max(stage.memory for stage in tight.pipeline.stages) <= 0.8 * most
    assert tight.pipeline.seconds >= free.pipeline.seconds or tight.parameters != free.parameters


@pytest.mark.wide
def test_more_microbatches_are_taken_where_memory_asks_for_it() -> None:
    free = _plan(8192, Pipeline("gpipe"))
    assert free.pipeline is not None and free.pipeline.microbatches <= 8
    most = max(stage.memory for stage in free.pipeline.stages)
    found = _plan(8192, Pipeline("1f1b"), limit=0.4 * most)
    assert found.pipeline is not None and found.pipeline.microbatches > 8
    with pytest.raises(ValueError, match=r"stage \d .* needs? .*B per device .* in flight .*; no plan fits in"):
        _plan(8192, Pipeline("1f1b"), limit=0.01 * most)


def test_fewer_microbatches_whose_layers_run_again_are_taken_where_that_is_faster() -> None:
    """More microbatches would fit without, but each of them costs launches."""
    launch = 6e-3
    free = _plan(8192, Pipeline("gpipe", 8), launch=launch)
    assert free.pipeline is not None
    limit = 0.4 * max(free.pipeline.memory_by_rank())
    few, many, found = (_plan(8192, Pipeline("1f1b", count), limit, launch) for count in (4, 8, None))
    assert few.pipeline is not None and many.pipeline is not None and found.pipeline is not None
    assert few.recompute and not many.recompute and few.pipeline.seconds < 0.95 * many.pipeline.seconds
    assert found.recompute and found.pipeline.seconds == pytest.approx(few.pipeline.seconds, rel=1e-2)
    assert max(found.pipeline.memory_by_rank()) <= limit
