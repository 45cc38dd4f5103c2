"""Ranks that fall out of step, and ranks that are late: the same error on all of them, or none."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from autoparallel.tools.processes import Pool
from tests.distributed import open_pool, run_in
from tests.runtime.faults import BACKWARD, BEFORE, STEP, Fault, Loop, look_up_badly
from tests.runtime.support import run_on_ranks


def _run(fault: Fault | None, plan: str, options: dict[str, Any]) -> tuple[list[str], float]:
    loop = Loop(fault, plan, options)
    return list(loop.run().values()), loop.seconds


OUT_OF_STEP = {
    "a batch skipped": (Fault(BEFORE, "skip the batch"), "different values", "a rank has left out a batch"),
    "models in another order": (Fault(BEFORE, "another model"), "model [0-9]+ .Net.*model [0-9]+ .Net", "rank 1: "),
    "a loader error caught": (Fault(BEFORE, "raise"), "different values", "call 6 of model", "5 backwards and 5 steps"),
    "a backward skipped": (Fault(BACKWARD, "skip"), "rank 0: backward 6 of model", "rank 1: .*call 6 of model"),
    "an optimizer step skipped": (Fault(STEP, "skip"), "6 steps", "5 steps"),
    "a step by another rate": (Fault(STEP, "another rate"), r"rank 0.*SGD\(lr=0.1,", r"rank 1.*SGD\(lr=0.2,"),
    "gradients kept": (Fault(STEP, "keep gradients"), "rank 1: backward 7 .* added to gradients", "rank 0: backward 7"),
}


@pytest.mark.parametrize("plan", ["fsdp", "data_parallel"])
@pytest.mark.parametrize("name", OUT_OF_STEP)
def test_a_rank_out_of_step_is_the_same_error_everywhere(name: str, plan: str) -> None:
    _require_same_error(plan, *OUT_OF_STEP[name])


@pytest.mark.wide
def test_a_number_read_on_one_rank_is_out_of_step_where_it_is_a_sum_over_the_ranks() -> None:
    fault = Fault(BEFORE, "read a number")
    _require_same_error("fsdp", fault, "call 6 of model", "rank 1: a number .* every rank")
    assert run_on_ranks(_run, fault, "data_parallel", {}, world_size=2)[0][0] == []


def _require_same_error(plan: str, fault: Fault, *patterns: str) -> None:
    first, second = run_on_ranks(_run, fault, plan, {}, world_size=2)
    assert first[0] == second[0], (first[0], second[0])
    (message,) = first[0]
    assert message.startswith("RankMismatchError"), message
    assert all(re.search(pattern, message, re.DOTALL) for pattern in patterns), message


def test_the_loop_without_a_fault_runs_to_its_end() -> None:
    assert [caught for caught, _ in run_on_ranks(_run, None, "fsdp", {}, world_size=2)] == [[], []]


def test_a_skipped_batch_is_seen_at_the_next_comparison() -> None:
    fault = Fault(BEFORE, "skip the batch", step=4)
    results = run_on_ranks(_run, fault, "fsdp", {"check_inputs": 0}, world_size=2)
    assert [caught for caught, _ in results] == [[], []]


@pytest.fixture
def impatient() -> Iterator[Pool]:
    """Two ranks whose process group waits for four seconds."""
    with open_pool(2, group_timeout=4.0) as pool:
        yield pool


@pytest.mark.wide
@pytest.mark.slow_where(lambda at: at == BACKWARD)
@pytest.mark.parametrize("at", [BEFORE, BACKWARD])
def test_a_missing_rank_is_named_within_the_time_out_of_the_process_group(at: str, impatient: Pool) -> None:
    results = run_in(impatient, _run, Fault(at, 12.0), "fsdp", {}, keep_after_error=True)
    caught, seconds = results[0]
    (message,) = caught
    assert "rank 1" in message and "of model 1 (Net)" in message and "did not come" in message, message
    assert "rank 1: no sign of it" in message, message
    assert seconds < 4 + 6, seconds


def test_an_index_out_of_range_on_one_rank_reaches_the_others() -> None:
    with open_pool(2, group_timeout=60.0) as pool:
        started = time.monotonic()
        first, second = run_in(pool, look_up_badly, 100)
        assert "IndexError" in second.split("---")[0], second
        assert "RankMismatchError: rank 1 raised in call 2 of model 1 (Rows): IndexError" in first.split("---")[0], (
            first
        )
        assert "raised in call 2" in first.split("---")[1] and "raised in call 2" in second.split("---")[1]
        assert time.monotonic() - started < 40


def test_rows_in_range_raise_nothing() -> None:
    assert run_on_ranks(look_up_badly, 4, world_size=2) == ["", ""]


@pytest.mark.slow
def test_a_rank_that_is_busy_for_130_seconds_is_waited_for() -> None:
    with open_pool(2, group_timeout=None) as pool:
        started = time.monotonic()
        results = run_in(pool, _run, Fault(BEFORE, 130.0), "fsdp", {}, timeout=300)
        assert [caught for caught, _ in results] == [[], []]
        assert time.monotonic() - started > 130
