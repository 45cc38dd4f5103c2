"""The trace of a model as values: nothing is written in place, and views are those that rules speak of.

    reshape = aten.reshape(x, [sym_size, 128])         sym_size = aten.sym_size(ids, 0)
    size = aten.sym_size(reshape, 0)                   view = aten.view(x, [sym_size, 128])

``ExportedProgram.run_decompositions`` makes a trace so by running it twice, node by node, which takes longer than
tracing the model.  Where nothing writes, or only to memory that has one name (``in_place``), all it does is to take
apart what is composed of views and copies (``reshape``, ``contiguous``, ``to``, ``broadcast_tensors``): then these
calls alone are traced, all at once.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from autoparallel import _torch
from autoparallel.capture.functional.batch_norms import write_statistics
from autoparallel.capture.functional.composites import compositions, is_unknown_composite
from autoparallel.capture.functional.factorizations import restore_errors
from autoparallel.capture.functional.in_place import (
    cast_copies,
    give_last_values,
    is_last_value,
    make_new_values,
    operator_of_write,
)
from autoparallel.capture.functional.sizes import Sizes
from autoparallel.passes.emitter import copier, replace_node
from autoparallel.rules.shapes import expression

_DROPOUT = torch.ops.aten.dropout.default  # one that draws has become an operator of ours: this gives what it is given
_OF_VIEWS = frozenset({_DROPOUT, torch.ops.aten.broadcast_tensors.default, torch.ops.aten.repeat_interleave.self_int})
"""What is composed of views and copies, though it does not say so."""
_EINSUM = torch.ops.aten.einsum.default
_OWN = ("aten", "autoparallel")
_OF_SIZES = ("_operator", "math", "builtins", "torch")  # modules of plain functions; those of torch.func are elsewhere


def make_functional(program: ExportedProgram) -> ExportedProgram:
    """The trace as values; ``program`` itself, rewritten, where nothing in it writes or is complex, and no autocast
    around it has yet to cast what it computes."""
    casts = _torch.export.autocasts()
    cast_copies(program.graph)
    if not casts:
        write_statistics(program.graph)
    writes = _writes(program.graph)
    if writes:  # which may be to the memory of what einsum("ij->ji", x) has taken a view of, though it is one call
        _take_apart(program.graph, [x for x in program.graph.nodes if x.target is _EINSUM and len(x.args[1]) == 1])
    if writes and all(operator_of_write(node.target) is not None for node in writes):
        make_new_values(program)
        writes = _writes(program.graph)
    if casts or not all(map(is_last_value, writes)):
        for node in program.graph.find_nodes(op="placeholder"):
            _torch.export.forget_constant(node.meta["val"])
        _name_once(program)
        with _torch.autograd.below_autograd(_of_users(program.graph_module)):
            return restore_errors(program.run_decompositions(compositions(program.graph_module)))
    give_last_values(program)
    _take_apart(program.graph, [node for node in program.graph.nodes if _is_composed_of_views(node.target)])
    _share_sizes(program)
    program.graph.eliminate_dead_code()
    return program


def _name_once(program: ExportedProgram) -> None:
    """Gives each tensor of the model that has several names its first one alone: ``torch.export`` takes them for
    tensors that share memory, and decomposes no trace that changes one."""
    placeholders = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    specs, first_of = program.graph_signature.input_specs, dict[int, fx.Node]()
    for spec in [spec for spec in specs if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER)]:
        node, target = placeholders[spec.arg.name], str(spec.target)
        held = program.state_dict if target in program.state_dict else program.constants
        first = first_of.setdefault(id(held[target]), node)
        if first is not node:
            replace_node(node, first)
            specs.remove(spec)
            del held[target]


def _of_users(module: fx.GraphModule) -> set[torch._ops.OpOverload]:
    """The operators that graphs call which are of others than torch, and not composed of its operators."""
    graphs = [inner.graph for inner in module.modules() if isinstance(inner, fx.GraphModule)]
    targets = (node.target for graph in graphs for node in graph.nodes)
    called = {target for target in targets if isinstance(target, torch._ops.OpOverload)}
    return {x for x in called if x.namespace not in _OWN and not _torch.export.has_composition(x)}


def _writes(graph: fx.Graph) -> list[fx.Node]:
    """What keeps a trace from being values."""
    return [node for node in graph.nodes if not _is_functional(node)]


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
    if is_unknown_composite(target):
        return target in _OF_VIEWS
    return target is _DROPOUT or torch.Tag.maybe_aliasing_or_mutating not in target.tags


def _is_composed_of_views(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload) or not _torch.export.has_composition(target):
        return False
    return target in _OF_VIEWS or any(argument.alias_info for argument in target._schema.arguments)


def _take_apart(graph: fx.Graph, calls: Sequence[fx.Node]) -> None:
    """Puts what each call is composed of in its place."""
    if not calls:
        return
    sources = list(dict.fromkeys(source for call in calls for source in call.all_input_nodes))
    values = [_copy_of_its_own(source.meta["val"]) for source in sources]

    def run(*parts: Any) -> list[Any]:
        operands = dict(zip(sources, parts, strict=True))
        return [
            call.target(*fx.map_arg(call.args, operands.__getitem__), **fx.map_arg(call.kwargs, operands.__getitem__))  # type: ignore[operator]
            for call in calls
        ]

    with torch.no_grad():
        traced = make_fx(run)(*values).graph
    placeholders = [node for node in traced.nodes if node.op == "placeholder"]
    becomes: dict[fx.Node, fx.Node] = dict(zip(placeholders, sources, strict=True))
    stands_for = dict(zip(sources, placeholders, strict=True))

    def replace(old: fx.Node, new: fx.Node) -> None:
        replace_node(old, new)
        if old in stands_for:
            becomes[stands_for[old]] = new

    for call, results in zip(calls, traced.output_node().args[0], strict=True):  # type: ignore[arg-type]
        with graph.inserting_before(call):
            new = fx.map_arg(results, copier(graph, becomes, call))
        if isinstance(new, fx.Node):
            replace(call, new)
            continue
        for user in list(call.users):
            assert user.target is operator.getitem
            replace(user, new[user.args[1]])
        graph.erase_node(call)


def _copy_of_its_own(value: Any) -> Any:
    """A tensor that no other node has."""
    return value.detach() if isinstance(value, torch.Tensor) else value


def _share_sizes(program: ExportedProgram) -> None:
    """Makes each size once, of those of the inputs where they say it: what is asked of a value is one more reader."""
    graph = program.graph
    sizes = Sizes(program)
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.op != "call_function" or isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
            continue
        size = sizes.shared(expression(value), node)
        if size is not node:
            _replace(node, size)


def _replace(node: fx.Node, size: fx.Node | int) -> None:
    for user in list(node.users):
        user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), lambda n: size if n is node else n)
    node.graph.erase_node(node)
