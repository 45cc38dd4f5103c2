"""What a pipeline sends: between stages, inside of them, and for the gradients; counted from its stages' programs.

The programs are run without values (see ``predict.dry_run``), and what happens around them is added up as the runtime
does it: activations and their gradients cross each border once a microbatch, a parameter that several stages use goes
to them and its gradient back once a call, and gradients are reduced once a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from autoparallel.comm.groups import active_axes
from autoparallel.comm.traffic import Traffic, TrafficCounter
from autoparallel.decisions.pipeline import Border, Loan, PipelineTraffic
from autoparallel.graph.calls import Call, sizes_of
from autoparallel.hardware import Profile
from autoparallel.passes.cut_stages import StageGraph
from autoparallel.passes.hoist_parameter_chains import ParameterChain
from autoparallel.placements.redistribution import Redistributor, local_numel
from autoparallel.plan import Plan
from autoparallel.predict.communicator import BACKWARD, FORWARD, UNSHARD
from autoparallel.predict.dry_run import dry_run
from autoparallel.predict.reductions import gradient_collectives
from autoparallel.program.stages import StagedProgram
from autoparallel.runtime.programs.microbatches import shared_forms
from autoparallel.runtime.programs.stages import form_of
from autoparallel.runtime.programs.tied import Tie, find_ties


def pipeline_traffic(
    staged: StagedProgram,
    plan: Plan,
    call: Call,
    profile: Profile,
    owners: Mapping[str, int],
    redistributor: Redistributor,
) -> PipelineTraffic:
    """Counts what the stages of a plan send in a call that is differentiated.

    Args:
        call: the whole batch's.
        owners: the rank on the pipeline's axis on which each parameter lies.
    """
    pipeline = staged.plan
    ties = find_ties(staged, owners, redistributor)
    borders = list(_borders(staged, plan.axis_sizes))
    loans = [loan for tie in ties for loan in _loans(tie, plan.axis_sizes)]
    by_rank = _between_ranks(staged, borders, loans, call)
    gradients = [Traffic()] * pipeline.ranks
    tied = {tie.chain.name: tie for tie in ties}
    for stage, program in enumerate(staged.programs):
        rank = pipeline.rank_of(stage)
        run = dry_run(program, plan, profile, _roots(staged, staged.graphs[stage]))
        once, each = run.traffic[UNSHARD], run.traffic[FORWARD] + run.traffic[BACKWARD]
        by_rank[rank] += once + each * pipeline.microbatches
        for bucket in program.buckets:
            untied = [c for c in bucket.chains if c.name in run.reached and c.name not in tied]
            gradients[rank] += _reduction_traffic(untied, plan)
    for tie in ties:
        if tie.chain.trainable:
            gradients[tie.owner] += _reduction_traffic([tie.chain], plan)
    return PipelineTraffic(tuple(borders), tuple(loans), tuple(by_rank), tuple(gradients))


def _borders(staged: StagedProgram, sizes: Sequence[int]) -> Iterator[Border]:
    """What crosses between stages for one microbatch."""
    nodes, rank_of = {node.name: node for node in staged.captured.graph.nodes}, staged.plan.rank_of
    for crossing in staged.crossings:
        size = form_of(crossing, staged.programs[crossing.targets[0]], sizes, staged.captured.actual).bytes
        key = nodes[crossing.name].meta["key"]
        for target, giver in zip(crossing.targets, crossing.givers, strict=True):
            back = size if crossing.returns(target) else 0
            yield Border(key, giver, target, size, back, moves=rank_of(giver) != rank_of(target))


def _between_ranks(
    staged: StagedProgram, borders: Sequence[Border], loans: Sequence[Loan], call: Call
) -> list[Traffic]:
    """What each rank of the pipeline sends to others in a call: what crosses borders, parameters that are lent, and
    results of stages, which all ranks get."""
    pipeline = staged.plan
    calls = [TrafficCounter() for _ in range(pipeline.ranks)]

    def send(source: int, target: int, size: int) -> None:
        calls[source].add("send", pipeline.axis, size, pipeline.ranks)
        calls[target].add("recv", pipeline.axis, size, pipeline.ranks)

    for border in borders:
        source, target = pipeline.rank_of(border.source), pipeline.rank_of(border.target)
        for _ in range(pipeline.microbatches if border.moves else 0):
            send(source, target, border.forward)
            if border.backward:
                send(target, source, border.backward)
    for loan in loans:
        send(loan.owner, loan.borrower, loan.forward)
        if loan.backward:
            send(loan.borrower, loan.owner, loan.backward)
    whole = sizes_of(staged.captured, call.specs)
    for stage, graph in enumerate(staged.graphs):
        _, forms = shared_forms(staged.captured, graph, whole)
        root = pipeline.rank_of(stage)
        for peer in range(pipeline.ranks) if forms else ():
            if peer != root:
                send(root, peer, sum(form.bytes for form in forms))
    return [counter.result() for counter in calls]


def _roots(staged: StagedProgram, graph: StageGraph) -> list[int]:
    """The outputs of a stage with which its backward begins: the loss, and what gradients come back of."""
    roots = [n for n, result in enumerate(graph.results) if result == staged.captured.objective]
    return roots + [len(graph.results) + n for n, crossing in enumerate(graph.outgoing) if crossing.flows]


def _loans(tie: Tie, sizes: Sequence[int]) -> list[Loan]:
    chain = tie.chain
    lent = local_numel(chain.shape, chain.at_rest, sizes) * chain.rest_dtype.itemsize
    back = (
        local_numel(chain.shape, chain.gradient_layout, sizes) * chain.accumulator_dtype.itemsize
        if chain.trainable
        else 0
    )
    return [Loan(chain.name, tie.owner, rank, lent, back) for rank in tie.borrowers]


def _reduction_traffic(chains: Sequence[ParameterChain], plan: Plan) -> Traffic:
    """What the gradients of some parameters of a bucket send on their way to rest, all together."""
    counter = TrafficCounter()
    paths = [chain.way_back for chain in chains]
    for kind, axes, full in gradient_collectives(chains, paths, plan.axis_sizes):
        axis = "+".join(plan.axis_names[i] for i in axes)
        ranks = math.prod(plan.axis_sizes[i] for i in axes)
        counter.add(kind, active_axes(axis, dict(plan.mesh).__getitem__), full, ranks)
    return counter.result()
