"""What was decided about a model on a mesh."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from autoparallel.comm.world import PIPELINE_AXIS, Axes
from autoparallel.data import UNSTORED
from autoparallel.decisions.frontier import Frontier, Tried
from autoparallel.decisions.means import Means
from autoparallel.decisions.meshes import MeshChoice
from autoparallel.decisions.parameters import ParameterPlan, padded_rows
from autoparallel.decisions.pipeline import PipelinePlan
from autoparallel.decisions.prediction import LatePrediction, Prediction, Workload
from autoparallel.placements import Layout, parse_layout
from autoparallel.placements.modes import Mode, parse_mode, parse_modes

SELECTIVE, FULL = RECOMPUTED = "selective", "full"
"""How much of a layer runs again in the backward: all but products, attention and collectives other than gathers; or
all of it."""


@dataclass(frozen=True)
class Estimate:
    """What the search added up, beside the cost.

    Attributes:
        memory: bytes per device.
        parameters: seconds of a step, by parameter: gathering it, reducing its gradient, updating it.
    """

    memory: float
    parameters: Mapping[str, float]


class Reasons(Protocol):
    """Answers what another decision would have cost."""

    def best_without(self, plan: Decisions, excluded: Mapping[str, frozenset[str]]) -> Decisions | None:
        """The best plan, with its prediction, in which some parameters or operators are not what they are in a plan;
        None where there is none.

        Args:
            excluded: name of a parameter or key of an operator to the layouts, or the ways of running, to leave out.
        """

    def history(self, plan: Decisions) -> str:
        """The program before and after each pass that makes a plan's program of the captured graph, with its time."""


@dataclass(frozen=True)
class Decisions(Means):
    """Every decision about one model on one mesh: a :class:`Plan` without what it can say of itself.

    Attributes:
        loss_chunks, linear_chunks, microbatches, offload_optimizer: what saves memory, or hides what is exchanged (see
            :class:`Means`).
        mesh: the mesh axes by name and size, in order.
        origin: the preset that constrained the search, or "auto".
        fingerprint: of the captured graph; a plan for another graph is refused.
        operators: node key (``module/operator#occurrence``) to how it runs on each mesh axis.
        shared: node key to the layout that all consumers of a tensor read it in, where that is not the layout it is
            made in.
        parameters: parameter name to its plan.
        unruled: operators without a rule, which run replicated, with how often.
        recompute: the layers, by module path, that run again in the backward, with how much of them does (one of
            ``RECOMPUTED``): "full" keeps only what enters a layer, "selective" also what its products, its attention
            and its collectives other than gathers make, which are not repeated.
        checkpointed: those of these layers that run again because the model itself calls ``torch.utils.checkpoint`` in
            them.
        notes: module path to why it is not sharded as could be expected.
        cost, lower_bound: the predicted seconds of a step that the search minimised, and what it proved that no plan
            costs less than; None for a plan that no search made.
        pipeline: how the model is cut into stages over one more mesh axis, which is not in ``mesh``.
        choice: how the mesh was chosen; None where it was given.
        frontier: what the plans take that the search compared; None where it compared none.
        late: gives ``prediction``; only where it is compiled.
        work: what a call in training has to do; only where it is compiled.
        estimate: what the search added up; only where it was searched just now.
    """

    mesh: tuple[tuple[str, int], ...]
    origin: str
    fingerprint: str
    parameters: Mapping[str, ParameterPlan]
    operators: Mapping[str, tuple[str, ...]]
    shared: Mapping[str, str]
    unruled: Mapping[str, int] = field(default_factory=dict)
    recompute: Mapping[str, str] = field(default_factory=dict)
    checkpointed: tuple[str, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
    cost: float | None = field(default=None, compare=False)
    lower_bound: float | None = field(default=None, compare=False)
    pipeline: PipelinePlan | None = None
    choice: MeshChoice | None = field(default=None, compare=False)
    frontier: Frontier | None = field(default=None, compare=False, repr=False)
    late: LatePrediction | None = field(default=None, compare=False, repr=False, metadata=UNSTORED)
    work: Workload | None = field(default=None, compare=False, repr=False, metadata=UNSTORED)
    estimate: Estimate | None = field(default=None, compare=False, repr=False, metadata=UNSTORED)
    reasons: Reasons | None = field(default=None, compare=False, repr=False, metadata=UNSTORED)

    def __getstate__(self) -> dict[str, Any]:
        """What travels to another process: all but the model that ``reasons`` holds."""
        return {**self.__dict__, "reasons": None}

    @property
    def prediction(self) -> Prediction | None:
        """What a step is predicted to send, take and keep, worked out when it is first asked for; None for a plan that
        was read from a file and is not compiled yet."""
        return None if self.late is None else self.late()

    @property
    def gap(self) -> float | None:
        """By how much a better plan could be cheaper at most, as a part of this plan's cost; None where not known."""
        if self.cost is None or self.lower_bound is None:
            return None
        return max(0.0, 1.0 - self.lower_bound / self.cost) if self.cost else 0.0

    @property
    def whole_mesh(self) -> Axes:
        """The axes of all devices: those of ``mesh``, after the pipeline's."""
        return self.mesh if self.pipeline is None else ((PIPELINE_AXIS, self.pipeline.ranks), *self.mesh)

    @property
    def axis_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.mesh)

    @property
    def axis_sizes(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.mesh)

    def require_valid(self) -> None:
        """Raises ValueError for what no model can be told to do."""
        if len(set(self.axis_names)) < len(self.mesh) or any(size < 1 for size in self.axis_sizes):
            raise ValueError(f"a mesh has axes of different names and of at least one rank, not {dict(self.mesh)}")
        if self.cost is not None and self.cost < 0 or any(count < 1 for count in self.unruled.values()):
            raise ValueError("a cost is not negative, and what has no rule is counted from 1")
        for name, parameter in self.parameters.items():
            parameter.require_valid(name, len(self.mesh))
        for mode in itertools.chain.from_iterable(self.operators.values()):
            parse_mode(mode)
        for layout in self.shared.values():
            parse_layout(layout)
        for layer, much in self.recompute.items():
            if much not in RECOMPUTED:
                raise ValueError(f"{layer!r} is recomputed {much!r}; expected one of {', '.join(RECOMPUTED)}")
        super().require_valid()
        for part in (self.pipeline, *(() if self.frontier is None else self.frontier.tried)):
            if part is not None:
                part.require_valid()

    @property
    def staging(self) -> PipelinePlan | None:
        """The pipeline; where only microbatches were decided, one of a single stage; None where a call runs at once."""
        if self.pipeline is None and self.microbatches > 1:
            return PipelinePlan("", 1, "1f1b", self.microbatches, ())
        return self.pipeline

    def tried(self, seconds: float, memory: float) -> Tried:
        """What others are compared with, where a step takes so long and a device holds so many bytes."""
        parts = self.staging.microbatches if self.staging is not None else 1
        means = vars(replace(self.means, microbatches=parts))
        return Tried(self.origin, seconds, float(memory), len(self.recompute), **means)  # as a file gives it back

    def modes(self, key: str) -> tuple[Mode, ...]:
        """How the operator with this key runs on each mesh axis."""
        return parse_modes(tuple(self.operators[key]))

    def at_rest(self, parameter: str) -> Layout:
        """A parameter's layout between steps."""
        return parse_layout(self.parameters[parameter].at_rest)

    @property
    def padded(self) -> dict[str, int]:
        """The parameters that are used with rows of padding, and with how many rows in all."""
        return padded_rows(self.parameters)
