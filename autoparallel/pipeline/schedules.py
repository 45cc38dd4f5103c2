"""Pipeline schedules: what every rank computes, in which order, and when what passes between ranks.

The orders are those of ``torch.distributed.pipelining``; GPipe (Huang et al. 2019) and 1F1B (Narayanan et al. 2019)
are short enough to be written here, for any number of microbatches.

[Note: order of transfers] A schedule is played through once with assumed durations.  A value is sent when it is made,
and its receive is posted before what the other rank computes at that moment, so that the transfer overlaps with it.
Every rank's sends and receives are thus parts of one order in time, the same for all: no two ranks can wait for each
other, also where the transfers between two ranks run one after another, as with NCCL.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autoparallel.pipeline.torch_schedules import torch_actions

FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"
SEND, RECEIVE = "send", "receive"

KINDS = {
    FORWARD: "forward",
    BACKWARD: "backward",
    INPUT: "backward, gradients of inputs",
    WEIGHT: "backward, gradients of parameters",
}
"""In words."""

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zero_bubble_v", "dualpipe_v")
SPLIT = ("zero_bubble", "zero_bubble_v", "dualpipe_v")
"""The schedules that compute the gradients of inputs and of parameters apart."""

_FOLDED = ("zero_bubble_v", "dualpipe_v")
SECONDS = {FORWARD: 1.0, BACKWARD: 2.0, INPUT: 1.0, WEIGHT: 1.0}
"""How long a computation takes beside a forward, where nothing better is known."""

_BEFORE = {BACKWARD: FORWARD, INPUT: FORWARD, WEIGHT: INPUT}
"""What a stage must have done with a microbatch before."""


@dataclass(frozen=True, slots=True)
class Action:
    """What a rank does for one stage and one microbatch.

    Attributes:
        kind: ``F`` forward, ``B`` backward, or its halves ``I`` (gradients of inputs) and ``W`` (of parameters).
    """

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Transfer:
    """One value that a rank sends or receives.

    Attributes:
        what: ``SEND`` or ``RECEIVE``.
        kind: ``F`` for the value, ``B`` for its gradient.
        value: its number among the values that cross between stages.
        source, target: the stage that sends and the one that receives; the gradient goes from target to source of
            the value, so that here source is where it was made.
        peer: the rank on the pipeline's axis on the other side.
    """

    what: str
    kind: str
    value: int
    source: int
    target: int
    microbatch: int
    peer: int


@dataclass(frozen=True, slots=True)
class Passing:
    """That stage ``source`` makes a value, number ``value``, which stage ``target`` reads.

    Attributes:
        gradient: whether its gradient comes back.
    """

    value: int
    source: int
    target: int
    gradient: bool


def stages_of_rank(schedule: str, ranks: int, stages: int, rank: int) -> list[int]:
    """The stages that a rank runs."""
    return [s for s in range(stages) if rank_of_stage(schedule, ranks, s) == rank]


def rank_of_stage(schedule: str, ranks: int, stage: int) -> int:
    """The rank on the pipeline's axis that runs a stage."""
    if schedule in _FOLDED:
        return stage if stage < ranks else 2 * ranks - 1 - stage
    return stage % ranks


def require_schedule(schedule: str, ranks: int, stages_per_rank: int, microbatches: int) -> None:
    """Refuses what a schedule cannot run.

    Raises:
        ValueError: saying what to change.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"unknown schedule {schedule!r}: expected one of {', '.join(SCHEDULES)}")
    fixed = {"gpipe": 1, "1f1b": 1, "zero_bubble_v": 2, "dualpipe_v": 2}.get(schedule)
    if fixed is not None and stages_per_rank != fixed:
        raise ValueError(
            f"the schedule {schedule!r} has {fixed} stage{'s' * (fixed > 1)} per rank, not {stages_per_rank}"
        )
    if schedule == "interleaved_1f1b" and stages_per_rank < 2:
        raise ValueError("the schedule 'interleaved_1f1b' needs at least 2 stages per rank; with one it is '1f1b'")
    if microbatches < ranks:
        raise ValueError(
            f"{microbatches} microbatches are fewer than the {ranks} ranks of the pipeline, so that some would always "
            f"wait: use at least {ranks} microbatches"
        )
    try:
        actions_of(schedule, ranks, ranks * stages_per_rank, microbatches)
    except ValueError as error:
        raise ValueError(f"the schedule {schedule!r} cannot run {microbatches} microbatches: {error}") from error


def cut_rows(microbatches: int, rows: int, runs: Callable[[int], bool] = lambda count: True) -> int:
    """Into how many microbatches rows are cut that are to be cut into so many: where those do not divide them, into the
    next more that do, of which each takes less memory, else into fewer.

    Args:
        runs: whether so many can run; where no number that divides the rows can, it stays as it is.
    """
    counts = (*range(microbatches, rows + 1), *range(min(microbatches, rows), 0, -1))
    return next((count for count in counts if rows % count == 0 and runs(count)), microbatches)


@functools.lru_cache(maxsize=32)
def actions_of(schedule: str, ranks: int, stages: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """For each rank, what it computes, in order.

    Raises:
        ValueError: when the schedule cannot run so many microbatches.
    """
    if schedule == "gpipe":
        both = (FORWARD, BACKWARD)
        lists = [[Action(kind, rank, m) for kind in both for m in range(microbatches)] for rank in range(ranks)]
    elif schedule == "1f1b":
        lists = [_one_forward_one_backward(rank, ranks, microbatches) for rank in range(ranks)]
    else:
        lists = [[Action(*a) for a in rank] for rank in torch_actions(schedule, ranks, stages, microbatches)]
    for rank, actions in enumerate(lists):
        _require_complete(actions, stages_of_rank(schedule, ranks, stages, rank), microbatches)
    return tuple(map(tuple, lists))


@functools.lru_cache(maxsize=32)
def in_flight(schedule: str, ranks: int, stages: int, microbatches: int) -> tuple[int, ...]:
    """For each stage, the most microbatches whose activations its rank holds at once."""
    now, most = [0] * stages, [0] * stages
    for actions in actions_of(schedule, ranks, stages, microbatches):
        for action in actions:
            now[action.stage] += {FORWARD: 1, BACKWARD: -1, WEIGHT: -1}.get(action.kind, 0)
            most[action.stage] = max(most[action.stage], now[action.stage])
    return tuple(most)


def forwards_of(schedule: str, ranks: int, stages: int, microbatches: int) -> Sequence[Sequence[Action]]:
    """For each rank, what it computes where nothing is differentiated; any number of microbatches."""
    return [
        [Action(FORWARD, s, m) for s in stages_of_rank(schedule, ranks, stages, rank) for m in range(microbatches)]
        for rank in range(ranks)
    ]


def _one_forward_one_backward(rank: int, ranks: int, microbatches: int) -> list[Action]:
    ahead = min(ranks - 1 - rank, microbatches)
    actions = [Action(FORWARD, rank, m) for m in range(ahead)]
    for m in range(microbatches - ahead):
        actions += [Action(FORWARD, rank, m + ahead), Action(BACKWARD, rank, m)]
    return actions + [Action(BACKWARD, rank, m) for m in range(microbatches - ahead, microbatches)]


def _require_complete(actions: Sequence[Action], stages: Sequence[int], microbatches: int) -> None:
    wanted = sorted((s, m) for s in stages for m in range(microbatches))
    for kinds in (FORWARD, BACKWARD + INPUT, BACKWARD + WEIGHT):
        if sorted((a.stage, a.microbatch) for a in actions if a.kind in kinds) != wanted:
            raise ValueError("its action lists do not compute every microbatch once in every stage")


# ----------------------------------------------------------------------------------------------------------- in time


@dataclass(frozen=True)
class Timeline:
    """A schedule played through.

    Attributes:
        spans: for each rank, its actions with their begin and end.
        steps: for each rank, its actions and transfers in the order in which it starts them.
    """

    spans: tuple[tuple[tuple[Action, float, float], ...], ...]
    steps: tuple[tuple[Action | Transfer, ...], ...]

    @property
    def seconds(self) -> float:
        """When the last action ends."""
        return max((end for rank in self.spans for _, _, end in rank), default=0.0)

    def busy(self, rank: int) -> float:
        """How long a rank computes."""
        return sum(end - begin for _, begin, end in self.spans[rank])

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they wait."""
        whole = self.seconds * len(self.spans)
        return 1.0 - sum(self.busy(rank) for rank in range(len(self.spans))) / whole if whole else 0.0


class _Crossings:
    """What every stage makes for others, and reads of others."""

    def __init__(self, passings: Sequence[Passing]) -> None:
        self.produced: dict[int, list[Passing]] = {}
        self.read: dict[int, list[Passing]] = {}
        for p in passings:
            self.produced.setdefault(p.source, []).append(p)
            self.read.setdefault(p.target, []).append(p)

    def leaving(self, action: Action) -> list[tuple[str, Passing, int]]:
        """What leaves a stage when it has done an action: a value or a gradient, and the stage it goes to."""
        if action.kind == FORWARD:
            return [(FORWARD, p, p.target) for p in self.produced.get(action.stage, ())]
        if action.kind in (BACKWARD, INPUT):
            return [(BACKWARD, p, p.source) for p in self.read.get(action.stage, ()) if p.gradient]
        return []

    def arriving(self, action: Action) -> list[tuple[str, Passing]]:
        """What an action reads of other stages: values, or gradients."""
        if action.kind == FORWARD:
            return [(FORWARD, p) for p in self.read.get(action.stage, ())]
        if action.kind in (BACKWARD, INPUT):
            return [(BACKWARD, p) for p in self.produced.get(action.stage, ()) if p.gradient]
        return []


def play(
    lists: Sequence[Sequence[Action]],
    rank_of: Callable[[int], int],
    passings: Sequence[Passing],
    seconds: Callable[[Action], float] = lambda action: SECONDS[action.kind],
    transfer_seconds: Callable[[Passing], float] = lambda passing: 0.0,
) -> Timeline:
    """Plays a schedule through (see [Note: order of transfers]).

    Args:
        lists: what every rank computes, in order.
        rank_of: stage to rank.
        passings: the values that cross between stages.
        seconds: how long an action takes.
        transfer_seconds: how long a value travels between two ranks.

    Raises:
        ValueError: when the schedule cannot run to its end.
    """
    crossings = _Crossings(passings)
    arrived: dict[tuple[str, int, int, int], float] = {}  # kind, value, target, microbatch
    spans: list[list[tuple[Action, float, float]]] = [[] for _ in lists]
    position = [0] * len(lists)
    free = [0.0] * len(lists)
    finished_actions: set[Action] = set()

    def needs(action: Action) -> float | None:
        """When all that an action reads has arrived; None while some of it is not even made."""
        before = _BEFORE.get(action.kind)
        if before is not None and Action(before, action.stage, action.microbatch) not in finished_actions:
            return None
        latest = 0.0
        for kind, p in crossings.arriving(action):
            at = arrived.get((kind, p.value, p.target, action.microbatch))
            if at is None:
                return None
            latest = max(latest, at)
        return latest

    finished: list[tuple[float, int, Action]] = []  # in the order of their ends, with transfers still to be noted
    ready: dict[int, tuple[float, float, int]] = {}  # rank to its next action's end and begin, where it can start
    changed = set(range(len(lists)))
    total = sum(map(len, lists))
    while len(finished_actions) < total:
        for rank in changed:
            if position[rank] < len(lists[rank]):
                action = lists[rank][position[rank]]
                at = needs(action)
                if at is not None:
                    begin = max(free[rank], at)
                    ready[rank] = begin + seconds(action), begin, rank
        if not ready:
            stuck = ", ".join(str(a[position[r]]) for r, a in enumerate(lists) if position[r] < len(a))
            raise ValueError(f"the schedule cannot go on: {stuck} wait for one another")
        end, begin, rank = min(ready.values())
        del ready[rank]
        changed = {rank}
        action = lists[rank][position[rank]]
        position[rank] += 1
        free[rank] = end
        finished_actions.add(action)
        spans[rank].append((action, begin, end))
        finished.append((end, rank, action))
        for kind, p, to in crossings.leaving(action):
            travel = transfer_seconds(p) if rank_of(to) != rank else 0.0
            arrived[kind, p.value, p.target, action.microbatch] = end + travel
            if rank_of(to) not in ready:
                changed.add(rank_of(to))
    return Timeline(tuple(map(tuple, spans)), _order_steps(spans, finished, crossings, rank_of))


def _order_steps(
    spans: Sequence[Sequence[tuple[Action, float, float]]],
    finished: Sequence[tuple[float, int, Action]],
    crossings: _Crossings,
    rank_of: Callable[[int], int],
) -> tuple[tuple[Action | Transfer, ...], ...]:
    """Puts every rank's actions and transfers into one order (see [Note: order of transfers])."""
    # For each rank: before its action number i come the receives of slot i, behind it the sends of slot i.
    receives: list[list[list[Transfer]]] = [[[] for _ in range(len(actions) + 1)] for actions in spans]
    sends: list[list[list[Transfer]]] = [[[] for _ in actions] for actions in spans]
    numbers = {action: i for actions in spans for i, (action, _, _) in enumerate(actions)}
    ends = [[end for _, _, end in actions] for actions in spans]
    for end, rank, action in sorted(finished, key=lambda f: (f[0], f[1])):
        for kind, p, to in crossings.leaving(action):
            other = rank_of(to)
            if other == rank:
                continue
            common = kind, p.value, p.source, p.target, action.microbatch
            sends[rank][numbers[action]].append(Transfer(SEND, *common, other))
            # What the other rank computes now, or next: the first action that ends after this one.
            slot = bisect.bisect_right(ends[other], end)
            readers = (FORWARD,) if kind == FORWARD else (BACKWARD, INPUT)
            used = min(numbers[a] for k in readers if (a := Action(k, to, action.microbatch)) in numbers)
            receives[other][min(slot, used)].append(Transfer(RECEIVE, *common, rank))
    steps: list[list[Action | Transfer]] = [[] for _ in spans]
    for rank, actions in enumerate(spans):
        for i, (action, _, _) in enumerate(actions):
            steps[rank] += [*receives[rank][i], action, *sends[rank][i]]
    return tuple(map(tuple, steps))
