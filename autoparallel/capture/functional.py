"""The trace of a model as values: nothing is written in place, and views are those that rules speak of.

    reshape = aten.reshape(x, [sym_size, 128])         sym_size = aten.sym_size(ids, 0)
    size = aten.sym_size(reshape, 0)                   view = aten.view(x, [sym_size, 128])

``ExportedProgram.run_decompositions`` makes a trace so by running it twice, node by node, which takes longer than
tracing the model.  Where nothing writes, all it does is to take apart what is composed of views and copies
(``reshape``, ``contiguous``, ``to``, ``flatten``, ``chunk``): then these calls alone are traced, all at once.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from autoparallel import _torch
from autoparallel.capture.composites import compositions

_DROPOUT = torch.ops.aten.dropout.default  # one that draws has become an operator of ours: this gives what it is given
_SIZE = torch.ops.aten.sym_size.int
_MARKS = ("nn_module_stack", "stack_trace", "torch_fn")
_OWN = ("aten", "autoparallel")
_OF_SIZES = ("_operator", "math", "builtins", "torch")  # modules of plain functions; those of torch.func are elsewhere


def make_functional(program: ExportedProgram) -> ExportedProgram:
    """The trace as values; ``program`` itself, rewritten, where nothing in it writes or is complex."""
    table = compositions(program.graph_module)
    if table or not all(map(_is_functional, program.graph.nodes)):
        return program.run_decompositions(table)
    _take_apart(program.graph, [node for node in program.graph.nodes if _is_composed_of_views(node.target)])
    _share_sizes(program)
    program.graph.eliminate_dead_code()
    return program


def _is_functional(node: fx.Node) -> bool:
    """Whether a node writes nowhere, makes no complex numbers, and is neither of torch.func nor a call of a graph."""
    if node.op != "call_function":
        return node.op in ("placeholder", "output")
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return getattr(target, "__module__", "") in _OF_SIZES
    if target._schema.returns and node.meta.get("val") is None:  # it raised an error, which the model has caught
        return False
    results = pytree.tree_leaves(node.meta.get("val"))
    if any(torch.is_complex(x) for x in results if isinstance(x, torch.Tensor)):  # conjugates are written down lazily
        return False
    if target.namespace not in _OWN or target._schema.is_mutable:
        return False
    return target is _DROPOUT or torch.Tag.maybe_aliasing_or_mutating not in target.tags


def _is_composed_of_views(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload) or not _torch.has_composition(target):
        return False
    return target is _DROPOUT or any(argument.alias_info for argument in target._schema.arguments)


def _take_apart(graph: fx.Graph, calls: Sequence[fx.Node]) -> None:
    """Puts what each call is composed of in its place."""
    if not calls:
        return
    sources = list(dict.fromkeys(source for call in calls for source in call.all_input_nodes))
    values = [_apart(source.meta["val"]) for source in sources]

    def run(*given: Any) -> list[Any]:
        known = dict(zip(sources, given, strict=True))
        return [
            call.target(*fx.map_arg(call.args, known.__getitem__), **fx.map_arg(call.kwargs, known.__getitem__))  # type: ignore[operator]
            for call in calls
        ]

    with torch.no_grad():
        traced = make_fx(run)(*values).graph
    placeholders = [node for node in traced.nodes if node.op == "placeholder"]
    becomes: dict[fx.Node, fx.Node] = dict(zip(placeholders, sources, strict=True))
    stands_for = dict(zip(sources, placeholders, strict=True))

    def replace(old: fx.Node, new: fx.Node) -> None:
        old.replace_all_uses_with(new)
        graph.erase_node(old)
        if old in stands_for:
            becomes[stands_for[old]] = new

    for call, results in zip(calls, traced.output_node().args[0], strict=True):  # type: ignore[arg-type]
        marks = {name: call.meta[name] for name in _MARKS if name in call.meta}

        def put(node: fx.Node, marks: dict[str, Any] = marks) -> fx.Node:
            if node not in becomes:
                becomes[node] = copied = graph.node_copy(node, put)
                copied.meta = {"val": node.meta.get("val"), **marks}
            return becomes[node]

        with graph.inserting_before(call):
            new = fx.map_arg(results, put)
        if isinstance(new, fx.Node):
            replace(call, new)
            continue
        for user in list(call.users):
            assert user.target is operator.getitem
            replace(user, new[user.args[1]])
        graph.erase_node(call)


def _apart(value: Any) -> Any:
    """A tensor that no other node has."""
    return value.detach() if isinstance(value, torch.Tensor) else value


def _share_sizes(program: ExportedProgram) -> None:
    """Asks the first input that has it for each size, once."""
    graph = program.graph
    nodes = {node.name: node for node in graph.nodes}
    asked: dict[sympy.Expr, fx.Node] = {}
    where: dict[sympy.Expr, tuple[fx.Node, int]] = {}
    for spec in program.graph_signature.input_specs:
        node = nodes.get(spec.arg.name)
        value = node.meta.get("val") if node is not None and spec.kind == InputKind.USER_INPUT else None
        if isinstance(value, torch.Tensor):
            for dim, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt):
                    where.setdefault(size.node.expr, (node, dim))
    begin = next(node for node in graph.nodes if node.op != "placeholder")
    for node in [node for node in graph.nodes if node.target is _SIZE]:
        size = node.meta["val"]
        expression = size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
        if expression.is_Integer:
            _replace_by_number(node, int(expression))
            continue
        if expression not in asked:
            asked[expression] = node
            if expression in where:
                with graph.inserting_before(begin):
                    asked[expression] = graph.call_function(_SIZE, where[expression])
                asked[expression].meta = dict(node.meta)
        if asked[expression] is not node:
            node.replace_all_uses_with(asked[expression])
            graph.erase_node(node)


def _replace_by_number(node: fx.Node, number: int) -> None:
    for user in list(node.users):
        user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), lambda n: number if n is node else n)
    node.graph.erase_node(node)
