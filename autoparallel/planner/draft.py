"""Plans that are made without ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.utils import _pytree as pytree

from autoparallel.decisions.prediction import Prediction
from autoparallel.graph.calls import Call
from autoparallel.graph.captured import Captured, describe_inputs
from autoparallel.graph.carried_attributes import CARRIED, ChangesAttributesError, as_argument, describe_attributes
from autoparallel.graph.plain_tensors import attribute_at
from autoparallel.plan import Plan
from autoparallel.planner.candidates.evaluation import Evaluator
from autoparallel.planner.planner import Planner
from autoparallel.planner.programs import prepare
from autoparallel.predict.stages import predict_stages
from autoparallel.report.progress import UNSHOWN, Progress


@dataclass(frozen=True)
class Draft:
    """A plan that was made without ranks.

    Attributes:
        plan: the plan.
        prediction: what a step costs; of a pipeline, the rank that has most to do.
    """

    plan: Plan
    prediction: Prediction


def draft_captured(
    planner: Planner,
    captured: Captured,
    call: Call,
    progress: Progress = UNSHOWN,
    evaluator: Evaluator | None = None,
    *,
    checked: bool = True,
) -> Draft:
    """Plans one call of a model in training, without ranks.

    Args:
        captured: is used up; an evaluator has another copy.
        evaluator: of the planner's request, which may know much of it already.
        checked: whether the program is made and checked, whatever the search has predicted.

    Raises:
        PlanError: when the model cannot be planned so.
    """
    request = planner.request
    with progress.phase("search"):
        plan = request.plan
        if not isinstance(plan, Plan):
            plan = planner.search(captured, call, evaluator=evaluator)
    with progress.phase("predict"):
        finished = None if checked else planner.outlook(plan, call)
        staged: Prediction | None = None
        if finished is None:
            prepare(request, captured, plan, call)
            staged = predict_stages(captured, plan, request.profile) if request.stages else None
            finished, _ = planner.finish(captured, plan, call, "mesh0")
    if staged is None:
        assert finished.prediction is not None
        return Draft(finished, finished.prediction)
    assert finished.pipeline is not None and finished.pipeline.traffic is not None
    traffic = finished.pipeline.traffic
    busiest = max(range(request.stages), key=lambda rank: (traffic.calls[rank] + traffic.gradients[rank]).total_bytes)
    return Draft(finished, replace(staged, forward=traffic.calls[busiest], gradients=traffic.gradients[busiest]))


def call_of(args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, with_target: bool = False) -> Call:
    """A call with plain global inputs; the values of tensors matter where the model's Python reads them."""
    leaves, in_spec = pytree.tree_flatten((tuple(args), dict(kwargs or {})))
    specs, batch = describe_inputs(leaves)
    return Call(tuple(leaves), tuple(specs), (None,) * len(leaves), in_spec, batch, with_target, (), ())


def capture_given(planner: Planner, call: Call) -> tuple[Captured, Call]:
    """The forward graph of a call, and the call with those attributes of the model beside its inputs that it changes.

    Raises:
        CaptureError: when the model cannot be captured.
    """
    try:
        return planner.capture(call), call
    except ChangesAttributesError as error:
        args, kwargs = pytree.tree_unflatten(call.specs, call.in_spec)
        if CARRIED in kwargs:
            raise
        argument = as_argument({x: attribute_at(planner.model, x, planner.request.loss_fn) for x in error.values})
    in_spec = pytree.tree_structure((args, {**kwargs, CARRIED: argument}))
    more = describe_attributes(argument)
    layouts = (*call.layouts, *[None] * len(more))
    return capture_given(planner, replace(call, specs=(*call.specs, *more), layouts=layouts, in_spec=in_spec))
