"""What one rank runs for one kind of call: the passes in their order, and the result."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from autoparallel.decisions.decisions import SELECTIVE
from autoparallel.decisions.parameters import PlanError
from autoparallel.decisions.pipeline import PipelinePlan
from autoparallel.graph.calls import batch_dim, require_divisible, sizes_of
from autoparallel.graph.captured import Captured, explain_ambiguity, is_loss
from autoparallel.graph.layers import layer_of
from autoparallel.graph.sizes import Sizes
from autoparallel.passes.adapt_captured import leave_only_loss
from autoparallel.passes.bucket_collectives import Bucket, Buckets, bucket_collectives
from autoparallel.passes.chunk_linears import chunk_linears
from autoparallel.passes.chunk_loss import ChunkError, chunk_loss, chunkable
from autoparallel.passes.cut_stages import Crossing, CutError, StageGraph, cut_stages, stages_of
from autoparallel.passes.find_divisors import Divisors, find_divisors
from autoparallel.passes.hoist_parameter_chains import Chains, ParameterChain, hoist_parameter_chains
from autoparallel.passes.insert_collectives import insert_collectives
from autoparallel.passes.overlap_collectives import overlap_collectives
from autoparallel.passes.recompute_layers import Region, recompute_layers, regions_of
from autoparallel.passes.runner import CAPTURED, Fact, Findings, Pass, PassList, Watch, ignore, run_passes
from autoparallel.passes.set_device import set_device
from autoparallel.passes.settle_interleaving import settle_interleaving
from autoparallel.passes.specification import Specification, specify_program
from autoparallel.passes.split_weight_gradients import split_weight_gradients
from autoparallel.passes.verify_placements import verify_placements
from autoparallel.pipeline.schedules import SPLIT, Passing
from autoparallel.placements import Invariant, Layout, parse_layout
from autoparallel.placements.redistribution import Redistributor
from autoparallel.plan import Plan
from autoparallel.rules.ways import typed_call


@dataclass
class LocalProgram:
    """One rank's program, not yet attached to parameters.

    Attributes:
        captured: the global graph it came from.
        body: the local graph; its placeholders are parameters as used, buffers, constants and inputs.
        buckets: how parameters reach the body; those gathered per use are calls in it.
        output_layouts: the layouts in which the outputs leave.
        divisors: for each symbolic size that is cut: its expression and into how many pieces.
        regions: the submodules of the body that it runs in other ways than once, in its order, by name: layers that
            run again in the backward, and losses in chunks of rows.
    """

    captured: Captured
    body: fx.GraphModule
    buckets: list[Bucket]
    output_layouts: list[Layout]
    divisors: list[tuple[object, int]]
    regions: dict[str, Region] = field(default_factory=dict)

    @property
    def programs(self) -> tuple[LocalProgram]:
        """The programs of its only stage."""
        return (self,)

    def text(self) -> str:
        """The program in words, the same on every rank: what ranks compare before they run it."""
        chains = [f"{b.name} {b.gather or 'in place'}: {c}" for b in self.buckets for c in b.chains]
        graphs = [str(graph.graph) for graph in self.graphs()]
        return "\n".join([*chains, *graphs])

    def graphs(self) -> list[fx.GraphModule]:
        """The body and the programs of its regions."""
        return [self.body, *(region.program for region in self.regions.values())]

    def calls(self) -> Iterator[fx.Node]:
        """Every node of the body, those of its regions where they run."""
        for node in self.body.graph.nodes:
            if node.op == "call_module" and node.target in self.regions:
                inner = self.regions[str(node.target)].program.graph
                yield from (n for n in inner.nodes if n.op not in ("placeholder", "output"))
            else:
                yield node

    def reducing(self, plan: Plan) -> None:
        """Reduces gradients when ``plan`` says; a bucket's parameters must agree."""
        for i, bucket in enumerate(self.buckets):
            chains = tuple(replace(c, when=plan.parameters[c.name].reduce) for c in bucket.chains)
            self.buckets[i] = replace(bucket, chains=chains)


@dataclass(frozen=True)
class Target:
    """What programs are made for, the same for all calls of a model.

    Attributes:
        prefix: the name under which the mesh is bound; of a pipeline, that of its other axes.
        redistributor: the ways between layouts on its axes.
        outputs: which outputs leave whole: ``"auto"`` gathers them unless the loss is known, ``"gather"`` always does,
            ``"sharded"`` never. In microbatches, ``"gather"`` keeps those beside a loss, too.
        device: where a program creates tensors.
        reduce_dtype: the dtype in which gradients travel; None is that in which parameters are used.
        node: how many devices a node has, in the order of ranks; 0 where all devices are one node.
        overlaps: whether collectives of activations run beside what computes. Inside of a compiled region, each is
            one operator, which waits.
        checked: whether programs are checked and compiled, as those that run must be.
        watch: is told of each pass.
    """

    prefix: str
    redistributor: Redistributor
    outputs: str = "auto"
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - frozen
    reduce_dtype: torch.dtype | None = None
    node: int = 0
    overlaps: bool = True
    checked: bool = True
    watch: Watch = ignore


def wanted_outputs(captured: Captured, mode: str, axes: int) -> list[Layout | None]:
    """The layout that each output must have: whole, or None where it may stay as it is made.

    Args:
        mode: as ``Target.outputs``.
        axes: the number of mesh axes.
    """
    invariant: Layout = (Invariant,) * axes
    buffers = len(captured.mutated_buffers)
    layouts: list[Layout | None] = []
    for i, node in enumerate(captured.graph.output_node().args[0]):  # type: ignore[arg-type]
        assert isinstance(node, fx.Node)
        whole = i < buffers or node.meta["val"].ndim == 0
        whole = whole or mode == "gather" or (mode == "auto" and captured.loss is None)
        layouts.append(invariant if whole else None)
    return layouts


# ------------------------------------------------------------------------------------------- the passes in their order


def placing_passes(
    captured: Captured,
    plan: Plan,
    target: Target,
    parameters: Mapping[str, Layout],
    inputs: Mapping[str, Layout],
    outputs: Sequence[Layout | None] | None = None,
) -> list[Pass]:
    """What makes of a graph on whole tensors one rank's, in which parameters are gathered where they are used.

    Args:
        parameters, inputs: placeholder name to its layout.
        outputs: the layouts in which outputs leave; unless told, those that the target wants.
    """
    if outputs is None:
        outputs = wanted_outputs(captured, target.outputs, len(plan.mesh))
    modes = {key: plan.modes(key) for key in plan.operators}
    return [
        # Counts the blocks of fused projections by how the plan shards them, so it comes before anything is cut.
        Pass(
            partial(settle_interleaving, modes=modes, axis_sizes=plan.axis_sizes),
            requires={Fact.NAMED, Fact.GLOBAL},
            provides={Fact.SETTLED},
        ),
        # Rewrites nothing: keeps the global graph, from which the verifier derives what all that follows must make.
        Pass(
            partial(
                specify_program,
                modes=modes,
                placeholders={**parameters, **inputs},
                outputs=outputs,
                axes=plan.mesh,
                prefix=target.prefix,
                sizes=Sizes(captured.actual),
                parameters=captured.parameters,
            ),
            requires={Fact.CANONICAL, Fact.NAMED, Fact.GLOBAL, Fact.SETTLED},
            provides={Fact.SPECIFIED},
        ),
        Pass(
            partial(
                insert_collectives,
                shared={key: parse_layout(text) for key, text in plan.shared.items()},
                redistributor=target.redistributor,
            ),
            requires={Fact.DIFFERENTIABLE, Fact.BACKWARD, Fact.GLOBAL, Fact.SPECIFIED},
            provides={Fact.PLACED},
            removes={Fact.GLOBAL},
            verify=_verify,
            reads=lambda findings: {"specification": findings[Specification]},
        ),
    ]


def program_passes(
    captured: Captured,
    plan: Plan,
    target: Target,
    inputs: Mapping[str, Layout],
    outputs: Sequence[Layout | None] | None,
) -> PassList:
    """What makes of a captured graph the program of one rank; the arguments are those of :func:`build_program`."""
    sizes = Sizes(captured.actual)
    gather = {name: p.gather for name, p in plan.parameters.items()}
    reduce = {name: p.reduce for name, p in plan.parameters.items()}
    at_rest = {node: plan.at_rest(name) for node, name in captured.parameters.items() if name in plan.parameters}
    losses = chunkable(captured.graph) if plan.loss_chunks > 1 else []
    passes = [
        # Rewrites arguments of calls, so it comes before it is said what the calls must become.
        Pass(partial(set_device, device=target.device), requires={Fact.FLAT, Fact.GLOBAL}),
        *placing_passes(captured, plan, target, at_rest, inputs, outputs),
        Pass(
            partial(
                hoist_parameter_chains,
                parameters=captured.parameters,
                redistributor=target.redistributor,
                sizes=sizes,
                rest_dtypes=captured.rest_dtypes,
                reduce_dtype=target.reduce_dtype,
                reduce=reduce,
            ),
            requires={Fact.PLACED, Fact.FLAT},
            provides={Fact.HOISTED},
            verify=_verify,
        ),
        # Calls of buckets stand before the first use of what they gather, so all uses must be there to be seen.
        Pass(
            partial(bucket_collectives, gather=gather, layers=plan.recompute),
            requires={Fact.HOISTED, Fact.FLAT},
            provides={Fact.BUCKETED},
            verify=_verify,
            reads=lambda findings: {"chains": findings[Chains].chains},
        ),
        Pass(partial(find_divisors, axis_sizes=plan.axis_sizes), requires={Fact.PLACED, Fact.FLAT}),
    ]
    splits = plan.pipeline is not None and plan.pipeline.schedule in SPLIT
    # A schedule that splits the backward says itself when the gradients of parameters are computed.
    if not splits and (target.overlaps or plan.linear_chunks > 1):
        # Layers that run again take these calls into their graphs, so they must be there before.
        passes.append(
            Pass(
                partial(
                    chunk_linears,
                    chunks=plan.linear_chunks,
                    axis_sizes=plan.axis_sizes,
                    sizes=sizes,
                    kept_layers=[layer for layer, much in plan.recompute.items() if much == SELECTIVE],
                    losses=losses,
                ),
                requires={Fact.BUCKETED, Fact.FLAT},
                verify=_verify,
            )
        )
    passes += [
        # Takes the gathers of what only one layer reads into the layer, so they must be calls of their own before.
        Pass(
            partial(recompute_layers, layers={x: much == SELECTIVE for x, much in plan.recompute.items()}),
            requires={Fact.BUCKETED, Fact.FLAT},
            provides={Fact.REGIONS},
            removes={Fact.FLAT},
            verify=_verify_regions,
        ),
        # Goes through rows of what is gathered for all of them, so the gathers must be calls of their own before.
        Pass(
            partial(chunk_loss, losses=losses, chunks=plan.loss_chunks),
            requires={Fact.BUCKETED, Fact.REGIONS},
            provides={Fact.CHUNKED},
            verify=_verify_regions,
        ),
    ]
    if splits:
        # A layer that runs again and a loss in chunks are left whole, so they must be calls of their own before.
        passes.append(
            Pass(
                split_weight_gradients,
                requires={Fact.BUCKETED, Fact.REGIONS, Fact.CHUNKED},
                verify=_verify,
                reads=lambda findings: {"parameters": [x for c in findings[Chains].chains for x in c.placeholders]},
            )
        )
    elif target.overlaps:
        # Keeps both halves of a redistribution in one graph, so layers that run again must be graphs of their own.
        passes.append(
            Pass(
                overlap_collectives,
                requires={Fact.BUCKETED, Fact.REGIONS, Fact.CHUNKED},
                verify=_verify,
            )
        )
    return PassList(passes, premises=CAPTURED, promised={Fact.BUCKETED, Fact.REGIONS, Fact.CHUNKED})


def _verify(module: fx.GraphModule, findings: Findings) -> None:
    chains, buckets = findings.get(Chains), findings.get(Buckets)
    verify_placements(
        module,
        findings[Specification],
        chains.chains if chains is not None else None,
        buckets.buckets if buckets is not None else (),
    )


def _verify_regions(module: fx.GraphModule, findings: Findings) -> None:
    """Verifies a program whose last pass rewrites nothing where it finds nothing to make a graph of its own."""
    if regions_of(module):
        _verify(module, findings)


# ------------------------------------------------------------------------------------------------------ running them


def lay_out(captured: Captured, plan: Plan, target: Target, parameters: Mapping[str, Layout]) -> Specification:
    """Makes a captured graph a rank's, in place, in which parameters are gathered where they are used, and inputs are
    whole; gives what it was to become. The arguments are those of :func:`placing_passes`."""
    passes = placing_passes(captured, plan, target, parameters, {})
    return run_passes(PassList(passes, CAPTURED, {Fact.PLACED}), captured.module)[Specification]


def build_program(
    captured: Captured,
    plan: Plan,
    target: Target,
    inputs: Mapping[str, Layout],
    outputs: Sequence[Layout | None] | None = None,
) -> LocalProgram:
    """Runs the passes on ``captured`` (whose graph becomes the body).

    Args:
        inputs: the layouts in which ``DTensor`` inputs come.
        outputs: those in which outputs leave; unless told, those that the target wants.

    Raises:
        PlanError: when the plan cannot be carried out.
    """
    passes = program_passes(captured, plan, target, inputs, outputs)
    module = captured.module
    try:
        findings = run_passes(passes, module, target.watch, checked=target.checked)
    except ChunkError as error:
        raise PlanError(str(error)) from error
    layouts = [node.meta["placements"] for node in module.graph.output_node().args[0]]  # type: ignore[union-attr]
    buckets = list(findings[Buckets].buckets)
    return LocalProgram(captured, module, buckets, layouts, list(findings[Divisors].pairs), regions_of(module))


@dataclass(frozen=True)
class StagedProgram:
    """What all ranks of a pipeline know.

    Attributes:
        captured: the whole model's graph.
        plan: the schedule and the cuts.
        graphs, programs: of every stage.
        crossings: the values that cross between stages, by number.
    """

    captured: Captured
    plan: PipelinePlan
    graphs: tuple[StageGraph, ...]
    programs: tuple[LocalProgram, ...]
    crossings: tuple[Crossing, ...]

    def chains(self, stage: int) -> dict[str, ParameterChain]:
        """The parameters that a stage uses, by name."""
        return {chain.name: chain for bucket in self.programs[stage].buckets for chain in bucket.chains}

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


def build_stages(captured: Captured, plan: Plan, target: Target, training: bool) -> StagedProgram:
    """Cuts a graph as its plan says and builds the local program of every stage, the same on all ranks.

    Args:
        training: whether the call is one that is differentiated.

    Raises:
        PlanError: when the model cannot be run in such stages and microbatches.
    """
    pipeline = plan.staging
    assert pipeline is not None
    leave_only_loss(captured)
    require_stageable(captured, target.outputs, pipeline.microbatches, training)
    numbers = _kept(captured, target.outputs)

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
    programs: list[LocalProgram] = []
    for stage, graph in enumerate(graphs):
        count = len(graph.captured.mutated_buffers) + len(graph.results)
        recompute = {layer: much for layer, much in plan.recompute.items() if (stage, layer) in layers}
        received = {c.name: layouts[c.name] for c in graph.incoming}
        outputs = [whole] * count + [layouts[c.name] for c in graph.outgoing]
        programs.append(build_program(graph.captured, replace(plan, recompute=recompute), target, received, outputs))
    ordered = tuple(crossings[number] for number in sorted(crossings))
    return StagedProgram(captured, pipeline, tuple(graphs), tuple(programs), ordered)


def require_stageable(captured: Captured, outputs: str, microbatches: int, training: bool) -> None:
    """Refuses what no cuts and no schedule could run.

    Args:
        outputs: as ``compile()`` takes it.
        microbatches: how many there are; one can be of any loss.
        training: whether the call is one that is differentiated.

    Raises:
        PlanError: naming what to change.
    """
    if training:
        _require_loss(captured)
    if microbatches > 1:
        _require_combinable(captured, _kept(captured, outputs))


def _kept(captured: Captured, outputs: str) -> list[int]:
    """The model's outputs that a pipeline keeps, with what the loss weighs, by their number among the results."""
    first = len(captured.mutated_buffers)
    results = captured.graph.output_node().args[0]
    weight = captured.weight.output if captured.weight is not None else None
    every = captured.objective is None or outputs == "gather"
    numbers = [i for i in range(first, len(results)) if i not in captured.left_out]  # type: ignore[arg-type]
    return [i for i in numbers if every or i in (captured.objective, weight)]


def _require_loss(captured: Captured) -> None:
    """Refuses a call in training that returns a scalar which may be the loss, or may not be all of it."""
    results: Any = captured.graph.output_node().args[0]
    if captured.objective is None and any(is_loss(results[i]) for i in captured.flowing):
        raise PlanError(
            f"{explain_ambiguity(len(captured.flowing))}, but a pipeline must know its loss, which is all that it "
            'differentiates: pass loss_fn to compile(), return the loss under the name "loss" (the key of a dict, the '
            "field of a named tuple), or detach the other outputs in the model"
        )


def _require_combinable(captured: Captured, numbers: list[int]) -> None:
    weight = captured.weight
    if weight is not None and weight.problem:
        raise PlanError(
            f"the losses of microbatches cannot be put together: {weight.problem}. Pass a loss_fn that returns (sum, "
            "count) to compile(), or use one microbatch"
        )
    results = captured.graph.output_node().args[0]
    for i in numbers:
        if i != captured.objective and (weight is None or i != weight.output) and batch_dim(captured, i) < 0:
            key = results[i].meta["key"]  # type: ignore[index, union-attr]
            raise PlanError(
                f"an output of the model ({key}) has no batch dim, so that those of microbatches cannot be put "
                "together: return it per row, or leave it out (outputs='auto' beside a loss)"
            )


def find_owners(staged: StagedProgram, names: Mapping[str, Any]) -> dict[str, int]:
    """The rank on the pipeline's axis on which each parameter lies: that of the first stage that uses it."""
    owners = dict.fromkeys(names, 0)
    for stage in reversed(range(len(staged.programs))):
        for chain in staged.chains(stage):
            owners[chain] = staged.plan.rank_of(stage)
    return owners


def require_divides(program: LocalProgram, specs: Sequence[Any], batch: int) -> None:
    """Raises ValueError when a call's sizes cannot be cut as the program cuts them."""
    captured = program.captured
    require_divisible(program.divisors, sizes_of(captured, specs), batch, captured.lengths)


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
