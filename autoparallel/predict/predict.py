"""Predicting a step's traffic, time and memory from the program itself, not from the search's estimate."""

from __future__ import annotations

import math

from torch import fx

from autoparallel.comm.groups import active_axes
from autoparallel.comm.traffic import Traffic
from autoparallel.decisions.prediction import ACCUMULATORS, ModuleRow, ParameterRow, Prediction
from autoparallel.graph.sizes import Sizes
from autoparallel.hardware import Profile
from autoparallel.plan import Plan
from autoparallel.predict.communicator import BACKWARD, FORWARD, GRADIENTS, UNSHARD
from autoparallel.predict.dry_run import GRADIENT_BUFFERS, dry_run
from autoparallel.predict.optimizer import cost_at_rest, most_brought
from autoparallel.predict.reductions import accumulator_bytes, total_costs
from autoparallel.program.program import LocalProgram
from autoparallel.rules.calls import is_tensor

BROUGHT = "optimizer states that are on the device for their update"


def predict(program: LocalProgram, plan: Plan, profile: Profile, *, parts: bool = True) -> Prediction:
    """What a step of the program costs, by running it without values (see ``predict.dry_run``).

    Where a call runs in microbatches, the program is that of one of them; their gradients are added up apart, and
    reduced when all of them have run, once, with nothing left to hide behind.

    Args:
        parts: whether it is told of modules, too, and of other times of reducing, which comparing plans needs not.
    """
    run = dry_run(program, plan, profile)
    several = plan.microbatches > 1
    kept_apart = dry_run(program, plan, profile, [program.captured.objective or 0]) if several else run
    chains = list(program.chains.values())
    sizes = plan.axis_sizes

    trained = [c for c in chains if c.trainable]
    resting = [
        cost_at_rest(profile, sizes, c.shape, c.at_rest, c.rest_dtype.itemsize, c.trainable, plan.offload_optimizer)
        for c in chains
    ]
    at_rest, gradients = sum(x.parameter for x in resting), sum(x.gradient for x in resting)
    states = sum(x.states for x in resting)
    # The worst moment of forward and backward, or that of the optimizer's step.
    worst = kept_apart.peak
    updating = {GRADIENT_BUFFERS: gradients, BROUGHT: most_brought(resting)}
    peak = worst if sum(worst.values()) > sum(updating.values()) else updating
    inputs = run.inputs * plan.microbatches
    memory = {"parameters": at_rest, "optimizer states": states, "inputs and buffers": inputs, **peak}
    fixed = at_rest + states + inputs
    accumulators = sum(accumulator_bytes(c, sizes, apart=several) for c in trained)
    most = {**kept_apart.most, ("update", ""): sum(updating.values())}
    return Prediction(
        unshard=run.traffic[UNSHARD],
        forward=run.traffic[FORWARD],
        backward=run.traffic[BACKWARD],
        gradients=run.traffic[GRADIENTS],
        clip=_clip_traffic(plan) if gradients else Traffic(),
        unshard_seconds=run.seconds[UNSHARD],
        forward_seconds=run.seconds[FORWARD],
        backward_seconds=kept_apart.seconds[BACKWARD],
        gradient_seconds=max(run.seconds[GRADIENTS], run.reducing * several),
        update_seconds=sum(x.seconds for x in resting),
        memory={
            **{what: size for what, size in memory.items() if size},
            ACCUMULATORS: accumulators,
        },
        reductions=total_costs(program.buckets, sizes, profile) if parts else {},
        regathered=len(run.regathered),
        modules=_modules(program, plan) if parts else (),
        profile=profile.name,
        optimizer=profile.optimizer.name,
        host_memory=sum(x.host for x in resting),
        host_seconds=sum(x.host_seconds for x in resting),
        microbatches=plan.microbatches,
        timeline=_thin([(seconds, fixed + size) for seconds, size in run.history]),
        spans=tuple(run.spans),
        most={moment: fixed + size + accumulators * several for moment, size in most.items()},
    )


def _thin(points: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """The highest point of each stretch, a thousand of them at most."""
    stretch = max(-(-len(points) // 1000), 1)
    return tuple(max(points[i : i + stretch], key=lambda point: point[1]) for i in range(0, len(points), stretch))


def _clip_traffic(plan: Plan) -> Traffic:
    """The norm's one all-reduce: a sum and a flag in float64, over the whole mesh."""
    ranks = math.prod(plan.axis_sizes)
    if ranks == 1:
        return Traffic()
    axis = active_axes("+".join(plan.axis_names), dict(plan.mesh).__getitem__)
    return Traffic({("all_reduce", axis, ranks): (1, 2 * 8)})


def _modules(program: LocalProgram, plan: Plan) -> tuple[ModuleRow, ...]:
    chains = program.chains
    parameters: dict[str, list[ParameterRow]] = {}
    for name in plan.parameters:  # in the order of the model
        if name not in chains:
            continue
        chain = chains[name]
        path, _, leaf = name.rpartition(".")
        gather = plan.parameters[name].gather if chain.gathered else ""
        parameters.setdefault(path, []).append(
            ParameterRow(leaf, chain.shape, chain.at_rest, chain.uses, gather, chain.trainable, plan.padded.get(name))
        )
    last: dict[str, fx.Node] = {}
    for node in program.calls():
        if node.op == "call_function" and "needs" in node.meta and is_tensor(node):
            last[node.meta.get("module", "")] = node
    sizes = Sizes(program.captured.actual)
    rows = []
    for path in dict.fromkeys([*last, *parameters]):
        result = last.get(path)
        shape, layout = (None, None) if result is None else (sizes.shape(result), result.meta["placements"])
        rows.append(ModuleRow(path, tuple(parameters.get(path, ())), shape, layout))
    return tuple(rows)
