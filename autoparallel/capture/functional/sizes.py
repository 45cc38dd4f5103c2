"""The sizes of a trace as expressions of those of its inputs, each computed once."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from autoparallel._torch.numbers import expression_in
from autoparallel.rules.shapes import expression

_SIZE = torch.ops.aten.sym_size.int


class Sizes:
    """The sizes of a trace by what they are as expressions."""

    def __init__(self, program: ExportedProgram) -> None:
        self._graph = program.graph
        self._nodes: dict[sympy.Expr, fx.Node] = {}
        self._inputs: dict[sympy.Expr, tuple[fx.Node, int]] = {}
        inputs = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
        self._last = next(reversed(inputs.values()), None)  # the next is made behind it
        for spec in program.graph_signature.input_specs:
            node = inputs.get(spec.arg.name)
            value = node.meta.get("val") if node is not None and spec.kind == InputKind.USER_INPUT else None
            if node is not None and isinstance(value, torch.Tensor):
                for dim, size in enumerate(value.shape):
                    if isinstance(size, torch.SymInt):
                        self._inputs.setdefault(expression(size), (node, dim))

    def shared(self, size: sympy.Expr, node: fx.Node) -> fx.Node | int:
        """A size: a number, the node that makes it first, or products and sums of the sizes of inputs.

        Args:
            node: what makes it in the trace.
        """
        if not size.is_Integer and size not in self._nodes and not self._follows(size):
            self._nodes[size] = node
        return self.of_inputs(size)

    def _follows(self, size: sympy.Expr) -> bool:
        """Whether a size is said by those of the inputs."""
        if size in self._inputs or size.is_Integer:
            return True
        return isinstance(size, sympy.Add | sympy.Mul) and all(map(self._follows, size.args))

    def of_inputs(self, size: sympy.Expr) -> fx.Node | int:
        """A size as those of the inputs say it: a number, or what is computed of them behind these."""
        if size.is_Integer:
            return int(size)
        if size in self._nodes:
            return self._nodes[size]
        assert self._last is not None
        target: Callable[..., Any]
        args: tuple[fx.Node | int, fx.Node | int]
        if size in self._inputs:
            target, args = _SIZE, self._inputs[size]
        elif isinstance(size, sympy.Add | sympy.Mul):
            target = operator.add if isinstance(size, sympy.Add) else operator.mul
            first, *others = size.args
            args = self.of_inputs(first), self.of_inputs(type(size)(*others))
        elif size.is_Symbol:  # of which the inputs have so many
            whole, factor = next((x, x.coeff(size)) for x in self._inputs if x.as_coeff_Mul()[1] == size)
            target, args = operator.floordiv, (self.of_inputs(whole), int(factor))
        else:
            symbols = {symbol: self.of_inputs(symbol) for symbol in size.free_symbols}
            with self._graph.inserting_before(self._last.next):
                self._nodes[size] = self._last = expression_in(self._graph, size, symbols)
            return self._last
        with self._graph.inserting_after(self._last):
            self._nodes[size] = self._last = node = self._graph.call_function(target, args)
        node.meta = {"val": target(*fx.map_arg(args, lambda x: x.meta["val"]))}
        return node
