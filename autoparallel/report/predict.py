"""Predicting a step's traffic, time and memory from the program itself, not from the search's estimate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from autoparallel.groups import active_axes
from autoparallel.passes.hoist_parameter_chains import ParameterChain
from autoparallel.passes.insert_collectives import Sizes
from autoparallel.placements import Layout
from autoparallel.plan import Plan
from autoparallel.planner.accumulation import ReductionCost, accumulator_bytes, total_costs
from autoparallel.planner.cost import OPTIMIZER_STATES, bytes_kept, update_seconds
from autoparallel.planner.hardware import Profile
from autoparallel.program import LocalProgram
from autoparallel.redistribution import local_numel
from autoparallel.report.dry_run import GRADIENT_BUFFERS, dry_run
from autoparallel.report.transfers import BACKWARD, FORWARD, GRADIENTS, UNSHARD
from autoparallel.rules.calls import is_tensor
from autoparallel.traffic import Traffic


@dataclass(frozen=True)
class ParameterRow:
    """How one parameter lies.

    Attributes:
        name: within its module.
        shape: of the whole parameter; None where it is not known.
        at_rest: its layout between steps.
        uses: the layouts it is used in; empty where they are not known.
        gather: when it is gathered; empty where it is used as it lies.
        trainable: whether it gets a gradient.
        rows: with how many rows it is used, where some of them are padding.
    """

    name: str
    shape: tuple[int, ...] | None
    at_rest: Layout
    uses: tuple[Layout, ...]
    gather: str
    trainable: bool
    rows: int | None = None


@dataclass(frozen=True)
class ModuleRow:
    """What one module of the model became.

    Attributes:
        path: its path in the model; empty for the model itself.
        parameters: its own parameters.
        shape, layout: its result's global shape and layout; None where it makes no tensor.
    """

    path: str
    parameters: tuple[ParameterRow, ...]
    shape: tuple[int, ...] | None = None
    layout: Layout | None = None


@dataclass(frozen=True)
class Prediction:
    """What one optimizer step is predicted to cost each rank, for calls of the sizes that were planned for.

    Counts and bytes are exact: ``count_traffic()`` around the same calls counts the same.

    Attributes:
        unshard: traffic of the gathers of parameters once a step.
        forward, backward: traffic of one microbatch; gradients that are reduced once a step are not in it.
        gradients: traffic of that reduction.
        clip: traffic of ``clip_grad_norm_`` with a finite p or inf: one all-reduce; in no other number.
        unshard_seconds: of the gathers once a step.
        forward_seconds, backward_seconds: of one microbatch; a collective that runs beside what computes counts only
            where something waits for it.
        gradient_seconds, update_seconds: of one reduction of gradients, and one step of Adam.
        memory: what of, to bytes per device; ``accumulators`` come on top where ``no_sync()`` is used.
        reductions: what each time of reducing gradients would cost, were it that of every parameter.
        regathered: how many buckets of parameters the backward gathers again.
        modules: how the model's modules lie, in the model's order.
        profile: the name of the hardware profile.
        timeline: over one step with one microbatch, seconds since its begin and the bytes that a device holds then.
    """

    unshard: Traffic = field(default_factory=Traffic)
    forward: Traffic = field(default_factory=Traffic)
    backward: Traffic = field(default_factory=Traffic)
    gradients: Traffic = field(default_factory=Traffic)
    clip: Traffic = field(default_factory=Traffic)
    unshard_seconds: float = 0.0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    gradient_seconds: float = 0.0
    update_seconds: float = 0.0
    memory: Mapping[str, float] = field(default_factory=dict)
    reductions: Mapping[str, ReductionCost] = field(default_factory=dict)
    regathered: int = 0
    modules: tuple[ModuleRow, ...] = ()
    timeline: tuple[tuple[float, float], ...] = ()
    profile: str = ""

    def step(self, microbatches: int = 1) -> Traffic:
        """The traffic of a step: so many forwards and backwards, all but the last under ``no_sync()``."""
        return self.unshard + (self.forward + self.backward) * microbatches + self.gradients

    def seconds(self, microbatches: int = 1) -> float:
        """The predicted time of a step, clipping aside."""
        return (self.forward_seconds + self.backward_seconds) * microbatches + (
            self.unshard_seconds + self.gradient_seconds + self.update_seconds
        )

    @property
    def total_memory(self) -> float:
        """Bytes per device at the worst moment of a step with one microbatch."""
        return sum(size for what, size in self.memory.items() if what != ACCUMULATORS)


ACCUMULATORS = "accumulators"


def predict(program: LocalProgram, plan: Plan, profile: Profile) -> Prediction:
    """What a step of the program costs, by running it without values (see ``report.dry_run``)."""
    run = dry_run(program, plan, profile)
    chains = [chain for bucket in program.buckets for chain in bucket.chains]
    sizes = plan.axis_sizes

    trained = [c for c in chains if c.trainable]
    at_rest = sum(local_numel(c.shape, c.at_rest, sizes) * c.rest_dtype.itemsize for c in chains)
    gradients = sum(local_numel(c.shape, c.at_rest, sizes) * c.rest_dtype.itemsize for c in trained)
    kept = bytes_kept(gradients, True) + bytes_kept(at_rest - gradients, False)
    states = OPTIMIZER_STATES * gradients
    # The worst moment of forward and backward, or that of the optimizer's step.
    peak = run.peak if sum(run.peak.values()) > gradients else {GRADIENT_BUFFERS: gradients}
    memory = {"parameters": at_rest, "optimizer states": states, "inputs and buffers": run.inputs, **peak}
    fixed = at_rest + states + run.inputs
    return Prediction(
        unshard=run.traffic[UNSHARD],
        forward=run.traffic[FORWARD],
        backward=run.traffic[BACKWARD],
        gradients=run.traffic[GRADIENTS],
        clip=_clip_traffic(plan) if gradients else Traffic(),
        unshard_seconds=run.seconds[UNSHARD],
        forward_seconds=run.seconds[FORWARD],
        backward_seconds=run.seconds[BACKWARD],
        gradient_seconds=run.seconds[GRADIENTS],
        update_seconds=update_seconds(profile, kept),
        memory={
            **{what: size for what, size in memory.items() if size},
            ACCUMULATORS: sum(accumulator_bytes(c, sizes) for c in trained),
        },
        reductions=total_costs(program.buckets, sizes, profile),
        regathered=len(run.regathered),
        modules=_modules(program, plan),
        profile=profile.name,
        timeline=_thinned([(seconds, fixed + size) for seconds, size in run.history]),
    )


def _thinned(points: list[tuple[float, float]], most: int = 1000) -> tuple[tuple[float, float], ...]:
    """At most so many points, of which the highest of each stretch."""
    stretch = -(-len(points) // most)
    return tuple(
        max(points[i : i + stretch], key=lambda point: point[1]) for i in range(0, len(points), max(stretch, 1))
    )


def _clip_traffic(plan: Plan) -> Traffic:
    """The norm's one all-reduce: a sum and a flag in float64, over the whole mesh."""
    ranks = math.prod(plan.axis_sizes)
    if ranks == 1:
        return Traffic()
    axis = active_axes("+".join(plan.axis_names), dict(plan.mesh).__getitem__)
    return Traffic({("all_reduce", axis, ranks): (1, 2 * 8)})


def _modules(program: LocalProgram, plan: Plan) -> tuple[ModuleRow, ...]:
    chains: dict[str, ParameterChain] = {c.name: c for b in program.buckets for c in b.chains}
    parameters: dict[str, list[ParameterRow]] = {}
    for name in plan.parameters:  # in the order of the model
        if name not in chains:
            continue
        chain = chains[name]
        path, _, own = name.rpartition(".")
        gather = plan.parameters[name].gather if chain.gathered else ""
        parameters.setdefault(path, []).append(
            ParameterRow(own, chain.shape, chain.at_rest, chain.uses, gather, chain.trainable, plan.padded.get(name))
        )
    last: dict[str, fx.Node] = {}
    for node in program.calls():
        if node.op == "call_function" and "needs" in node.meta and is_tensor(node):
            last[node.meta.get("module", "")] = node
    sizes = Sizes(program.captured.actual)
    rows = []
    for path in dict.fromkeys([*last, *parameters]):
        made = last.get(path)
        shape, layout = (None, None) if made is None else (sizes.shape(made), made.meta["placements"])
        rows.append(ModuleRow(path, tuple(parameters.get(path, ())), shape, layout))
    return tuple(rows)
