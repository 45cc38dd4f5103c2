"""Orders of computation, their transfers, and what they cost in time and memory."""

from __future__ import annotations

import itertools

import pytest

from autoparallel.pipeline.schedules import (
    FORWARD,
    SEND,
    Action,
    Passing,
    Timeline,
    Transfer,
    actions_of,
    in_flight,
    play,
    rank_of_stage,
    require_schedule,
)

KINDS = [
    ("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("zero_bubble", 1), ("zero_bubble", 2), ("zero_bubble_v", 2),
    ("dualpipe_v", 2),
]  # fmt: skip
SIZES = [(2, 4), (2, 7), (4, 8), (4, 13)]


def run(schedule: str, per_rank: int, ranks: int, microbatches: int, skips: bool = False) -> Timeline:
    stages = ranks * per_rank
    passings = [Passing(i, i, i + 1, True) for i in range(stages - 1)]
    if skips:
        passings += [Passing(100, 0, stages - 1, True), Passing(101, 0, stages - 1, False)]
    lists = actions_of(schedule, ranks, stages, microbatches)
    return play(lists, lambda s: rank_of_stage(schedule, ranks, s), passings)


def possible() -> list[tuple[str, int, int, int]]:
    found = []
    for (schedule, per_rank), (ranks, microbatches) in itertools.product(KINDS, SIZES):
        try:
            require_schedule(schedule, ranks, per_rank, microbatches)
        except ValueError:
            continue
        found.append((schedule, per_rank, ranks, microbatches))
    return found


def test_the_odd_numbers_of_microbatches_are_left_to_the_schedules_that_can_run_them() -> None:
    odd = {schedule for schedule, _, _, microbatches in possible() if microbatches in (7, 13)}
    assert odd == {"gpipe", "1f1b", "zero_bubble_v", "dualpipe_v"}


@pytest.mark.parametrize("case", possible(), ids=str)
@pytest.mark.parametrize("skips", [False, True])
def test_two_ranks_send_and_receive_in_the_same_order(case: tuple[str, int, int, int], skips: bool) -> None:
    timeline = run(*case, skips=skips)

    def transfers(rank: int, peer: int, sends: bool) -> list[tuple[object, ...]]:
        steps = [s for s in timeline.steps[rank] if isinstance(s, Transfer) and s.peer == peer]
        return [(s.kind, s.value, s.target, s.microbatch) for s in steps if (s.what == SEND) == sends]

    total = 0
    for a, b in itertools.permutations(range(case[2]), 2):
        assert transfers(a, b, True) == transfers(b, a, False)
        total += len(transfers(a, b, True))
    assert total > 0


@pytest.mark.parametrize("case", possible(), ids=str)
def test_nothing_is_computed_before_it_can_be(case: tuple[str, int, int, int]) -> None:
    """Every rank receives what a forward reads before it; a blocked step would never be played."""
    for steps in run(*case).steps:
        seen: set[object] = set()
        for step in steps:
            if isinstance(step, Transfer):
                seen.add((step.kind, step.target, step.microbatch))
            elif step.kind == FORWARD and step.stage > 0:
                local = Action(FORWARD, step.stage - 1, step.microbatch) in seen
                assert local or (FORWARD, step.stage, step.microbatch) in seen
            seen.add(step)


def test_the_bubble_of_one_forward_one_backward_is_that_of_its_formula() -> None:
    for ranks, microbatches in SIZES:
        assert run("1f1b", 1, ranks, microbatches).bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


def test_one_forward_one_backward_holds_fewer_microbatches_than_gpipe() -> None:
    assert in_flight("gpipe", 4, 4, 8) == (8, 8, 8, 8)
    assert in_flight("1f1b", 4, 4, 8) == (4, 3, 2, 1)


def test_a_schedule_that_cannot_go_on_is_told() -> None:
    lists = [[Action("F", 0, 0), Action("B", 0, 0)], [Action("B", 1, 0), Action("F", 1, 0)]]
    with pytest.raises(ValueError, match="wait for one another"):
        play(lists, lambda stage: stage, [Passing(0, 0, 1, True)])
