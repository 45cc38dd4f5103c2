"""Turns the global forward graph into the program of one rank, as a plan says.

Every operator becomes its local call, every operand is redistributed to the layout the operator needs, and each
tensor's layout is written into ``meta["placements"]``.  One tensor redistributed to one layout is one node, shared by
all its consumers, so that their gradients are summed before one collective.

Before (mesh axis "tp" of 2 ranks; w1 is sharded by rows, w2 by columns):
    linear = aten.linear(x, w1);  linear_1 = aten.linear(linear, w2);  return (linear_1,)
After:
    redistribute = collectives.redistribute(x, 'I', 'R', 'mesh0/tp')          backward: all-reduce
    linear = aten.linear(redistribute, w1)                                    S1
    linear_1 = aten.linear(linear, w2)                                        P
    redistribute_1 = collectives.redistribute(linear_1, 'P', 'I', 'mesh0/tp') all-reduce
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoparallel.comm.collectives import redistribute
from autoparallel.comm.groups import group_name
from autoparallel.passes.specification import Specification
from autoparallel.placements import Layout, count_pieces
from autoparallel.placements.modes import Mode
from autoparallel.placements.redistribution import Redistributor, Step
from autoparallel.rules.calls import is_tensor, map_tensor_operands, tensor_operands
from autoparallel.rules.ways import local_call


@dataclass(frozen=True)
class Redistribution:
    """What a redistribute node does; kept in its ``meta["redistribution"]``."""

    step: Step
    before: Layout


def actions_of(node: fx.Node) -> tuple[str, str]:
    """What a redistribution does forward, and to the gradient that comes back."""
    step: Step = node.meta["redistribution"].step
    returns = node.meta["differentiable"] and node.meta["backward"]
    return step.action, step.transposed().action if returns else "nothing"


def insert_collectives(
    module: fx.GraphModule,
    *,
    specification: Specification,
    shared: Mapping[str, Layout],
    redistributor: Redistributor,
) -> None:
    """Rewrites ``module`` in place.

    Args:
        specification: the modes of operators and the layouts of placeholders and outputs. The shards of parameters may
            differ in size: ``hoist_parameter_chains`` takes their redistributions out of the body.
        shared: node key to the layout that all consumers read the tensor in.
        redistributor: finds the steps of a redistribution.
    """
    writer = _Writer(module.graph, specification, shared, redistributor)
    for node in list(module.graph.nodes):
        if node.op == "placeholder":
            node.meta["placements"] = specification.placeholders.get(node.name, writer.invariant)
        elif node.op == "call_function" and is_tensor(node):
            if node.target is operator.getitem:
                node.meta["placements"] = node.args[0].meta["placements"]
            else:
                writer.localize(node, specification.modes[node.meta["key"]])
        elif node.op == "call_function" and tensor_operands(node):
            writer.keep_global(node)
        elif node.op == "output":
            writer.finish(node)


class _Writer:
    def __init__(
        self,
        graph: fx.Graph,
        specification: Specification,
        shared: Mapping[str, Layout],
        redistributor: Redistributor,
    ) -> None:
        self.graph, self.shared, self.redistributor = graph, shared, redistributor
        self.specification = specification
        self.axis_sizes, self.invariant = specification.axis_sizes, specification.whole_layout
        self.versions: dict[tuple[fx.Node, Layout], fx.Node] = {}

    def localize(self, node: fx.Node, modes: Sequence[Mode]) -> None:
        """Makes a call of the global graph this rank's, in place."""
        call = local_call(node, modes, self.redistribute_to, self.axis_sizes, self.specification.groups)
        node.target, node.args, node.kwargs = call.target, call.args, call.kwargs
        node.meta["modes"], node.meta["needs"] = tuple(modes), tuple(call.operand_layouts)
        node.meta["placements"] = call.result_layout
        if call.divisor > 1:
            self._divide(node, call.divisor)

    def _divide(self, node: fx.Node, pieces: int) -> None:
        """A mean over a sharded factor: the local mean is this rank's summand times the number of shards."""
        with self.graph.inserting_after(node):
            divided = self.graph.call_function(torch.ops.aten.div.Tensor, (node, pieces))
        divided.meta = {k: v for k, v in node.meta.items() if k not in ("modes", "needs")}
        divided.meta["scales"] = node
        node.replace_all_uses_with(divided, delete_user_cb=lambda user: user is not divided)

    def keep_global(self, node: fx.Node) -> None:
        """A call that gives sizes or several tensors: sizes mean the global size for ever."""
        if node.target is torch.ops.aten.sym_size.int:
            source, dim = node.args
            assert isinstance(source, fx.Node) and isinstance(dim, int)
            dim %= source.meta["val"].ndim
            count = count_pieces(source.meta["placements"], dim, self.axis_sizes)
            if count > 1:
                with self.graph.inserting_after(node):
                    whole = self.graph.call_function(operator.mul, (node, count))
                whole.meta = {"val": node.meta["val"], "key": f"{node.meta.get('key')}/global"}
                node.replace_all_uses_with(whole, delete_user_cb=lambda user: user is not whole)
            return
        with self.graph.inserting_before(node):
            node.args, node.kwargs = map_tensor_operands(node, lambda i, x: self.redistribute_to(x, self.invariant))
        node.meta["placements"] = self.invariant
        node.meta["needs"] = (self.invariant,) * len(tensor_operands(node))

    def redistribute_to(self, node: fx.Node, layout: Layout) -> fx.Node:
        """The node that holds ``node``'s value in ``layout``, inserted at the current point if there is none."""
        shared = self.shared.get(node.meta.get("key", ""))
        if shared is not None and shared != node.meta["placements"] and (node, shared) not in self.versions:
            self._extend(node, node.meta["placements"], shared)
        return self._extend(node, shared if shared is not None else node.meta["placements"], layout)

    def _extend(self, node: fx.Node, start: Layout, layout: Layout) -> fx.Node:
        shape, itemsize = self.specification.sizes.shape(node), node.meta["val"].element_size()
        steps = self.redistributor.path(
            start, layout, shape, itemsize, bool(node.meta["differentiable"]), bool(node.meta["backward"]),
            uneven=node.name in self.specification.parameters,
        )  # fmt: skip
        here, at = (self.versions.get((node, start), node)), start
        for step in steps:
            after = step.apply(at)
            version = self.versions.get((node, after))
            if version is None:
                group = group_name(self.specification.prefix, self.specification.names, step.axes)
                version = self.graph.call_function(redistribute, (here, str(step.src), str(step.dst), group))
                version.meta = {
                    k: v for k, v in node.meta.items() if k in ("val", "differentiable", "backward", "module", "layer")
                }
                version.meta["key"] = f"{node.meta['key']}->{','.join(map(str, after))}"
                version.meta["placements"] = after
                version.meta["redistribution"] = Redistribution(step, at)
                self.versions[node, after] = version
            here, at = version, after
        return here

    def finish(self, node: fx.Node) -> None:
        """Brings the outputs into the layouts they leave in."""
        results: list[Any] = list(node.args[0])  # type: ignore[arg-type]
        with self.graph.inserting_before(node):
            for i, value in enumerate(results):
                if (layout := self.specification.output_layout(i)) is not None:
                    results[i] = self.redistribute_to(value, layout)
        node.args = (tuple(results),)
