"""What a call does that runs graphs of as many rows as values select, as one flat graph that rules can read."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoparallel import _torch
from autoparallel.operators.control_flow import goes_by_values, inner_graphs, take_apart
from autoparallel.rules.calls import MASKS, is_tensor

aten = torch.ops.aten

INTO_ALONG = (
    aten.index_add.default, aten.index_copy.default, aten.index_fill.int_Scalar, aten.scatter_add.default,
    aten.scatter.src, aten.scatter.value, aten.scatter.reduce, aten.scatter_reduce.two,
)  # fmt: skip
"""What writes rows into its first operand, at places along a dim."""


class MixedRows(Exception):
    """It cannot be shown that a call leaves rows alone."""


def either(predicate: Any, first: Any, second: Any) -> Any:
    """In a flat graph the result of one way or of the other; no rank calls it."""
    raise NotImplementedError


class FlatCall:
    """The graphs of a call, and of calls in them, as one graph; sizes that only values tell are some number there.

    Attributes:
        graph: its placeholders are what the call reads, its output is what it makes.
        operands: what the call reads, by their placeholders.
        result: what it makes.
    """

    def __init__(self, node: fx.Node) -> None:
        self.graph = fx.Graph()
        self.operands: dict[fx.Node, fx.Node] = {}
        inside = {}
        for x in node.all_input_nodes:
            inside[x] = placeholder = self.graph.placeholder(x.name)
            placeholder.meta = {"val": x.meta["val"]}
            self.operands[placeholder] = x
        self.result = self._inline(node.target, fx.map_arg(node.args, inside.__getitem__))
        self.graph.output(self.result)

    def _inline(self, target: Any, args: Sequence[Any]) -> fx.Node:
        """The result of a call that runs graphs.

        Raises:
            MixedRows: where a call in them has several results, or they have tensors of their own.
        """
        *predicate, operands = args
        results = []
        for module in inner_graphs(target):
            values = dict(zip(module.graph.find_nodes(op="placeholder"), operands, strict=True))
            if module.graph.find_nodes(op="get_attr"):
                raise MixedRows
            for node in (node for node in module.graph.nodes if node.op == "call_function"):
                if not goes_by_values(node.target):
                    values[node] = copy = self.graph.node_copy(node, values.__getitem__)
                    copy.meta = {"val": pytree.tree_map(_with_some_sizes, node.meta.get("val"))}
                elif is_tensor(node):
                    values[node] = self._inline(node.target, fx.map_arg(node.args, values.__getitem__))
                else:
                    raise MixedRows
            output: Any = module.graph.output_node().args[0]
            (result,) = output
            results.append(values[result])
        if not predicate:
            return results[0]
        call = self.graph.call_function(either, (*predicate, *results))
        call.meta = {"val": results[0].meta["val"]}
        return call

    def masks(self) -> Iterator[fx.Node]:
        """What rows are selected by."""
        for node in self.graph.nodes:
            if node.target in (aten.nonzero.default, aten.masked_select.default):
                yield node.args[-1]
            elif node.target in (aten.index.Tensor, aten.index_put.default):
                yield from (x for x in node.args[1] if x is not None and x.meta["val"].dtype in MASKS)

    def key(self, node: Any, depth: int = 4) -> Hashable:
        """Something of a mask that is the same of those that are computed alike, if not by too many calls."""
        node = self.operands.get(node, node)
        is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if not depth or is_random or not isinstance(node.target, torch._ops.OpOverload):
            return node
        arguments, reads = take_apart(node.args, node.kwargs)
        return node.target, arguments, *(self.key(x, depth - 1) for x in reads)


def _with_some_sizes(value: Any) -> Any:
    """A tensor of a trace with some number for each size that only values tell."""
    if not isinstance(value, torch.Tensor) or not _torch.export.free_unbacked_symbols(value):
        return value
    return value.new_empty([_some_size(size) for size in value.shape])


def _some_size(size: Any) -> Any:
    symbols = sorted(_torch.export.free_unbacked_symbols(size), key=str)
    if not symbols:
        return size
    # A prime for each, which no size that follows from something else is likely to be, or to share a factor with.
    number = size.node.expr.subs({symbol: sympy.prime(1000 + i) for i, symbol in enumerate(symbols)})
    if not number.is_Integer:
        raise MixedRows
    return int(number)
