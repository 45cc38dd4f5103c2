"""Writes in place, as new values, where only one name has the memory.

    add_ = aten.add_(linear, x)                        add = aten.add(linear, x)
    relu = aten.relu(linear)                           relu = aten.relu(add)

Only what an operator has made, and what no view has been made of: then those that come behind the write read what was
written, and nobody else can tell.  All other writes are torch's to follow, which traces all again for them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import fx

from autoparallel import _torch
from autoparallel.rules import has_rule

aten = torch.ops.aten

_NO_VIEWS = frozenset({
    aten.linear.default, aten.matmul.default, aten.conv1d.default, aten.conv2d.default, aten.conv3d.default,
    aten.layer_norm.default, aten.group_norm.default, aten.softmax.int, aten.scaled_dot_product_attention.default,
    aten.sym_size.int,
})  # fmt: skip
"""Composed operators, whose schemas would not say that they give a view, that never do."""


def make_new_values(graph: fx.Graph) -> None:
    """Has each write to memory that has one name make a new tensor, which those behind it read."""
    for node in list(graph.nodes):
        if node.target is aten.detach_.default and node.args[0].target is aten.lift_fresh_copy.default:
            node.replace_all_uses_with(node.args[0])  # what torch.tensor(0.0) makes has no gradient to be cut off from
            graph.erase_node(node)
            continue
        operator = operator_of_write(node.target)
        if operator is None or not (_makes_memory(operator) and has_rule(operator)):
            continue
        if not _has_one_name(node) or not _is_same(operator, node):
            continue
        written = node.args[0]
        with graph.inserting_before(node):
            value = graph.call_function(operator, node.args, node.kwargs)
        value.meta = node.meta
        for user in list(written.users):
            if user > node:
                user.replace_input_with(written, value)
        node.replace_all_uses_with(value)
        graph.erase_node(node)


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


def _has_one_name(node: fx.Node) -> bool:
    """Whether what a call writes is an operator's result, of which there is no view."""
    written = node.args[0]
    if not isinstance(written, fx.Node) or not _makes_memory(written.target):
        return False

    def shares_nothing(user: fx.Node) -> bool:
        if user.op == "output" or _makes_memory(user.target):
            return True
        return operator_of_write(user.target) is not None and (user.args[0] is not written or user >= node)

    return all(map(shares_nothing, written.users))


def _makes_memory(target: Any) -> bool:
    """Whether an operator's result, a tensor or a size, shares memory with nothing."""
    if target in _NO_VIEWS:
        return True
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    if torch.Tag.maybe_aliasing_or_mutating in target.tags or _torch.export.has_composition(target):
        return False
    returns = target._schema.returns
    return not target._schema.is_mutable and len(returns) == 1 and returns[0].alias_info is None


def _is_same(operator: Any, node: fx.Node) -> bool:
    """Whether an operator makes, of the same operands, a tensor as the one that is written."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
    with torch.no_grad():
        return _kind(operator(*args, **kwargs)) == _kind(node.meta["val"])


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    sizes = (x.node.expr if isinstance(x, torch.SymInt) else x for x in (*tensor.shape, *tensor.stride()))
    return tensor.dtype, tensor.device, *sizes
