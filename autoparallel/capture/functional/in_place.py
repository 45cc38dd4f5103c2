"""Writes in place, as new values, where only one name has the memory.

    add_ = aten.add_(linear, x)                        add = aten.add(linear, x)
    relu = aten.relu(linear)                           relu = aten.relu(add)

Only what an operator has made, or a buffer of the model, and what no view has been made of: then those that come behind
the write read what was written, and nobody else can tell.  A buffer is given its last value at the end.  All other
writes are torch's to follow, which traces all again for them.
"""

from __future__ import annotations

from collections.abc import Set
from functools import cache
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, OutputSpec, TensorArgument

from autoparallel import _torch
from autoparallel.graph.lines import marks_of
from autoparallel.passes.emitter import replace_node
from autoparallel.rules import has_rule

aten = torch.ops.aten

_NO_VIEWS = frozenset({
    aten.linear.default, aten.matmul.default, aten.conv1d.default, aten.conv2d.default, aten.conv3d.default,
    aten.layer_norm.default, aten.group_norm.default, aten.softmax.int, aten.scaled_dot_product_attention.default,
    aten.sym_size.int,
})  # fmt: skip
"""Composed operators, whose schemas would not say that they give a view, that never do."""


def make_new_values(program: ExportedProgram) -> None:
    """Has each write to memory that has one name make a new tensor, which those behind it read."""
    graph = program.graph
    buffers = _buffers_of_one_name(program)
    for node in list(graph.nodes):
        if _does_nothing(node):
            replace_node(node, node.args[0])
            continue
        if operator_of_write(node.target) is None or not _has_one_name(node, buffers):
            continue
        written = node.args[0]
        with graph.inserting_before(node):
            value = _copied_value(node, buffers) if node.target is aten.copy_.default else _computed_value(node)
        if value is None:
            continue
        for user in list(written.users):
            if user > node:
                user.replace_input_with(written, value)
        replace_node(node, value)
        if written in buffers:
            with graph.inserting_before(graph.output_node()):
                last = graph.call_function(aten.copy_.default, (written, value))
            last.meta = {"val": written.meta["val"], _LAST: True}


def _does_nothing(node: fx.Node) -> bool:
    """Whether a call changes nothing: a copy of a tensor to itself, as of ``self.count += 1``, or the cut from its
    gradient of what ``torch.tensor(0.0)`` makes, which has none."""
    written = node.args[0] if node.args else None
    if node.target is aten.detach_.default:
        return isinstance(written, fx.Node) and written.target is aten.lift_fresh_copy.default
    return node.target is aten.copy_.default and written is node.args[1]


_LAST = "last value"
"""Marks what gives a buffer its value at the end."""


def give_last_values(program: ExportedProgram) -> None:
    """Makes what buffers are given at the end results of the graph, as ``run_decompositions`` does, where nothing else
    is written any more."""
    graph, signature = program.graph, program.graph_signature
    places = {node.name: i for i, node in enumerate(graph.find_nodes(op="placeholder"))}
    last = sorted((n for n in graph.nodes if is_last_value(n)), key=lambda n: places[n.args[0].name])
    output = graph.output_node()
    output.args = ((*[node.args[1] for node in last], *output.args[0]),)
    signature.output_specs[:0] = [
        OutputSpec(
            OutputKind.BUFFER_MUTATION,
            TensorArgument(name=node.args[1].name),
            target=signature.inputs_to_buffers[node.args[0].name],
        )
        for node in last
    ]
    for node in last:
        graph.erase_node(node)


def is_last_value(node: fx.Node) -> bool:
    """Whether a node gives a buffer its value at the end."""
    return _LAST in node.meta


def _buffers_of_one_name(program: ExportedProgram) -> set[fx.Node]:
    """The placeholders of buffers that no other placeholder shares memory with."""
    names = program.graph_signature.inputs_to_buffers
    marks: dict[int, list[fx.Node]] = {}
    for node in program.graph.find_nodes(op="placeholder"):
        if isinstance(node.meta.get("val"), torch.Tensor):
            marks.setdefault(_torch.tensors.storage_mark(node.meta["val"]), []).append(node)
    return {nodes[0] for nodes in marks.values() if len(nodes) == 1 and nodes[0].name in names}


def _computed_value(node: fx.Node) -> fx.Node | None:
    """The new tensor of a write that computes; None where it would be of another kind than what is written."""
    operator = operator_of_write(node.target)
    if not (_makes_memory(operator) and has_rule(operator) and _is_same(operator, node)):
        return None
    value = node.graph.call_function(operator, node.args, node.kwargs)
    value.meta = node.meta
    return value


def _copied_value(node: fx.Node, buffers: Set[fx.Node]) -> fx.Node | None:
    """The new tensor of a write that copies: what is copied, where nobody else has it; None where what is written may
    have a gradient, which the copy sets to zero, or is of another kind."""
    written, source = node.args[:2]
    if not isinstance(written, fx.Node) or not isinstance(source, fx.Node) or written not in buffers:
        return None
    if written.meta["val"].requires_grad or _kind(source.meta["val"]) != _kind(written.meta["val"]):
        return None
    if len(source.users) == 1 and _has_memory(source):
        return source
    value = node.graph.call_function(aten.clone.default, (source,))
    value.meta = {**node.meta, "val": source.meta["val"]}
    return value


def cast_copies(graph: fx.Graph) -> None:
    """Casts what is copied into a tensor of another dtype or device; ``run_decompositions`` forgets the dtype of a
    model's own, and reads what is copied where it is written."""
    for node in graph.find_nodes(op="call_function", target=aten.copy_.default):
        written, source = (x.meta["val"] for x in node.args[:2])
        options = {name: getattr(written, name) for name in ("dtype", "device")}
        if any(getattr(source, name) != option for name, option in options.items()):
            with graph.inserting_before(node):
                cast = graph.call_function(aten._to_copy.default, (node.args[1],), options)
            cast.meta = {"val": source.to(**options), **marks_of(node)}
            node.update_arg(1, cast)


def operator_of_write(target: Any) -> Any:
    """The operator that makes what a call's target writes into its first operand; None for other targets."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or not target._schema.is_mutable:
        return None
    return _with_same_operands(target)


@cache
def _with_same_operands(target: torch._ops.OpOverload) -> Any:
    """The operator that makes a new tensor of what one in place has; its overload may be called otherwise: pow_.Scalar
    has the exponent where pow.Scalar has the base."""
    name = target._schema.name.removeprefix("aten::")
    packet = getattr(aten, name.removesuffix("_"), None) if name[-1] == "_" else None
    overloads = (getattr(packet, overload) for overload in packet.overloads()) if packet is not None else ()
    return next((x for x in overloads if _operands(x) == _operands(target)), None)


def _operands(operator: torch._ops.OpOverload) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in operator._schema.arguments]


def _has_one_name(node: fx.Node, buffers: Set[fx.Node]) -> bool:
    """Whether what a call writes is an operator's result or a buffer, of which there is no view."""
    written = node.args[0]
    if not isinstance(written, fx.Node) or not (written in buffers or _has_memory(written)):
        return False

    def shares_nothing(user: fx.Node) -> bool:
        if user.op == "output" or _makes_memory(user.target):
            return True
        return operator_of_write(user.target) is not None and (user.args[0] is not written or user >= node)

    return all(map(shares_nothing, written.users))


def _has_memory(node: fx.Node) -> bool:
    """Whether a node is what an operator makes, as the only one."""
    if node.target is not getitem:
        return _makes_memory(node.target)
    results, place = node.args
    assert isinstance(results, fx.Node)
    return _makes_memory(results.target) and sum(user.args[1:] == (place,) for user in results.users) == 1


def _makes_memory(target: Any) -> bool:
    """Whether an operator's results, tensors or sizes, share memory with nothing."""
    if target in _NO_VIEWS:
        return True
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    if torch.Tag.maybe_aliasing_or_mutating in target.tags or _torch.export.has_composition(target):
        return False
    returns = target._schema.returns
    return not target._schema.is_mutable and bool(returns) and all(x.alias_info is None for x in returns)


def _is_same(operator: Any, node: fx.Node) -> bool:
    """Whether an operator makes, of the same operands, a tensor as the one that is written."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
    with torch.no_grad():
        return _kind(operator(*args, **kwargs)) == _kind(node.meta["val"])


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    sizes = (x.node.expr if isinstance(x, torch.SymInt) else x for x in (*tensor.shape, *tensor.stride()))
    return tensor.dtype, tensor.device, *sizes
