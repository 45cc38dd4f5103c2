"""Plans that are made without ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from autoparallel.decisions.prediction import Prediction
from autoparallel.graph.calls import Call
from autoparallel.graph.captured import Captured, describe_inputs
from autoparallel.plan import Plan
from autoparallel.planner.evaluation import Evaluator
from autoparallel.planner.planner import Planner
from autoparallel.planner.programs import prepare
from autoparallel.planner.request import Request
from autoparallel.predict.stages import predict_stages
from autoparallel.program import LocalProgram
from autoparallel.report.progress import UNSHOWN, Progress


@dataclass(frozen=True)
class Draft:
    """A plan that was made without ranks.

    Attributes:
        plan: with its prediction.
        program: what a rank would run; None for a pipeline, whose ranks run different ones, and where it is unchecked.
        predicted: of a pipeline's step.
    """

    plan: Plan
    program: LocalProgram | None
    predicted: Prediction | None = None

    @property
    def prediction(self) -> Prediction:
        prediction = self.predicted or self.plan.prediction
        assert prediction is not None
        return prediction


def draft(model: nn.Module, call: Call, request: Request) -> Draft:
    """Plans one call of a model in training, without ranks.

    Args:
        model: the plain model; meta tensors will do.

    Raises:
        PlanError, CaptureError: when the model cannot be planned so.
    """
    planner = Planner(model, request)
    return draft_captured(planner, planner.capture(call), call)


def draft_captured(
    planner: Planner,
    captured: Captured,
    call: Call,
    progress: Progress = UNSHOWN,
    evaluator: Evaluator | None = None,
    *,
    checked: bool = True,
) -> Draft:
    """The draft for a graph that has been captured already.

    Args:
        captured: is used up; an evaluator has another copy.
        evaluator: of the planner's request, which may know much of it already.
        checked: whether the program is made and checked, whatever the search has predicted.
    """
    request = planner.request
    with progress.phase("search"):
        plan = request.plan
        if not isinstance(plan, Plan):
            plan = planner.search(captured, call, evaluator=evaluator)
    with progress.phase("predict"):
        outlook = None if checked else planner.outlook(plan, call)
        if outlook is not None:
            return Draft(outlook, None)
        prepare(request, captured, plan, call)
        predicted = predict_stages(captured, plan, request.profile) if request.stages else None
        plan, built = planner.finish(captured, plan, call, "mesh0")
    if predicted is None:
        return Draft(plan, built.programs[0])
    assert plan.pipeline is not None and plan.pipeline.traffic is not None
    sent = plan.pipeline.traffic
    busiest = max(range(request.stages), key=lambda rank: (sent.calls[rank] + sent.gradients[rank]).total_bytes)
    return Draft(plan, None, replace(predicted, forward=sent.calls[busiest], gradients=sent.gradients[busiest]))


def call_of(args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, with_target: bool = False) -> Call:
    """A call with plain global inputs; of their tensors only shapes and dtypes matter."""
    leaves, in_spec = pytree.tree_flatten((tuple(args), dict(kwargs or {})))
    specs, batch = describe_inputs(leaves)
    return Call((), tuple(specs), (None,) * len(leaves), in_spec, batch, with_target, (), ())
