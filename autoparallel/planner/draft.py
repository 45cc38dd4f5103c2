"""Plans that are made without ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.utils import _pytree as pytree

from autoparallel.decisions.prediction import Prediction
from autoparallel.graph.beside import CARRIED, DRAWS, beside_in
from autoparallel.graph.calls import Call
from autoparallel.graph.captured import Captured, describe_inputs
from autoparallel.graph.carried_attributes import (
    ChangesAttributesError,
    as_argument,
    describe_attributes,
)
from autoparallel.graph.drawn_numbers import (
    DrawsNumbersError,
    add_script,
    describe_draws,
    drawn_ahead,
    script_of,
)
from autoparallel.graph.errors import NeedsGradientError
from autoparallel.graph.nesting import flatten
from autoparallel.graph.plain_tensors import attribute_at
from autoparallel.operators import RandomState
from autoparallel.plan import Plan
from autoparallel.planner.candidates.evaluation import Evaluator
from autoparallel.planner.planner import Planner
from autoparallel.planner.programs import UNBOUND, prepare
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
            finished, _ = planner.finish(captured, plan, call, UNBOUND)
    if staged is None:
        assert finished.prediction is not None
        return Draft(finished, finished.prediction)
    assert finished.pipeline is not None and finished.pipeline.traffic is not None
    traffic = finished.pipeline.traffic
    busiest = max(range(request.stages), key=lambda rank: (traffic.calls[rank] + traffic.gradients[rank]).total_bytes)
    return Draft(finished, replace(staged, forward=traffic.calls[busiest], gradients=traffic.gradients[busiest]))


def call_of(args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, with_target: bool = False) -> Call:
    """A call with plain global inputs; the values of tensors matter where the model's Python reads them."""
    leaves, in_spec = flatten((tuple(args), dict(kwargs or {})))
    specs, batch = describe_inputs(leaves)
    return Call(tuple(leaves), tuple(specs), (None,) * len(leaves), in_spec, batch, with_target, (), ())


def capture_given(planner: Planner, call: Call) -> tuple[Captured, Call]:
    """The forward graph of a call, and the call with those attributes of the model beside its inputs that it changes,
    and the numbers that it draws of Python's ``random``.

    Raises:
        CaptureError: when the model cannot be captured.
    """
    try:
        return planner.capture(call), call
    except ChangesAttributesError as error:
        attributes = beside_in(call.specs, call.in_spec).attributes
        labels = {**attributes, **error.values}
        if len(labels) == len(attributes):
            raise
        argument = as_argument({x: attribute_at(planner.model, x, planner.request.loss_fn) for x in labels})
        larger = _add_argument(call, CARRIED, argument, describe_attributes(argument))
    except DrawsNumbersError as error:
        before = beside_in(call.specs, call.in_spec).draws
        scripts = {label: script_of(label, len(numbers))[1] for label, numbers in before.items()}
        drawn = drawn_ahead(add_script(scripts, error), RandomState(0, 0))
        larger = _add_argument(call, DRAWS, drawn, describe_draws(drawn))
    except NeedsGradientError as error:
        needed = replace(call.specs[error.place], requires_grad=True)
        larger = replace(call, specs=(*call.specs[: error.place], needed, *call.specs[error.place + 1 :]))
    return capture_given(planner, larger)


def _add_argument(call: Call, name: str, argument: Any, specs: Sequence[Any]) -> Call:
    """A call with one keyword argument more, or another one of that name.

    Args:
        specs: the inputs that the argument is.
    """
    args, kwargs = pytree.tree_unflatten(call.specs, call.in_spec)
    more = {name: pytree.tree_unflatten(specs, pytree.tree_structure(argument))}
    described, in_spec = pytree.tree_flatten((args, {**kwargs, **more}))
    return replace(call, specs=tuple(described), layouts=(None,) * len(described), in_spec=in_spec)
