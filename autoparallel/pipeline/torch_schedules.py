"""The private parts of ``torch.distributed.pipelining`` that we use, in one place: its schedules' action lists.

Tested with torch 2.11 to 2.13.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from torch import nn

_CLASSES = {
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "zero_bubble": "ScheduleInterleavedZeroBubble",
    "zero_bubble_v": "ScheduleZBVZeroBubble",
    "dualpipe_v": "ScheduleDualPipeV",
}


def torch_actions(schedule: str, ranks: int, stages: int, microbatches: int) -> list[list[tuple[str, int, int]]]:
    """For each rank, what it computes in order: (F, B, I or W; stage; microbatch), as torch's schedule class says.

    Raises:
        ValueError: torch's own, when the schedule cannot run so many microbatches.
    """
    # Importing it takes longer than all of ours, and most programs have no pipeline.
    schedules = importlib.import_module("torch.distributed.pipelining.schedules")
    placed = [_stage(i, ranks, stages) for i in range(stages // ranks)]
    instance = getattr(schedules, _CLASSES[schedule])(placed, n_microbatches=microbatches)
    return [list(_plain(instance.pipeline_order[rank])) for rank in range(ranks)]


def _stage(index: int, ranks: int, stages: int) -> SimpleNamespace:
    """What a schedule asks of a stage when it makes its action lists."""
    return SimpleNamespace(
        stage_index=index,
        num_stages=stages,
        group_size=ranks,
        group_rank=0,
        group=None,
        submod=nn.Identity(),
        is_first=index == 0,
        is_last=index == stages - 1,
        has_backward=True,
        device=None,
        stage_index_to_group_rank={},
    )


def _plain(actions: Any) -> Iterator[tuple[str, int, int]]:
    for action in actions:
        if action is None:
            continue
        if action.sub_actions is not None:
            yield from _plain(action.sub_actions)
        elif action.is_compute_op:
            yield action.computation_type.value, action.stage_index, action.microbatch_index
