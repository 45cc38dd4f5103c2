"""The programs of all stages of a pipeline."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from autoparallel.decisions.parameters import PlanError
from autoparallel.decisions.pipeline import PipelinePlan
from autoparallel.graph.captured import Captured
from autoparallel.graph.layers import layer_of
from autoparallel.passes.adapt_captured import leave_only_loss
from autoparallel.passes.canonicalize_operators import BATCH_STATISTIC
from autoparallel.passes.cut_stages import Crossing, CutError, StageGraph, cut_stages, stages_of
from autoparallel.passes.settle_interleaving import count_blocks, leave_blocks
from autoparallel.pipeline.schedules import Passing
from autoparallel.placements import Invariant, Layout, parse_layout
from autoparallel.plan import Plan
from autoparallel.program.build import build_program
from autoparallel.program.program import LocalProgram, Target
from autoparallel.program.requirements import kept_outputs, require_stageable, why_whole
from autoparallel.rules.ways import typed_call


@dataclass(frozen=True)
class StagedProgram:
    """What all ranks of a pipeline know.

    Attributes:
        captured: the whole model's graph.
        plan: the schedule and the cuts.
        graphs, programs: of every stage.
        crossings: the values that cross between stages, by number.
        is_whole: whether a call that is not differentiated must run as one microbatch.
    """

    captured: Captured
    plan: PipelinePlan
    graphs: tuple[StageGraph, ...]
    programs: tuple[LocalProgram, ...]
    crossings: tuple[Crossing, ...]
    is_whole: bool

    def passings(self, differentiate: bool) -> list[Passing]:
        """Every way of a value from one stage to another."""
        return [
            Passing(c.number, giver, t, differentiate and c.returns(t))
            for c in self.crossings
            for t, giver in zip(c.targets, c.givers, strict=True)
        ]

    def text(self) -> str:
        """The programs in words, the same on every rank: what ranks compare before they run them."""
        return "\n".join(f"stage {i}:\n{program.text()}" for i, program in enumerate(self.programs))


def build_stages(captured: Captured, plan: Plan, target: Target, differentiated: bool) -> StagedProgram:
    """Cuts a graph as its plan says and builds the local program of every stage, the same on all ranks.

    Args:
        differentiated: whether the call is made in training mode, with gradients.

    Raises:
        PlanError: when the model cannot be run in such stages and microbatches.
    """
    pipeline = plan.staging
    assert pipeline is not None
    leave_only_loss(captured)
    require_stageable(captured, target.outputs, pipeline.microbatches, differentiated)
    numbers = kept_outputs(captured, target.outputs)

    def price(giver: int, taker: int) -> float:
        """Where a value goes in: memory, a node, or the network, where the pipeline's axis is the outermost."""
        here, there = (pipeline.rank_of(stage) * math.prod(plan.axis_sizes) for stage in (giver, taker))
        node = target.node or math.inf
        return 0.0 if here == there else 1.0 if here // node == there // node else 2.0

    try:
        layers = {(stage, layer_of(node)) for node, stage in stages_of(captured, pipeline.cuts).items()}
        graphs = cut_stages(captured, pipeline.cuts, numbers, price)
    except CutError as error:
        raise PlanError(str(error)) from error
    nodes = {node.name: node for node in captured.graph.nodes}
    whole = (Invariant,) * len(plan.axis_sizes)
    crossings = {c.number: c for graph in graphs for c in graph.outgoing}
    layouts = {c.name: boundary_layout(nodes[c.name], plan) for c in crossings.values()}
    # A cut may part a fused projection from its pieces, so that no stage knows how many blocks all of them need.
    blocks = count_blocks(captured.graph, {key: plan.modes(key) for key in plan.operators}, plan.axis_sizes)
    programs: list[LocalProgram] = []
    for stage, graph in enumerate(graphs):
        leave_blocks(graph.captured.graph, blocks)
        count = len(graph.captured.mutated) + len(graph.results)
        recompute = {layer: much for layer, much in plan.recompute.items() if (stage, layer) in layers}
        received = {c.name: layouts[c.name] for c in graph.incoming}
        outputs = [whole] * count + [layouts[c.name] for c in graph.outgoing]
        programs.append(build_program(graph.captured, replace(plan, recompute=recompute), target, received, outputs))
    ordered = tuple(crossings[number] for number in sorted(crossings))
    is_whole = bool(captured.weight.apart or why_whole(captured, target.outputs)) or any(
        n.meta.get(BATCH_STATISTIC) for n in nodes.values()
    )
    return StagedProgram(captured, pipeline, tuple(graphs), tuple(programs), ordered, is_whole)


def find_owners(staged: StagedProgram, names: Mapping[str, Any]) -> dict[str, int]:
    """The rank on the pipeline's axis on which each parameter lies; the first for one that the graph has not."""
    return dict.fromkeys(names, 0) | parameter_ranks(staged.captured, staged.plan)


def parameter_ranks(captured: Captured, pipeline: PipelinePlan) -> dict[str, int]:
    """The rank of the pipeline on which each parameter lies: that of the first stage that uses it, itself or what
    follows from it alone."""
    stages, last = stages_of(captured, pipeline.cuts), pipeline.count
    first: dict[fx.Node, int] = {}
    for node in reversed(captured.graph.nodes):
        first[node] = stages.get(node, min((first[user] for user in node.users), default=last))
    nodes = captured.parameter_nodes
    return {captured.parameters[node.name]: pipeline.rank_of(first[node] % last) for node in nodes}


def boundary_layout(node: fx.Node, plan: Plan) -> Layout:
    """How a value crosses between stages: as it is read, or made, with sums completed."""
    key = node.meta["key"]
    layout: Layout
    if key in plan.shared:
        layout = parse_layout(plan.shared[key])
    elif node.target is operator.getitem or key not in plan.operators:
        layout = (Invariant,) * len(plan.axis_sizes)
    else:
        layout = typed_call(node, plan.modes(key))[1]
    return tuple(p if p.kind == "S" else Invariant for p in layout)
