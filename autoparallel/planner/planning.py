"""From a model and a call to a plan, a rank's program and a prediction: the part of ``compile()`` that needs no ranks.

Nothing here needs a process group, a device, or a parameter's memory, so it plans for any number of devices on a
laptop.  ``compile()`` uses it on every rank, and ``python -m autoparallel plan`` on none.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoparallel.capture.capture import capture
from autoparallel.comm.world import Axes
from autoparallel.decisions.parameters import ParameterPlan, PlanError, padded_rows
from autoparallel.decisions.prediction import Prediction
from autoparallel.graph.calls import Call
from autoparallel.graph.captured import Captured, InputSpec, describe_inputs
from autoparallel.hardware import Profile
from autoparallel.passes.adapt_captured import pad
from autoparallel.passes.pad_vocabulary import find_vocabularies, pad_vocabulary
from autoparallel.passes.recompute_layers import find_layers
from autoparallel.passes.runner import Watch, ignore
from autoparallel.placements.redistribution import Redistributor
from autoparallel.plan import Plan
from autoparallel.planner.fits import require_fits
from autoparallel.planner.fitting import fit
from autoparallel.planner.interleaving import why_whole
from autoparallel.planner.pins import Pins
from autoparallel.planner.presets import EXPERT_AXIS, PRESETS, Constraints, constraints_for
from autoparallel.planner.problem import Schedule
from autoparallel.planner.search import search
from autoparallel.planner.space import SearchSpace
from autoparallel.predict.forecast import Forecast, extrapolated
from autoparallel.predict.predict import predict
from autoparallel.predict.reductions import choose_reductions, with_reductions
from autoparallel.program import LocalProgram, build_program, input_layouts, wanted_outputs

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

Told = Callable[[str], None]
"""Is told the phase that begins, in a word or two."""


NEARLY_EQUAL = 1.25
"""Plans whose prices add up to at most so many times that of another are compared by predicting both."""


@dataclass(frozen=True)
class Request:
    """What is asked of the planner, for all calls of a model.

    Attributes:
        axes: the mesh axes by name and size.
        profile: the hardware that is planned for.
        plan: "auto", a preset, or a plan to carry out as it is.
        pins: what some parameters, modules and operators must be, whatever else is chosen.
        loss_fn, memory_limit, outputs, precision: as ``compile()`` takes them; the limit in bytes.
        device: the kind of device that programs run on.
        hoist_all: gathers every parameter before the body.
    """

    axes: Axes
    profile: Profile
    plan: str | Plan = "auto"
    pins: Pins = field(default_factory=Pins)
    loss_fn: Callable[..., Any] | None = None
    memory_limit: float | None = None
    outputs: str = "auto"
    precision: MixedPrecisionPolicy | None = None
    device: str = "cpu"
    hoist_all: bool = False

    @property
    def origin(self) -> str:
        """The preset's name, that of a plan's preset, or "auto"."""
        return self.plan.origin if isinstance(self.plan, Plan) else self.plan

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.axes)

    def constraints(self) -> Constraints:
        """What the preset asks of each mesh axis."""
        return constraints_for(self.origin if self.origin in PRESETS else "auto", [name for name, _ in self.axes])


def limit_in_bytes(limit: float | None, profile: Profile) -> float | None:
    """A limit on memory in bytes; one that is at most 1 is a part of what the profile's device has.

    Raises:
        ValueError: for a part of a memory that is not known.
    """
    if limit is None or limit > 1:
        return limit
    if limit <= 0:
        raise ValueError(f"memory_limit must be positive, got {limit}")
    if profile.memory is None:
        raise ValueError(
            f"memory_limit={limit} is a part of the device's memory, which the profile {profile.name!r} does not know: "
            "give bytes"
        )
    return limit * profile.memory


class Planner:
    """Captures, searches and builds for one model; keeps what must be the same for all of its calls."""

    def __init__(self, model: nn.Module, request: Request) -> None:
        self.model, self.request = model, request
        sizes, profile = request.sizes, request.profile
        self.redistributor = Redistributor(sizes, partial(profile.step_seconds, sizes))
        self.thorough = True  # whether presets are looked at, too (see [Note: what a sum cannot tell])
        self.schedule = Schedule()  # of a step that is planned for
        # With a limit, when gradients are reduced is chosen on the first program that trains, for all kinds.
        self.reductions: Mapping[str, str] | None = None
        if isinstance(request.plan, Plan):
            self.reductions = {name: p.reduce for name, p in request.plan.parameters.items()}
        elif request.memory_limit is None:
            self.reductions = {}

    def capture(self, call: Call, training: bool | None = None) -> Captured:
        """The forward graph of a call."""
        request = self.request
        return capture(
            self.model,
            call.specs,
            call.in_spec,
            loss_fn=request.loss_fn if call.with_target else None,
            least_batch=2 * math.prod(request.sizes),
            batch=call.batch,
            training=training,
            detach_beside_loss=request.outputs == "auto",
            precision=request.precision,
            ranks=math.prod(request.sizes),
            gradients=call.gradients or training is True,
        )

    def search(self, captured: Captured, call: Call, at_rest: Mapping[str, ParameterPlan] | None = None) -> Plan:
        """The plan that the search chooses.

        [Note: what a sum cannot tell] The search adds up prices.  What hides behind what is no sum, and on hardware
        where nothing hides, sums that are nearly equal may be in the wrong order.  So "auto" is the best of what the
        search chooses freely and of the presets, as the program of each is predicted (see ``predict.forecast``).

        Args:
            at_rest: how the parameters lie already; None where that is open.

        Raises:
            PlanError: when no plan satisfies the constraints, the pins or the limit.
        """
        request = self.request
        if not self.thorough:  # a first look: recomputing layers is asked about only where nothing fits without
            with contextlib.suppress(PlanError):
                return self._search(captured, call, request.origin, at_rest, request.memory_limit)
        if not self.thorough or request.plan != "auto" or at_rest is not None:
            return self._search_within(captured, call, request.origin, at_rest, request.memory_limit)[0]
        best: Plan | None = None
        forecast: Forecast | None = None  # of the best plan, once it is needed
        free: ValueError | None = None
        limit, roughly = request.memory_limit, partial(self._roughly, captured, call, {})
        try:
            best, forecast = self._search_within(captured, call, "auto", None, limit)
        except ValueError as error:
            free = error
        names = [name for name, _ in request.axes]
        for preset in PRESETS:
            if preset == "auto" or preset == "expert_parallel" and EXPERT_AXIS not in names:
                continue
            try:
                plan = self._search(captured, call, preset, None, None)
            except ValueError:
                continue
            if best is not None and self._is_slower(plan, best, forecast):
                continue
            found = roughly(plan)
            if best is not None:
                forecast = forecast or roughly(best)
                if found.seconds >= forecast.seconds:
                    continue
            if limit is not None:
                if not found.whole and found.memory <= limit:
                    found = self._exactly(captured, call, plan)
                if found.memory > limit:
                    continue
            best, forecast = plan, found
        if best is None:
            assert free is not None
            raise free
        return replace(best, origin="auto")

    def _is_slower(self, plan: Plan, best: Plan, forecast: Forecast | None) -> bool:
        """Whether a plan is slower than the best one by far, or as good as the same, without predicting it."""
        if plan.cost is None or plan.estimate is None or best.cost is None:
            return False
        if (plan.operators, plan.parameters) == (best.operators, best.parameters):
            return True
        if not self.request.profile.overlap:
            return plan.cost > NEARLY_EQUAL * best.cost
        # All hides that can: what travels for parameters.
        return forecast is not None and plan.cost - sum(plan.estimate.parameters.values()) >= forecast.seconds

    def rewrite(self, captured: Captured, plan: Plan) -> None:
        """Rewrites a captured graph into the one that the plan, which was made of it, is about; once."""
        pad(captured, plan)

    def prepare(self, captured: Captured, plan: Plan) -> None:
        """Rewrites a captured graph into the one that any plan is about, and checks that it is.

        Raises:
            PlanError: when the plan does not fit it.
        """
        self.rewrite(captured, plan)
        require_fits(plan, captured.graph, self.request.axes, captured.parameters)

    def _paddings(
        self, captured: Captured, constraints: Constraints, at_rest: Mapping[str, ParameterPlan] | None
    ) -> list[dict[str, int]]:
        """With how many rows vocabularies may be used: how they lie already, as a preset has them, or either way."""
        kept = self.request.pins.kept
        if at_rest is not None or kept is not None:
            return [padded_rows(at_rest if at_rest is not None else kept.parameters)]  # type: ignore[union-attr]
        sizes, graph = self.request.sizes, captured.graph
        if constraints.tensor or constraints.data:
            shards = math.prod(sizes[axis] for axis in constraints.tensor)
            return [find_vocabularies(graph, captured.parameters, shards)]
        # Worth a search of its own where there is an axis that could not shard a vocabulary otherwise.
        alone: dict[str, int] = {}
        for size in set(sizes):
            alone |= find_vocabularies(graph, captured.parameters, size)
        together = find_vocabularies(graph, captured.parameters, math.prod(sizes))
        return [{}, {**alone, **{name: together[name] for name in alone if name in together}}] if alone else [{}]

    def _exactly(self, captured: Captured, call: Call, plan: Plan) -> Forecast:
        """What a plan takes, predicted from the whole program."""
        return Forecast.of(self._predict_copy(captured.copy(), plan, call))

    def _roughly(self, captured: Captured, call: Call, known: dict[Hashable, Forecast], plan: Plan) -> Forecast:
        """The same from fewer layers, where they repeat."""
        return extrapolated(captured, plan, lambda graph, short: self._predict_copy(graph, short, call), known)

    def _predict_copy(self, graph: Captured, plan: Plan, call: Call) -> Prediction:
        """What a plan makes of a graph, which is used up, is predicted to cost."""
        self.rewrite(graph, plan)
        return predict(self.build(graph, plan, call, "mesh0"), plan, self.request.profile)

    def _search_within(
        self,
        captured: Captured,
        call: Call,
        origin: str,
        at_rest: Mapping[str, ParameterPlan] | None,
        limit: float | None,
    ) -> tuple[Plan, Forecast | None]:
        """A preset's plan within a limit (see ``planner.fitting``), and what it takes where there is one.

        Raises:
            PlanError: when nothing fits.
        """
        search = partial(self._search, captured, call, origin, at_rest)
        if limit is None:
            return search(None), None
        layers = [] if self.request.hoist_all else find_layers(captured.graph)
        roughly = partial(self._roughly, captured, call, {})
        return fit(search, roughly, partial(self._exactly, captured, call), limit, layers)

    def _search(
        self,
        captured: Captured,
        call: Call,
        origin: str,
        at_rest: Mapping[str, ParameterPlan] | None,
        limit: float | None,
        recompute: Sequence[str] = (),
        room: float = 0.0,
    ) -> Plan:
        constraints = replace(self.request, plan=origin).constraints()
        best: Plan | None = None
        failed: PlanError | None = None
        for padded in self._paddings(captured, constraints, at_rest):
            graph = captured.copy() if padded else captured
            pad_vocabulary(graph.module, graph.parameters, padded)
            try:
                plan = self._search_graph(graph, call, origin, constraints, at_rest, limit, recompute, room)
            except PlanError as error:
                failed = failed or error
                continue
            rows = {name: replace(p, rows=padded.get(name)) for name, p in plan.parameters.items()}
            plan = replace(plan, parameters=rows)
            if best is None or plan.cost < best.cost:  # type: ignore[operator]
                best = plan
        if best is None:
            assert failed is not None
            raise failed
        return best

    def _search_graph(
        self,
        captured: Captured,
        call: Call,
        origin: str,
        constraints: Constraints,
        at_rest: Mapping[str, ParameterPlan] | None,
        limit: float | None,
        recompute: Sequence[str],
        room: float,
    ) -> Plan:
        request = self.request
        if constraints.data and not captured.actual and any(isinstance(s, InputSpec) for s in call.specs):
            raise PlanError(
                f"the plan {origin!r} shards the batch, but the model fixes the batch size at {call.batch}: "
                "use x.shape[0] instead of a number, or plan='tensor_parallel'"
            )
        space = SearchSpace(
            captured,
            request.axes,
            request.profile,
            constraints,
            self.redistributor,
            self.wanted(captured),
            pinned=at_rest,
            input_layouts=input_layouts(captured, call.specs, call.layouts),
            pins=request.pins.resolve(captured, request.axes),
            recompute=recompute,
            schedule=self.schedule,
        )
        plan = replace(search(space, origin, limit, room), recompute=tuple(recompute))
        cutting = constraints.tensor or {*range(len(request.axes))} - constraints.data
        axes = [request.axes[a] for a in sorted(cutting) if request.sizes[a] > 1]
        plan = replace(plan, notes=why_whole(captured.graph, axes, space.size.shape))
        if space.pins.freed:
            warnings.warn(
                f"{len(space.pins.freed)} decisions of the pinned plan are not possible any more and were searched "
                f"again: {', '.join(space.pins.freed[:5])}",
                stacklevel=2,
            )
        return plan

    def wanted(self, captured: Captured) -> Sequence[Any]:
        """The layout that each output must have; None where it may stay as it is made."""
        return wanted_outputs(captured, self.request.outputs, len(self.request.axes))

    def build(
        self, captured: Captured, plan: Plan, call: Call, prefix: str, watch: Watch = ignore
    ) -> LocalProgram:
        """A rank's program; the captured graph becomes its body."""
        precision = self.request.precision
        return build_program(
            captured,
            plan,
            prefix=prefix,
            redistributor=self.redistributor,
            outputs=self.wanted(captured),
            inputs=input_layouts(captured, call.specs, call.layouts),
            device=torch.device(self.request.device),
            hoist_all=self.request.hoist_all,
            reduce_dtype=precision.reduce_dtype if precision is not None else None,
            watch=watch,
        )

    def finish(self, captured: Captured, plan: Plan, call: Call, prefix: str) -> tuple[Plan, LocalProgram]:
        """The plan with its prediction and with the times of reducing that fit the limit, and a rank's program."""
        profile, limit = self.request.profile, self.request.memory_limit
        plan = with_reductions(plan, self.reductions or {})
        program = self.build(captured, plan, call, prefix)
        prediction = predict(program, plan, profile)
        if self.reductions is None and any(cost.seconds for cost in prediction.reductions.values()):
            assert limit is not None
            left = limit - prediction.total_memory
            self.reductions = choose_reductions(program.buckets, self.request.sizes, profile, left)
            plan = with_reductions(plan, self.reductions)
            program.reducing(plan)
            prediction = predict(program, plan, profile)
        return plan.with_prediction(prediction), program


# ------------------------------------------------------------------------------------------------ without any ranks


def call_of(args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, with_target: bool = False) -> Call:
    """A call with plain global inputs; of their tensors only shapes and dtypes matter."""
    leaves, in_spec = pytree.tree_flatten((tuple(args), dict(kwargs or {})))
    specs, batch = describe_inputs(leaves)
    return Call((), tuple(specs), (None,) * len(leaves), in_spec, batch, with_target, (), ())


@dataclass(frozen=True)
class Draft:
    """A plan that was made without ranks.

    Attributes:
        plan: with its prediction.
        program: what a rank would run; None for a pipeline, whose ranks run different ones.
        predicted: of a pipeline's step.
    """

    plan: Plan
    program: LocalProgram | None
    predicted: Prediction | None = None

    @property
    def prediction(self) -> Prediction:
        found = self.predicted or self.plan.prediction
        assert found is not None
        return found


def draft(model: nn.Module, call: Call, request: Request, told: Told = lambda phase: None) -> Draft:
    """Plans one call of a model in training, without ranks.

    Args:
        model: the plain model; meta tensors will do.
        told: is told each phase as it begins.

    Raises:
        PlanError, CaptureError: when the model cannot be planned so.
    """
    planner = Planner(model, request)
    told("trace")
    captured = planner.capture(call)
    return draft_captured(planner, captured, call, told)


def draft_captured(planner: Planner, captured: Captured, call: Call, told: Told = lambda phase: None) -> Draft:
    """The same for a graph that has been captured already; it is used up."""
    told("search")
    requested = planner.request.plan
    if isinstance(requested, Plan):
        plan = requested
    else:
        plan = planner.search(captured, call)
    planner.prepare(captured, plan)
    told("predict")
    return Draft(*planner.finish(captured, plan, call, "mesh0"))
