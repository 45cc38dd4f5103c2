"""A number that Python reads of a tensor stays a tensor, where it is only computed with or returned.

``n = h.norm().item()`` is a synchronisation in eager, for a number that most models divide by, keep for a log
(``self.norm = n``) or return beside the loss.  In the graph it is a tensor of no dims, detached, as exact as Python's
numbers: float64 or int64, and bool for what compares them, as the questions do by which Python goes on (``if n > 3``,
see ``capture.functional.ways``).  What is returned becomes a number of Python's when the call delivers it.  A number
that decides a shape stays as it is, and is refused.

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
from collections.abc import Callable, Collection
from typing import Any, TypeGuard

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoparallel._torch.numbers import FUNCTIONS
from autoparallel.passes.emitter import Emitter, replace_node
from autoparallel.rules.calls import READS, is_tensor

aten = torch.ops.aten

_CHECKS = (aten._assert_scalar.default, aten.sym_constrain_range.default, aten.sym_constrain_range_for_size.default)
_OF_PYTHON: dict[Any, Any] = {
    operator.add: aten.add.Tensor, operator.sub: aten.sub.Tensor, operator.mul: aten.mul.Tensor,
    operator.truediv: aten.div.Tensor, operator.floordiv: aten.floor_divide.default,
    operator.mod: aten.remainder.Tensor, operator.pow: aten.pow.Tensor_Tensor, operator.neg: aten.neg.default,
    operator.abs: aten.abs.default, torch.sym_float: aten.alias.default, torch.sym_max: aten.maximum.default,
    torch.sym_min: aten.minimum.default,
    **{function: getattr(aten, name).default for name, function in FUNCTIONS.items()},
    **{getattr(operator, name): getattr(aten, name).Tensor for name in ("lt", "le", "gt", "ge", "eq", "ne")},
    torch.sym_not: aten.logical_not.default, operator.and_: aten.logical_and.default,
    operator.or_: aten.logical_or.default, torch.sym_ite: aten.where.self,
}  # fmt: skip
"""What computes of tensors what Python computes of numbers."""

_DTYPES: dict[torch.dtype, Any] = {
    torch.float64: torch.SymFloat | float, torch.int64: torch.SymInt | int, torch.bool: torch.SymBool | bool,
}  # fmt: skip
"""In which dtype tensors stand for numbers of some kinds, of which a computation has one: the first of these."""

_FILLING: dict[Any, Callable[..., Any]] = {
    aten.full.default: lambda emit, size, _: size,
    aten.new_full.default: lambda emit, x, size, _: size,
    aten.full_like.default: lambda emit, x, _: emit.sizes(x),
    aten.scalar_tensor.default: lambda emit, _: [],
}
"""The shape of what a call fills with the last of its arguments."""


def defer_numbers(graph: fx.Graph, arguments: Collection[str]) -> None:
    """Rewrites the graph, but for what is read of ``arguments``, the placeholders of numbers that the call is given."""
    tensors, waiting = _Tensors(_find_choices(graph)), _find_waiting(graph)
    for node in list(graph.nodes):
        if node in waiting and node.target in READS and node.args[0].name not in arguments:
            tensors[node] = _value(Emitter(node), node.args[0])
        elif numbers := [x for x in node.all_input_nodes if x in tensors]:
            if node.op == "output":
                for number in numbers:
                    node.replace_input_with(number, tensors.returned(Emitter(node), number))
            elif node.target in _OF_PYTHON:
                tensors.compute(Emitter(node))
            elif node.target not in _CHECKS:
                tensors.give(Emitter(node))
    for node in reversed(tensors):
        if not node.users:
            graph.erase_node(node)


def _find_waiting(graph: fx.Graph) -> set[fx.Node]:
    """The numbers of which all that is made can be made of tensors."""
    waiting: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if _is_number(node) and all(_takes(user, node, waiting) for user in node.users):
            waiting.add(node)
    return waiting


Choices = dict[fx.Node, tuple[fx.Node, Any, Any]]
"""Numbers that are one of two, by what chooses the first of these (see ``capture.tracing.numbers_read``)."""


def _find_choices(graph: fx.Graph) -> Choices:
    choices: Choices = {}
    for node in graph.find_nodes(op="call_function", target=aten.where.self):
        condition, *sides = node.args
        numbers = [x.args[0] for x in sides if isinstance(x, fx.Node) and x.target is aten.scalar_tensor.default]
        if len(numbers) == 2 and condition.target in _COMPARES and [*condition.args] == sides:
            choices |= {user: (condition, *numbers) for user in node.users if user.target in READS}
    return choices


_COMPARES = (aten.gt.Tensor, aten.lt.Tensor)


def _takes(call: fx.Node, number: fx.Node, waiting: Collection[fx.Node]) -> bool:
    """Whether a call can be made with a tensor for a number.

    Args:
        waiting: the numbers behind it that can be tensors.
    """
    if call.target in _OF_PYTHON:
        return call in waiting
    if call.target in _FILLING:
        return call.args[-1] is number
    return call.op == "output" or call.target in _CHECKS or is_tensor(call) and _tensor_form(call) is not None


def _tensor_form(call: fx.Node) -> Any:
    """The form of an operator that takes tensors where a call has numbers; None where it has none."""
    inside = pytree.tree_leaves(([x for x in call.args if not isinstance(x, fx.Node)], call.kwargs))
    if not isinstance(call.target, torch._ops.OpOverload) or any(map(_is_number, inside)):
        return None
    before = call.target._schema.arguments
    for name in (call.target._overloadname, "Tensor", "Tensor_Tensor", "self"):
        form = getattr(call.target.overloadpacket, name, None)
        after = [] if form is None else form._schema.arguments
        if [x.name for x in before] == [x.name for x in after] and all(
            argument is None or _takes_tensor(new) == (_takes_tensor(old) or _is_number(argument))
            for old, new, argument in zip(before, after, call.args, strict=False)
        ):
            return form
    return None


def _is_number(x: Any) -> TypeGuard[fx.Node]:
    return isinstance(x, fx.Node) and isinstance(x.meta.get("val"), torch.SymFloat | torch.SymInt | torch.SymBool)


def _example(x: Any) -> Any:
    """A number, or what stands for one in a trace."""
    return x.meta["val"] if isinstance(x, fx.Node) else x


def _takes_tensor(parameter: Any) -> bool:
    return str(parameter.type) in ("Tensor", "Optional[Tensor]")


def _value(emit: Emitter, x: fx.Node) -> fx.Node:
    """What is read of a tensor, as exact as a number of Python's."""
    value = emit.value(x)
    flat = emit(aten.reshape.default, x, []) if value.ndim else x
    dtype = torch.float64 if value.is_floating_point() else torch.int64
    return emit.cast(emit(aten.detach.default, flat), dtype)


class _Tensors(dict[fx.Node, fx.Node]):
    """The tensors that stand for numbers, by what made these.

    Args:
        choices: the numbers that are one of two, which may be of two types.
    """

    def __init__(self, choices: Choices) -> None:
        self.choices = choices

    def returned(self, emit: Emitter, number: fx.Node) -> fx.Node:
        """What is returned for a number: where its type follows from values, a pair (see ``graph.leaves.Number``)."""
        value = self[number]
        whole = self._is_whole(emit, number, emit.value(value).device)
        if not isinstance(number.meta["val"], torch.SymFloat) or whole is False:
            return value
        place = self._of(emit, whole, torch.bool, emit.value(value).device) if whole is True else whole
        return emit(aten.stack.default, [value, emit.cast(place, value.meta["val"].dtype)])  # an int is behind a float

    def _is_whole(self, emit: Emitter, number: Any, device: torch.device) -> bool | fx.Node:
        """Whether a number is a whole one of Python's; a tensor where values tell."""
        if number in self.choices:
            condition, *numbers = self.choices[number]
            answers = [self._is_whole(emit, x, device) for x in numbers]
            if answers[0] is answers[1]:
                return answers[0]
            tensors = [self._of(emit, x, torch.bool, device) if isinstance(x, bool) else x for x in answers]
            return emit(aten.where.self, condition, *tensors)
        if isinstance(number, fx.Node) and number.target in (operator.neg, operator.abs):
            return self._is_whole(emit, number.args[0], device)
        return isinstance(_example(number), int | torch.SymInt)

    def compute(self, emit: Emitter) -> None:
        """What Python computes of numbers, of tensors."""
        node = emit.node
        device = next(emit.value(self[x]).device for x in node.all_input_nodes if x in self)
        conditions, values = (node.args[:1], node.args[1:]) if node.target is torch.sym_ite else ((), node.args)
        numbers = [1.0] if node.target is operator.truediv else [_example(x) for x in (*values, node)]
        dtype = next(dtype for dtype, kinds in _DTYPES.items() if any(isinstance(x, kinds) for x in numbers))
        if node.target is torch.sym_max and dtype == torch.int64:
            for least, x in (values, values[::-1]):
                if isinstance(least, int):  # as max(1, n) of a count, which is one that is clamped
                    self[node] = emit(aten.clamp.default, self._of(emit, x, dtype, device), least)
                    return
        operands = [self._of(emit, x, torch.bool, device) for x in conditions]
        operands += [self._of(emit, x, dtype, device) for x in values]
        self[node] = emit(_OF_PYTHON[node.target], *operands)

    def give(self, emit: Emitter) -> None:
        """Has an operator take tensors of no dims for its numbers, with a result of the same dtype."""
        node = emit.node
        like = emit.value(node)
        if node.target in _FILLING:
            value = emit.cast(self[node.all_input_nodes[-1]], like.dtype, like.device)
            sizes = _FILLING[node.target](emit, *node.args)
            result = emit(aten.clone.default, emit(aten.expand.default, value, sizes)) if sizes else value
        else:
            operands = [self._operand(emit, x) if _is_number(x) else x for x in node.args]
            result = emit.cast(emit(_tensor_form(node), *operands, **node.kwargs), like.dtype, like.device)
        replace_node(node, result)

    def _operand(self, emit: Emitter, number: fx.Node) -> fx.Node:
        """What an operator takes for a number, beside tensors."""
        tensors = [emit.value(x) for x in emit.node.args if isinstance(x, fx.Node) and is_tensor(x)]
        kind, exact = (1.0, torch.float64) if isinstance(number.meta["val"], torch.SymFloat) else (1, torch.int64)
        dtype = torch.result_type(tensors[0], kind)
        # Beside a number, half precision is computed in more; so it is beside a tensor of no dims, if it has dims.
        in_more = dtype.itemsize == 2 and any(x.ndim for x in tensors)
        return self._of(emit, number, exact if in_more else dtype, tensors[0].device)

    def _of(self, emit: Emitter, number: Any, dtype: torch.dtype, device: torch.device) -> fx.Node:
        """The tensor of a number: one of these, or one that is filled with a constant or a size."""
        if number in self:
            return emit.cast(self[number], dtype, device)
        return emit(aten.full.default, [], number, dtype=dtype, device=device)
