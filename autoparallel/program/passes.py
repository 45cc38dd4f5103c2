"""The passes in their order: from a captured graph to what one rank runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from torch import fx

from autoparallel.decisions.decisions import SELECTIVE
from autoparallel.graph.captured import Captured
from autoparallel.graph.sizes import Sizes
from autoparallel.passes.bucket_collectives import Buckets, bucket_collectives
from autoparallel.passes.chunk_linears import chunk_linears
from autoparallel.passes.chunk_loss import chunk_loss, chunkable
from autoparallel.passes.find_divisors import find_divisors
from autoparallel.passes.hoist_parameter_chains import Chains, hoist_parameter_chains
from autoparallel.passes.insert_collectives import insert_collectives
from autoparallel.passes.overlap_collectives import overlap_collectives
from autoparallel.passes.recompute_layers import recompute_layers, regions_of
from autoparallel.passes.runner import CAPTURED, Fact, Findings, Pass, PassList
from autoparallel.passes.set_device import set_device
from autoparallel.passes.settle_interleaving import settle_interleaving
from autoparallel.passes.specification import Specification, specify_program
from autoparallel.passes.split_weight_gradients import split_weight_gradients
from autoparallel.passes.verify_placements import verify_placements
from autoparallel.pipeline.schedules import SPLIT
from autoparallel.placements import Layout, parse_layout
from autoparallel.plan import Plan
from autoparallel.program.program import Target


def placing_passes(
    plan: Plan,
    target: Target,
    sizes: Sizes,
    placeholders: Mapping[str, Layout],
    outputs: Sequence[Layout | None],
    hoisted: Mapping[str, str],
) -> list[Pass]:
    """What makes of a graph on whole tensors one rank's, in which parameters are gathered where they are used.

    Args:
        sizes: those of the call that is planned for.
        placeholders: the layouts of parameters and inputs, by placeholder.
        outputs: those in which outputs leave; None where one stays as it is made.
        hoisted: placeholder name to parameter name, of those whose gathers will be taken out of the body, which may
            go through shards that differ in size; those that stay do not.
    """
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
                placeholders=placeholders,
                outputs=outputs,
                axes=plan.mesh,
                prefix=target.prefix,
                sizes=sizes,
                parameters=hoisted,
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
    if outputs is None:
        outputs = captured.output_layouts(target.outputs, len(plan.mesh))
    at_rest = {node: plan.at_rest(name) for node, name in captured.parameters.items() if name in plan.parameters}
    losses = chunkable(captured.graph) if plan.loss_chunks > 1 else []
    passes = [
        # Rewrites arguments of calls, so it comes before it is said what the calls must become.
        Pass(partial(set_device, device=target.device), requires={Fact.FLAT, Fact.GLOBAL}),
        *placing_passes(plan, target, sizes, {**at_rest, **inputs}, outputs, captured.parameters),
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
    if not splits and (plan.linear_chunks > 1 or target.overlaps):
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
