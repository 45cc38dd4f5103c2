"""What is asked of a pipeline, and what was decided about it."""

from __future__ import annotations

from dataclasses import dataclass, field

from autoparallel.comm.traffic import Traffic
from autoparallel.data import UNSTORED
from autoparallel.pipeline.schedules import (
    BACKWARD,
    FORWARD,
    INPUT,
    SCHEDULES,
    WEIGHT,
    Action,
    Passing,
    Timeline,
    actions_of,
    cut_rows,
    play,
    rank_of_stage,
    require_schedule,
    stages_of_rank,
)


def require_counts(**counts: object) -> None:
    """Raises ValueError for what is no positive integer; None leaves a number open."""
    for name, value in counts.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{name} must be a positive integer, got {value!r}")


@dataclass(frozen=True)
class Pipeline:
    """What to fix of a pipeline; the search decides what is None.

    Attributes:
        schedule: "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zero_bubble_v" or "dualpipe_v".
        microbatches: into how many parts a batch is cut.
        stages_per_rank: how many stages each rank runs.
        cuts: where the stages but the first begin: keys of operators, as a plan writes them.
    """

    schedule: str | None = None
    microbatches: int | None = None
    stages_per_rank: int | None = None
    cuts: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.schedule is not None and self.schedule not in SCHEDULES:
            raise ValueError(f"unknown schedule {self.schedule!r}: expected one of {', '.join(SCHEDULES)}")
        require_counts(microbatches=self.microbatches, stages_per_rank=self.stages_per_rank)


@dataclass(frozen=True)
class StageCost:
    """What one stage is predicted to cost each of its ranks.

    Attributes:
        first, last: the modules with which it begins and ends.
        forward, backward: seconds for one microbatch.
        memory: bytes that it keeps, with the microbatches in flight.
        in_flight: the most microbatches whose activations it holds.
        inputs: the share of the backward that the gradients of inputs take, where a schedule parts them.
        passing: seconds that what it gives to the next stage, or the gradient of that, is on its way.
        moment: bytes beside these while a backward of it runs, which of a rank's stages one does at a time.
    """

    first: str
    last: str
    forward: float
    backward: float
    memory: float
    in_flight: int
    inputs: float = 0.5
    moment: float = 0.0
    passing: float = 0.0


@dataclass(frozen=True)
class PipelinePlan:
    """Every decision about one pipeline.

    Attributes:
        axis, ranks: the mesh axis over which the stages lie, and its size; no name, where every rank runs all.
        schedule, microbatches: as :class:`Pipeline` names them.
        cuts: the keys of the operators with which the stages but the first begin.
        stages: what each stage is predicted to cost; empty where nothing is predicted.
        seconds, bubble: of one step's schedule: how long it takes, and the share of it in which ranks wait.
        traffic: what is sent in a step; None where the plan is not carried out yet.
    """

    axis: str
    ranks: int
    schedule: str
    microbatches: int
    cuts: tuple[str, ...]
    stages: tuple[StageCost, ...] = field(default=(), compare=False)
    seconds: float = field(default=0.0, compare=False)
    bubble: float = field(default=0.0, compare=False)
    traffic: PipelineTraffic | None = field(default=None, compare=False, repr=False, metadata=UNSTORED)

    @property
    def count(self) -> int:
        """The number of stages."""
        return len(self.cuts) + 1

    def rank_of(self, stage: int) -> int:
        """The rank on the axis that runs a stage."""
        return rank_of_stage(self.schedule, self.ranks, stage)

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a rank on the axis runs."""
        return stages_of_rank(self.schedule, self.ranks, self.count, rank)

    def memory_by_rank(self) -> list[float]:
        """Bytes per device of each rank: what all of its stages keep, and the moment of one."""
        stages_by_rank = [[self.stages[stage] for stage in self.stages_of(rank)] for rank in range(self.ranks)]
        return [sum(s.memory for s in stages) + max(s.moment for s in stages) for stages in stages_by_rank]

    def played(self) -> Timeline:
        """The schedule, played through with the predicted times of its stages."""

        def seconds(action: Action) -> float:
            stage = self.stages[action.stage]
            share = {FORWARD: 1.0, BACKWARD: 1.0, INPUT: stage.inputs, WEIGHT: 1 - stage.inputs}[action.kind]
            return max(share * (stage.forward if action.kind == FORWARD else stage.backward), 1e-9)

        passings = [Passing(i, i, i + 1, True) for i in range(self.count - 1)]
        lists = actions_of(self.schedule, self.ranks, self.count, self.microbatches)
        return play(lists, self.rank_of, passings, seconds, lambda p: self.stages[p.value].passing)

    def cut(self, rows: int) -> int:
        """Into how many microbatches a call of so many rows is cut that is differentiated."""
        return cut_rows(self.microbatches, rows, self._runs)

    def _runs(self, microbatches: int) -> bool:
        try:
            actions_of(self.schedule, self.ranks, self.count, microbatches)
        except ValueError:
            return False
        return True

    def require_valid(self) -> None:
        """Raises ValueError for what cannot be run."""
        if self.ranks < 1 or self.count % self.ranks:
            raise ValueError(f"{self.count} stages cannot lie on {self.ranks} ranks alike")
        require_schedule(self.schedule, self.ranks, self.count // self.ranks, self.microbatches)


@dataclass(frozen=True)
class Border:
    """One value on its way from a stage that has it to one that reads it.

    Attributes:
        key: the operator that makes it.
        source, target: the stages.
        forward, backward: bytes that each rank of them sends for one microbatch: the value's, and those of its
            gradient, 0 where none comes back.
        moves: whether the stages lie on different ranks; else nothing is sent.
    """

    key: str
    source: int
    target: int
    forward: int
    backward: int
    moves: bool


@dataclass(frozen=True)
class Loan:
    """A parameter that a rank of the pipeline uses and another holds.

    Attributes:
        name: of the parameter.
        owner, borrower: ranks on the pipeline's axis.
        forward, backward: bytes a call: the parameter's, and those of its gradient.
    """

    name: str
    owner: int
    borrower: int
    forward: int
    backward: int


@dataclass(frozen=True)
class PipelineTraffic:
    """What the ranks of a pipeline send in a training step of one call, clipping and a gradient scaler aside.

    Counts and bytes are exact where sizes divide: ``count_traffic()`` around the call, and around the backward of its
    loss, counts the same.

    Attributes:
        borders: what crosses between stages, for each microbatch.
        loans: the parameters that several stages use.
        calls: for each rank on the pipeline's axis, what it sends in the call, which runs the whole schedule.
        gradients: likewise, what it sends when the loss is differentiated and gradients are reduced.
    """

    borders: tuple[Border, ...]
    loans: tuple[Loan, ...]
    calls: tuple[Traffic, ...]
    gradients: tuple[Traffic, ...]
