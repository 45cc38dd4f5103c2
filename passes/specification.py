"""What a rank's program must be: derived from the global graph, the plan's decisions and the rules, and nothing else.

No pass writes any of it.  ``verify_placements`` holds a program against it after each pass that makes or moves layouts.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from autoparallel.comm.groups import group_name
from autoparallel.graph.captured import copy_graph
from autoparallel.graph.sizes import Sizes
from autoparallel.passes.mark_gradients import flows
from autoparallel.placements import Invariant, Layout, count_pieces, divides
from autoparallel.placements.modes import Mode
from autoparallel.rules.calls import is_tensor, map_tensor_operands, tensor_operands
from autoparallel.rules.ways import local_call


class PlacementError(AssertionError):
    """A program that contradicts its specification: a bug of ours, found before anything runs."""


def name_of(node: fx.Node) -> str:
    """What messages call a node."""
    return str(node.meta.get("key", node.name))


@dataclass(frozen=True)
class Operand:
    """What a call reads of a tensor of the global graph: the tensor in a layout; where that is None, as it is made."""

    node: fx.Node
    layout: Layout | None


@dataclass(frozen=True)
class ExpectedCall:
    """What a call of the global graph must be on a rank.

    Attributes:
        target, args, kwargs: the call; an :class:`Operand` stands for every tensor that it reads.
        result: the layout of the result; None where the result is no tensor.
        differentiable: whether the result depends differentiably on what is trained.
        completion: the call that must stand between this one and all that read it, as its target and its second
            argument: a division for a mean over a sharded factor, a product for a size that is cut; else None.
        notes: what its ``meta`` says of it: how it runs, and the layouts that it needs its operands in.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Layout | None
    differentiable: bool
    completion: tuple[Any, int] | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Specification:
    """What a rank's program must be.

    Attributes:
        whole: a copy of the global graph that the program is made of.
        modes: node key to how the operator runs on each mesh axis.
        placeholders: placeholder name to its layout; others are Invariant.
        parameters: placeholder name to parameter name, of those whose gathers ``hoist_parameter_chains`` will take out
            of the body.
        outputs: the layout each output must have; None leaves it as it is made, with sums completed.
        axes: the mesh axes by name and size.
        prefix: the name under which the mesh is bound.
        sizes: the sizes in the call that is planned for.
    """

    whole: fx.Graph
    modes: Mapping[str, Sequence[Mode]]
    placeholders: Mapping[str, Layout]
    parameters: Mapping[str, str]
    outputs: Sequence[Layout | None]
    axes: Sequence[tuple[str, int]]
    prefix: str
    sizes: Sizes
    _expected: dict[fx.Node, ExpectedCall] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def calls(self) -> dict[str, fx.Node]:
        """The calls of the global graph, by key; what divides sizes for calls that were derived has none."""
        calls = [node for node in self.whole.nodes if node.op == "call_function" and "key" in node.meta]
        return {node.meta["key"]: node for node in calls}

    @cached_property
    def inputs(self) -> dict[str, fx.Node]:
        """The placeholders of the global graph, by name."""
        return {node.name: node for node in self.whole.find_nodes(op="placeholder")}

    @property
    def names(self) -> list[str]:
        """The names of the mesh axes."""
        return [name for name, _ in self.axes]

    @property
    def axis_sizes(self) -> list[int]:
        return [size for _, size in self.axes]

    @cached_property
    def groups(self) -> list[str]:
        """The names of the groups along each mesh axis."""
        return [group_name(self.prefix, self.names, (axis,)) for axis in range(len(self.axes))]

    @property
    def whole_layout(self) -> Layout:
        """The layout of what all ranks hold alike."""
        return (Invariant,) * len(self.axes)

    @property
    def results(self) -> Sequence[Any]:
        """The outputs of the global graph."""
        results: Any = self.whole.output_node().args[0]
        return list(results)

    def expected(self, node: fx.Node) -> ExpectedCall:
        """What a call of the global graph must be on a rank."""
        if node not in self._expected:
            self._expected[node] = self._derive(node)
        return self._expected[node]

    def layout_of(self, node: fx.Node) -> Layout | None:
        """The layout in which a node of the global graph is made."""
        if node.op == "placeholder":
            return self.placeholders.get(node.name, self.whole_layout)
        return self.expected(node).result

    def differentiable(self, node: fx.Node) -> bool:
        """Whether a node of the global graph depends differentiably on what is trained."""
        return bool(node.meta["differentiable"]) if node.op == "placeholder" else self.expected(node).differentiable

    def output_layout(self, index: int) -> Layout | None:
        """The layout in which an output must leave; None where it is no tensor."""
        node = self.results[index]
        if not isinstance(node, fx.Node) or not is_tensor(node):
            return None
        required, layout = self.outputs[index], self.layout_of(node)
        if required is not None or layout is None:
            return required
        even = divides(self.sizes.shape(node), layout, self.axis_sizes)
        return tuple(p if p.kind == "S" and even else Invariant for p in layout)

    def _derive(self, node: fx.Node) -> ExpectedCall:
        whole = self.whole_layout
        if node.target is torch.ops.aten.sym_size.int:
            source, dim = node.args
            assert isinstance(source, fx.Node) and isinstance(dim, int)
            layout = self.layout_of(source) or whole
            count = count_pieces(layout, dim % source.meta["val"].ndim, self.axis_sizes)
            completion = (operator.mul, count) if count > 1 else None
            return ExpectedCall(node.target, (Operand(source, None), dim), node.kwargs, None, False, completion)
        if not is_tensor(node) or node.target is operator.getitem:
            # A call that gives several tensors reads whole ones.
            args, kwargs = map_tensor_operands(node, lambda i, x: Operand(x, whole))
            needs = (whole,) * len(tensor_operands(node))
            result = whole if needs or is_tensor(node) else None
            return ExpectedCall(node.target, args, kwargs, result, flows(node), None, {"needs": needs} if needs else {})
        modes = tuple(self.modes[node.meta["key"]])
        call = local_call(node, modes, Operand, self.axis_sizes, self.groups)
        completion = (torch.ops.aten.div.Tensor, call.divisor) if call.divisor > 1 else None
        notes = {"modes": modes, "needs": tuple(call.operand_layouts)}
        return ExpectedCall(call.target, call.args, call.kwargs, call.result_layout, flows(node), completion, notes)


def specify_program(
    module: fx.GraphModule,
    *,
    modes: Mapping[str, Sequence[Mode]],
    placeholders: Mapping[str, Layout],
    outputs: Sequence[Layout | None],
    axes: Sequence[tuple[str, int]],
    prefix: str,
    sizes: Sizes,
    parameters: Mapping[str, str] | None = None,
) -> Specification:
    """What the global graph of ``module``, which is left as it is, must become (see :class:`Specification`)."""
    whole = copy_graph(module.graph)
    return Specification(whole, modes, placeholders, parameters or {}, outputs, axes, prefix, sizes)
