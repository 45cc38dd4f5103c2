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

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch.fx.node import map_aggregate

from autoparallel import _torch
from autoparallel.comm.collectives import redistribute
from autoparallel.comm.groups import group_name
from autoparallel.passes.specification import Operand, Specification
from autoparallel.placements import Layout
from autoparallel.placements.redistribution import Redistributor, Step


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
    for node, origin in zip(list(module.graph.nodes), list(specification.whole.nodes), strict=True):
        if node.op == "placeholder":
            node.meta["placements"] = specification.layout_of(origin)
            writer.values[origin] = node
        elif node.op == "call_function":
            writer.write(node, origin)
        elif node.op == "output":
            writer.finish(node)


@dataclass
class _Writer:
    """Writes the calls of a rank in the places of those of the global graph.

    Attributes:
        values: of the nodes of the global graph, and of those that rules insert, the nodes that hold their values.
        versions: of tensors in a layout that they are redistributed to, the nodes that hold them.
    """

    graph: fx.Graph
    specification: Specification
    shared: Mapping[str, Layout]
    redistributor: Redistributor
    values: dict[fx.Node, fx.Node] = field(default_factory=dict)
    versions: dict[tuple[fx.Node, Layout], fx.Node] = field(default_factory=dict)

    def write(self, node: fx.Node, origin: fx.Node) -> None:
        """Makes a call of the global graph this rank's, in place; one that is of a part only is completed."""
        expected = self.specification.expected(origin)
        with self.graph.inserting_before(node):
            args, kwargs = map_aggregate((expected.args, dict(expected.kwargs)), self._fill)
        if node.target is not expected.target:
            node.target = expected.target
        _torch.export.set_arguments(node, args, kwargs)
        if expected.result is not None:
            node.meta["placements"] = expected.result
        self.values[origin] = node
        if expected.completion is not None:
            target, count = expected.completion
            with self.graph.inserting_after(node):
                self.values[origin] = whole = self.graph.call_function(target, (node, count))
            whole.meta = dict(node.meta)
            whole.meta |= {"scales": node} if expected.result is not None else {"key": f"{node.meta.get('key')}/global"}
        node.meta.update(expected.notes)

    def _fill(self, argument: Any) -> Any:
        """An argument of an expected call, as this graph has it."""
        if isinstance(argument, Operand):
            value = self.values[argument.node]
            return value if argument.layout is None else self.redistribute_to(value, argument.layout)
        if isinstance(argument, fx.Node) and argument not in self.values:  # what the rule inserts before the call
            args, kwargs = map_aggregate((argument.args, argument.kwargs), self._fill)
            self.values[argument] = self.graph.call_function(argument.target, args, kwargs)  # type: ignore[arg-type]
            self.values[argument].meta = dict(argument.meta)
        return self.values[argument] if isinstance(argument, fx.Node) else argument

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
        results = [
            Operand(origin, self.specification.output_layout(i)) if isinstance(origin, fx.Node) else origin
            for i, origin in enumerate(self.specification.results)
        ]
        with self.graph.inserting_before(node):
            node.args = (tuple(map(self._fill, results)),)
