"""What one rank runs for one kind of call: the passes in their order, and the result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from autoparallel.graph.capture import set_device
from autoparallel.graph.captured import Captured, InputSpec
from autoparallel.passes.bucket_collectives import Bucket, bucket_collectives
from autoparallel.passes.hoist_parameter_chains import hoist_parameter_chains
from autoparallel.passes.insert_collectives import Sizes, insert_collectives
from autoparallel.passes.recompute_layers import Region, recompute_layers
from autoparallel.passes.settle_interleaving import settle_interleaving
from autoparallel.passes.verify_placements import Asked, verify_placements
from autoparallel.placements import Invariant, Layout, parse_layout, shards_of
from autoparallel.plan import Plan, PlanError
from autoparallel.redistribution import Redistributor
from autoparallel.rules.calls import is_tensor


@dataclass
class LocalProgram:
    """One rank's program, not yet attached to parameters.

    Attributes:
        captured: the global graph it came from.
        body: the local graph; its placeholders are parameters as used, buffers, constants and inputs.
        buckets: how parameters reach the body; those gathered per use are calls in it.
        output_layouts: the layouts in which the outputs leave.
        divisors: for each symbolic size that is cut: its expression and into how many pieces.
        regions: the submodules of the body that run again in the backward, in its order, by name.
    """

    captured: Captured
    body: fx.GraphModule
    buckets: list[Bucket]
    output_layouts: list[Layout]
    divisors: list[tuple[object, int]]
    regions: dict[str, Region] = field(default_factory=dict)

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
            chains = tuple(c.reducing(plan.parameters[c.name].reduce) for c in bucket.chains)
            self.buckets[i] = replace(bucket, chains=chains)


def wanted_outputs(captured: Captured, mode: str, axes: int) -> list[Layout | None]:
    """The layout that each output must have: whole, or None where it may stay as it is made.

    Args:
        mode: ``"auto"`` gathers outputs unless the loss is known, ``"gather"`` always does, ``"sharded"`` never.
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


def input_layouts(captured: Captured, specs: Sequence[object], given: Sequence[Layout | None]) -> dict[str, Layout]:
    """The layouts of the inputs that are ``DTensor``s, by placeholder."""
    return {
        name: layout
        for name, spec, layout in zip(captured.inputs, specs, given, strict=True)
        if name is not None and layout is not None and isinstance(spec, InputSpec)
    }


def build_program(
    captured: Captured,
    plan: Plan,
    *,
    prefix: str,
    redistributor: Redistributor,
    outputs: Sequence[Layout | None],
    inputs: Mapping[str, Layout],
    device: torch.device,
    hoist_all: bool = False,
    reduce_dtype: torch.dtype | None = None,
) -> LocalProgram:
    """Runs the passes on ``captured`` (whose graph becomes the body).

    Args:
        prefix: the name under which the mesh is bound.
        outputs, inputs: the layouts in which outputs leave and ``DTensor`` inputs come.
        device: where the program creates tensors.
        hoist_all: gathers every parameter before the body, also those planned per use (for a compiled body).
        reduce_dtype: the dtype in which gradients travel; None is that in which parameters are used.
    """
    module, sizes = captured.module, Sizes(captured.actual)
    layouts = {node: plan.at_rest(name) for node, name in captured.parameters.items() if name in plan.parameters}
    lay_out(captured, plan, layouts, inputs, outputs, prefix, redistributor)
    output_layouts = [n.meta["placements"] for n in module.graph.output_node().args[0]]  # type: ignore[union-attr]
    chains = hoist_parameter_chains(
        module, captured.parameters, redistributor, sizes, captured.rest_dtypes, reduce_dtype
    )
    chains = [chain.reducing(plan.parameters[chain.name].reduce) for chain in chains]
    gather = {name: "per_step" if hoist_all else p.gather for name, p in plan.parameters.items()}
    if hoist_all and plan.recompute:
        raise PlanError(
            "the plan recomputes layers in the backward, but backend='inductor' chooses itself what it recomputes: use "
            "backend='eager', or plan again"
        )
    buckets = bucket_collectives(module, chains, gather, layers=plan.recompute)
    set_device(module.graph, device)
    divisors = _divisors(module, plan.axis_sizes)
    regions = recompute_layers(module, plan.recompute)
    return LocalProgram(captured, module, buckets, output_layouts, divisors, regions)


def lay_out(
    captured: Captured,
    plan: Plan,
    parameters: Mapping[str, Layout],
    inputs: Mapping[str, Layout],
    outputs: Sequence[Layout | None],
    prefix: str,
    redistributor: Redistributor,
) -> None:
    """Turns a captured graph into a rank's, in which parameters are gathered where they are used.

    Args:
        parameters, inputs: placeholder name to its layout.
        outputs: the layouts in which outputs leave.
        prefix: the name under which the mesh is bound.
    """
    modes = {key: plan.modes(key) for key in plan.operators}
    settle_interleaving(captured.module, modes, plan.axis_sizes)
    insert_collectives(
        captured.module,
        modes=modes,
        placeholders={**parameters, **inputs},
        shared={key: parse_layout(text) for key, text in plan.shared.items()},
        outputs=outputs,
        axis_names=plan.axis_names,
        prefix=prefix,
        redistributor=redistributor,
        sizes=Sizes(captured.actual),
        uneven=parameters,
    )
    axes = tuple(zip(plan.axis_names, plan.axis_sizes, strict=True))
    verify_placements(captured.module, Asked(modes, {**parameters, **inputs}, outputs, axes, prefix))


def _divisors(module: fx.GraphModule, axis_sizes: Sequence[int]) -> list[tuple[object, int]]:
    found: dict[tuple[object, int], None] = {}
    for node in module.graph.nodes:
        if not is_tensor(node) or "placements" not in node.meta:
            continue
        layout: Layout = node.meta["placements"]
        for dim, size in enumerate(node.meta["val"].shape):
            if isinstance(size, int):
                continue
            count = 1
            for axis in shards_of(layout, dim):
                count *= axis_sizes[axis]
            if count > 1:
                found[size.node.expr, count] = None
    return list(found)
