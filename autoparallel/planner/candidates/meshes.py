"""Choosing the mesh: the devices factored into axes, by what a step is searched to cost on each.

[Note: factored meshes] A mesh that the user leaves open has at most three axes.  Ranks fill the nodes in order, so the
last axis must lie inside a node; meshes that differ only in the order of axes whose groups lie over as many nodes are
one.  All that have one or two axes are searched, then those that split an axis of the best of two, and pipelines: a
number of stages after the other, until more of them cost more.  Where a pipeline would change what the model returns,
it is never taken unasked, and is looked at to say what it would gain: mesh after mesh, until one gains nothing.  How
many searches that may be is bounded (``thresholds``), and what was not tried is listed.

[Note: one yardstick] Meshes are compared by what is predicted of their plans: of short models, so that what hides
behind what counts; of a pipeline the time of its schedule, and what gathering, reducing and updating its parameters
costs the rank that has most of that to do.  A mesh without a pipeline is searched as it would be planned, but no
further than tells whether it can be faster than those before it.  Of pipelines only what the search finds is looked at.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from autoparallel.comm.world import PIPELINE_AXIS, Axes, axes_of, mesh_text
from autoparallel.decisions.meshes import Alternative, MeshChoice
from autoparallel.decisions.parameters import PlanError
from autoparallel.graph.calls import Call
from autoparallel.graph.captured import Captured
from autoparallel.hardware import Profile
from autoparallel.passes.adapt_captured import leave_only_loss
from autoparallel.planner.candidates.evaluation import Evaluator
from autoparallel.planner.candidates.proposals import proposals
from autoparallel.planner.fits import returns_loss_alone, unable
from autoparallel.planner.request.request import Request
from autoparallel.planner.thresholds import THRESHOLDS

Shape = tuple[int, ...]

Spread = Callable[[Callable[[Axes], Alternative], Sequence[Axes]], list[Alternative]]
"""Applies a function to every one of some meshes."""


# ------------------------------------------------------------------------------------------------------- enumeration


def factored(devices: int, axes: int) -> list[Shape]:
    """All ordered factorisations into so many axes of at least two ranks, the first axis large first; one device is
    one axis."""
    if axes == 1:
        return [(devices,)]
    shapes = []
    for first in (d for d in range(devices // 2, 1, -1) if devices % d == 0):
        shapes += [(first, *rest) for rest in factored(devices // first, axes - 1) if min(rest) > 1]
    return shapes


def distinct(shapes: Iterable[Shape], profile: Profile) -> list[Shape]:
    """The first of those meshes that are alike but for the order of their axes."""
    first: dict[Any, Shape] = {}
    for shape in shapes:
        first.setdefault(_node_spans(shape, profile), shape)
    return list(first.values())


def _node_spans(shape: Shape, profile: Profile) -> Any:
    """How the groups over all sets of axes lie over nodes, whatever the axes' order."""

    def lies(order: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        sizes = tuple(shape[axis] for axis in order)
        groups = (axes for n in range(1, len(order) + 1) for axes in itertools.combinations(order, n))
        return sizes, tuple(profile.nodes_of(shape, axes) for axes in groups)

    return min(lies(order) for order in itertools.permutations(range(len(shape))))


def inside(shape: Shape, profile: Profile) -> bool:
    """Whether the last axis lies inside a node."""
    return len(shape) == 1 or profile.nodes_of(shape, (len(shape) - 1,)) == 1


def splits(shape: Shape, profile: Profile) -> list[Shape]:
    """The meshes of one more axis that split one of a mesh's, those along nodes first, then the most even."""
    shapes = [
        (*shape[:axis], *parts, *shape[axis + 1 :]) for axis, size in enumerate(shape) for parts in factored(size, 2)
    ]

    def order(split: Shape) -> tuple[bool, int, Shape]:
        along = profile.node == 0 or profile.node in itertools.accumulate(reversed(split), lambda a, b: a * b)
        return not along, max(split), split

    return sorted((s for s in distinct(shapes, profile) if inside(s, profile)), key=order)


def stage_meshes(devices: int, ranks: int, inner: int, profile: Profile) -> list[Axes]:
    """The meshes of a pipeline over so many ranks: one axis beside it, and two, of which the last has ``inner``."""
    rest = devices // ranks
    shapes: list[Shape] = [(rest,)]
    if 1 < inner < rest and rest % inner == 0:
        shapes.append((rest // inner, inner))
    return [((PIPELINE_AXIS, ranks), *axes_of(shape)) for shape in shapes]


# ------------------------------------------------------------------------------------------------------------- choice


def one_after_another(price: Callable[[Axes], Alternative], meshes: Sequence[Axes]) -> list[Alternative]:
    """The meshes priced here, in order."""
    return [price(mesh) for mesh in meshes]


@dataclass(frozen=True)
class MeshSearch:
    """What is to be planned for, on a mesh that is open.

    Attributes:
        request, captured, call: as ``Evaluator`` takes them; of the request, the axes do not matter. A pipeline of
            which something is fixed must be one; else the search decides.
        devices: how many there are.
        refusal: why no pipeline can be run at all; empty where one can.
    """

    request: Request
    captured: Captured
    call: Call
    devices: int
    refusal: str = ""
    # Of the best mesh that was searched here, for its plan to be made of.
    _searched: dict[Axes, Evaluator] = field(default_factory=dict, init=False, repr=False, compare=False)

    def choose(self, spread: Spread = one_after_another) -> MeshChoice:
        """The best mesh, with what the others would cost.

        Args:
            spread: prices several meshes, in the order given.

        Raises:
            PlanError: where no mesh has a plan.
        """
        capacity, looks = self.capacity, _Looks(self, spread)
        must = self.request.pipeline is not None
        if not must:
            looks.at_meshes_without_pipeline()
        problem = self.refusal or unable(self.captured, self.call) or ("" if must else self.captured.weight.apart)
        if not problem:
            looks.at_pipelines()
        elif must:
            raise PlanError(f"pipeline=... was given, but the model cannot be a pipeline: {problem}")
        tried = sorted(looks.tried, key=lambda a: a.order(capacity))
        if not tried or tried[0].seconds is None or tried[0].problem:
            reasons = "".join(f"\n  {mesh_text(a.mesh)}: {a.problem}" for a in tried[:3])
            raise PlanError(f"no mesh of {self.devices} devices has a plan:{reasons or ' too few devices'}")
        return MeshChoice(tuple(tried), tuple(looks.untried), capacity)

    @property
    def capacity(self) -> float | None:
        """Bytes of a device that a plan may take; None where they are not known."""
        limit = self.request.memory_limit
        return self.request.profile.memory if limit is None else limit

    @cached_property
    def _loss_alone(self) -> Captured:
        """The graph as all pipelines have it."""
        captured = self.captured.copy()
        leave_only_loss(captured)
        return captured

    def price(self, mesh: Axes, below: float = math.inf) -> Alternative:
        """What a mesh costs; of one without a pipeline that cannot cost less than ``below`` seconds, what a plan costs
        that need not fit."""
        request = self.request.on(mesh)
        evaluator = Evaluator(request, self._loss_alone if request.stages else self.captured, self.call)
        try:
            outcome = evaluator.best(proposals(evaluator, thorough=not request.stages, below=below))
            plan = outcome.require()
        except PlanError as error:
            return Alternative(mesh, problem=str(error))
        if pipeline := plan.pipeline:
            alternative = Alternative(
                mesh,
                outcome.seconds,
                max(pipeline.memory_by_rank()),
                pipeline.schedule,
                pipeline.microbatches,
                pipeline.bubble,
                changes(self.captured, self.request.outputs),
            )
        else:
            forecast = evaluator.forecast(plan)
            alternative = Alternative(mesh, forecast.seconds, forecast.memory)
        if alternative.seconds_within(self.capacity) < below:
            self._searched.clear()
            self._searched[mesh] = evaluator
        return alternative

    def evaluator(self, mesh: Axes) -> Evaluator:
        """What plans on a mesh; on the best that was searched here, what has searched it."""
        return self._searched.get(mesh) or Evaluator(self.request.on(mesh), self.captured, self.call)


class _Looks:
    """What a search among meshes has looked at.

    Attributes:
        tried: what was priced.
        untried: the meshes that were not.
    """

    def __init__(self, search: MeshSearch, spread: Spread) -> None:
        self.search, self.spread, self.capacity = search, spread, search.capacity
        self.tried: list[Alternative] = []
        self.untried: list[Axes] = []
        self._fastest = math.inf  # seconds of what can be taken

    def at(self, meshes: Sequence[Axes]) -> list[Alternative]:
        """Prices some meshes, and notes what they cost."""
        self.tried.extend(alternatives := self.spread(self._price, meshes))
        self._fastest = min(a.seconds_within(self.capacity) for a in self.tried)
        return alternatives

    def _price(self, mesh: Axes) -> Alternative:
        alternative = self.search.price(mesh, self._fastest)
        self._fastest = min(self._fastest, alternative.seconds_within(self.capacity))
        return alternative

    def _smallest(self, alternatives: Sequence[Alternative]) -> Alternative | None:
        return min(alternatives, key=lambda a: a.order(self.capacity), default=None)

    def at_meshes_without_pipeline(self) -> None:
        """Looks at meshes of one and of two axes, then at those that split an axis of the best of two."""
        request, devices, profile = self.search.request, self.search.devices, self.search.request.profile
        two = distinct(factored(devices, 2), profile)
        near = sorted((shape for shape in two if inside(shape, profile)), key=lambda shape: (max(shape), shape))
        near = near[: THRESHOLDS.two_axes]
        flat = self.at([axes_of((devices,)), *map(axes_of, near)])
        self.untried.extend(axes_of(shape) for shape in two if shape not in near)
        fastest = self._smallest(flat[1:])
        three = distinct(factored(devices, 3), profile)
        split = splits(tuple(size for _, size in fastest.mesh), profile) if fastest is not None else []
        # Within a limit, what a multiplier needs many searches for takes minutes on three axes.
        split = split[: THRESHOLDS.three_axes if request.memory_limit is None else 0]
        self.at([axes_of(shape) for shape in split])
        self.untried.extend(axes_of(shape) for shape in three if shape not in split)

    def at_pipelines(self) -> None:
        """Looks at pipelines of more and more stages, until more cost more; at those that are not taken unasked, one
        after the other, while they are faster than what is taken: which mesh that is they do not change."""
        request, devices, profile = self.search.request, self.search.devices, self.search.request.profile
        pair = self._smallest([a for a in self.tried if len(a.mesh) == 2])
        inner = pair.mesh[-1][1] if pair is not None else min(profile.node or devices, devices)
        unasked = request.pipeline is None and bool(changes(self.search.captured, request.outputs))
        before: Alternative | None = None
        searched = 0
        for ranks in (n for n in range(2, devices + 1) if devices % n == 0):
            meshes = stage_meshes(devices, ranks, inner, profile)
            if searched + len(meshes) > THRESHOLDS.pipelines or before is not None and before.seconds is None:
                self.untried.extend(meshes)
                continue
            searched += len(meshes)
            looked = self.at(meshes[:1] if unasked else meshes)
            if unasked and (looked[0].seconds or 0.0) > self._fastest:
                self.untried.extend(meshes[1:])
            elif unasked:
                looked += self.at(meshes[1:])
            least = self._smallest(looked)
            assert least is not None
            worse = before is not None and before.order(self.capacity) < least.order(self.capacity)
            if worse or least.problem and (least.seconds or math.inf) > self._fastest:
                searched = THRESHOLDS.pipelines
            before = least


def changes(captured: Captured, outputs: str) -> str:
    """What a pipeline would change about the model's results, so that it is not taken unasked; empty for nothing."""
    if captured.mutated:
        return "a pipeline takes batch statistics of microbatches; give a mesh with an axis 'pp' to have one"
    if not returns_loss_alone(captured, outputs):
        return "a pipeline keeps no output beside the loss; give a mesh with an axis 'pp' to have one"
    return ""
