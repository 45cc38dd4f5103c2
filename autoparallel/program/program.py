"""What one rank runs for one kind of call, and what it is made for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import fx

from autoparallel.graph.calls import require_divisible, sizes_of
from autoparallel.graph.captured import Captured
from autoparallel.passes.bucket_collectives import Bucket
from autoparallel.passes.hoist_parameter_chains import ParameterChain
from autoparallel.passes.recompute_layers import Region
from autoparallel.passes.runner import Watch, ignore
from autoparallel.placements import Layout
from autoparallel.placements.redistribution import Redistributor
from autoparallel.plan import Plan


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
    divisors: list[tuple[sympy.Expr, int]]
    regions: dict[str, Region] = field(default_factory=dict)

    @property
    def programs(self) -> tuple[LocalProgram]:
        """The programs of its only stage."""
        return (self,)

    @property
    def chains(self) -> dict[str, ParameterChain]:
        """The parameters that it uses, by name."""
        return {chain.name: chain for bucket in self.buckets for chain in bucket.chains}

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

    def require_divides(self, specs: Sequence[Any], batch: int) -> None:
        """Raises ValueError when a call's sizes cannot be cut as the program cuts them."""
        captured = self.captured
        require_divisible(self.divisors, sizes_of(captured, specs), batch, captured.lengths)

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
