"""A number that Python reads of a tensor stays a tensor, where it is only computed with or returned.

``n = h.norm().item()`` is a synchronisation in eager, for a number that most models divide by, keep for a log
(``self.norm = n``) or return beside the loss.  In the graph it is a tensor of no dims, detached, as exact as Python's
numbers: float64 or int64.  What is returned becomes a number of Python's when the call delivers it.  A number that
decides a shape or a way stays as it is, and is refused.

Before:
    item = aten.item(norm)
    div = aten.div.Tensor(h, item)
    mul = operator.mul(2.0, item)
    return [div, mul]
After:
    detach = aten.detach(norm)
    _to_copy = aten._to_copy(detach, dtype=torch.float64)
    _to_copy_1 = aten._to_copy(_to_copy, dtype=torch.float32)
    div = aten.div.Tensor(h, _to_copy_1)
    full = aten.full([], 2.0, dtype=torch.float64)
    mul = aten.mul.Tensor(full, _to_copy)
    return [div, mul]
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoparallel.passes.emitter import Emitter
from autoparallel.rules.calls import is_tensor

aten = torch.ops.aten

_READ = (aten.item.default, aten._local_scalar_dense.default)
_CHECKS = (aten._assert_scalar.default, aten.sym_constrain_range.default, aten.sym_constrain_range_for_size.default)
_OF_PYTHON: dict[Any, Any] = {
    operator.add: aten.add.Tensor, operator.sub: aten.sub.Tensor, operator.mul: aten.mul.Tensor,
    operator.truediv: aten.div.Tensor, operator.pow: aten.pow.Tensor_Tensor, operator.neg: aten.neg.default,
    operator.abs: aten.abs.default, torch.sym_float: aten.alias.default, torch.sym_max: aten.maximum.default,
    torch.sym_min: aten.minimum.default,
}  # fmt: skip
"""What computes of tensors what Python computes of numbers."""


def defer_numbers(graph: fx.Graph, arguments: Collection[str]) -> None:
    """Rewrites the graph, but for what is read of ``arguments``, the placeholders of numbers that the call is given."""
    tensors: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node.target in _READ and node.args[0].name not in arguments and _may_wait(node):
            tensors[node] = _value(Emitter(node), node.args[0])
        elif numbers := [x for x in node.all_input_nodes if x in tensors]:
            if node.op == "output":
                for number in numbers:
                    node.replace_input_with(number, tensors[number])
            elif node.target in _OF_PYTHON:
                tensors[node] = _compute(Emitter(node), node, tensors)
            elif node.target not in _CHECKS:
                _take(Emitter(node), node, tensors)
    for node in reversed(tensors):
        if not node.users:
            graph.erase_node(node)


def _may_wait(number: fx.Node) -> bool:
    """Whether all that is made of a number can be made of a tensor."""
    return isinstance(number.meta.get("val"), torch.SymFloat | torch.SymInt) and all(
        user.op == "output" or user.target in _CHECKS or _takes(user, number) for user in number.users
    )


def _takes(call: fx.Node, number: fx.Node) -> bool:
    """Whether a call can be made with a tensor for a number."""
    if call.target in _OF_PYTHON:
        return _may_wait(call)
    return is_tensor(call) and _tensor_form(call, number) is not None


def _tensor_form(call: fx.Node, number: fx.Node) -> Any:
    """The form of an operator that takes a tensor where a call has a number; None where it has none."""
    if call.target in (aten.full.default, aten.scalar_tensor.default):
        return call.target if call.args[-1] is number else None
    others = pytree.tree_leaves(([x for x in call.args if x is not number], call.kwargs))
    if not isinstance(call.target, torch._ops.OpOverload) or any(x is number for x in others):
        return None
    before = call.target._schema.arguments
    for name in (call.target._overloadname, "Tensor", "Tensor_Tensor", "self"):
        form = getattr(call.target.overloadpacket, name, None)
        after = [] if form is None else form._schema.arguments
        if [x.name for x in before] == [x.name for x in after] and all(
            argument is None or _takes_tensor(new) == (_takes_tensor(old) or argument is number)
            for old, new, argument in zip(before, after, call.args, strict=False)
        ):
            return form
    return None


def _takes_tensor(parameter: Any) -> bool:
    return str(parameter.type) in ("Tensor", "Optional[Tensor]")


def _value(emit: Emitter, x: fx.Node) -> fx.Node:
    """What is read of a tensor, as exact as a number of Python's."""
    dtype = torch.float64 if emit.value(x).is_floating_point() else torch.int64
    flat = emit(aten.reshape.default, x, []) if emit.value(x).ndim else x
    return _cast(emit, emit(aten.detach.default, flat), dtype)


def _compute(emit: Emitter, node: fx.Node, tensors: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """What Python computes of numbers, of tensors."""
    whole = isinstance(node.meta["val"], torch.SymInt) and node.target is not operator.truediv
    dtype = torch.int64 if whole else torch.float64
    device = next(emit.value(tensors[x]).device for x in node.all_input_nodes if x in tensors)

    def operand(x: Any) -> fx.Node:
        tensor = tensors.get(x) if isinstance(x, fx.Node) else None
        return _cast(emit, tensor, dtype) if tensor else emit(aten.full.default, [], x, dtype=dtype, device=device)

    return emit(_OF_PYTHON[node.target], *map(operand, node.args))


def _take(emit: Emitter, node: fx.Node, tensors: Mapping[fx.Node, fx.Node]) -> None:
    """Has an operator take a tensor of no dims for its number, with a result of the same dtype."""
    (number,) = {x for x in node.all_input_nodes if x in tensors}
    form, value = _tensor_form(node, number), tensors[number]
    if form is aten.full.default:
        result = emit(aten.clone.default, emit(aten.expand.default, value, node.args[0]))
    elif form is aten.scalar_tensor.default:
        result = value
    else:
        operands = [emit.value(x) for x in node.args if isinstance(x, fx.Node) and is_tensor(x)]
        dtype = torch.result_type(operands[0], 1.0 if isinstance(number.meta["val"], torch.SymFloat) else 1)
        # Beside a number, half precision is computed in more; so it is beside a tensor of no dims, if it has dims.
        if dtype.itemsize > 2 or not any(x.ndim for x in operands):
            value = _cast(emit, value, dtype)
        result = emit(form, *(value if x is number else x for x in node.args), **node.kwargs)
    node.replace_all_uses_with(_cast(emit, result, emit.value(node).dtype))
    node.graph.erase_node(node)


def _cast(emit: Emitter, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    return x if emit.value(x).dtype == dtype else emit(aten._to_copy.default, x, dtype=dtype)
