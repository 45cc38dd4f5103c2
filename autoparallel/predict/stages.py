"""What a step of a pipeline is predicted to cost: its schedule, and around it what its parameters cost."""

from __future__ import annotations

from autoparallel.decisions.prediction import Prediction
from autoparallel.graph.captured import Captured
from autoparallel.hardware import Profile
from autoparallel.plan import Plan
from autoparallel.predict.optimizer import ParameterCost, parameter_cost
from autoparallel.program.stages import parameter_ranks

MEMORY = "parameters, states, gradients and activations"


def predict_stages(captured: Captured, plan: Plan, profile: Profile) -> Prediction:
    """Time and memory of the rank of the pipeline that has most to do; neither traffic nor modules.

    Args:
        captured: the graph that the plan is about, with the sizes of a microbatch.
    """
    pipeline = plan.pipeline
    assert pipeline is not None
    forward = sum(stage.forward for stage in pipeline.stages)
    share = forward / (forward + sum(stage.backward for stage in pipeline.stages) or 1.0)
    updates = [ParameterCost(0)] * pipeline.ranks
    ranks = parameter_ranks(captured, pipeline)
    for node in captured.parameter_nodes:
        name = captured.parameters[node.name]
        updates[ranks[name]] += parameter_cost(
            captured, node, plan.at_rest(name), plan.axis_sizes, profile, offloaded=plan.offload_optimizer
        )
    spent = parameter_seconds(captured, plan)
    gradients = [max(0.0, all_ - update.seconds) for all_, update in zip(spent, updates, strict=True)]
    most = max(range(pipeline.ranks), key=lambda rank: gradients[rank] + updates[rank].seconds)
    return Prediction(
        forward_seconds=share * pipeline.seconds,
        backward_seconds=(1 - share) * pipeline.seconds,
        gradient_seconds=gradients[most],
        update_seconds=updates[most].seconds,
        memory={MEMORY: max(pipeline.memory_by_rank())},
        profile=profile.name,
        optimizer=profile.optimizer.name,
        host_memory=max(update.host for update in updates),
        host_seconds=updates[most].host_seconds,
    )


def parameter_seconds(captured: Captured, plan: Plan) -> list[float]:
    """What gathering, reducing and updating parameters costs each rank of the pipeline in a step; nothing where the
    search that priced it is not known."""
    assert plan.pipeline is not None
    spent = [0.0] * plan.pipeline.ranks
    if plan.estimate is not None:
        for name, rank in parameter_ranks(captured, plan.pipeline).items():
            spent[rank] += plan.estimate.parameters.get(name, 0.0)
    return spent
