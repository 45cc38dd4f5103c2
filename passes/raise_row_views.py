"""Moves views of a loss's rows above the product that makes its logits.

Logits that are shifted or flattened on their way to the loss are copied whole, and cannot be cut into chunks of rows
(see ``chunk_loss``).  What the product reads is far smaller and has the same rows: it is shifted and flattened instead.

Before (x is [2, 5, 8], w [100, 8]):
    linear = aten.linear(x, w);  slice_1 = aten.slice(linear, 1, 0, -1);  reshape = aten.reshape(slice_1, [-1, 100])
    cross_entropy_sum = operators.cross_entropy_sum(reshape, target)
After:
    slice_1 = aten.slice(x, 1, 0, -1);  reshape = aten.reshape(slice_1, [-1, 8]);  linear = aten.linear(reshape, w)
    cross_entropy_sum = operators.cross_entropy_sum(linear, target)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoparallel import operators
from autoparallel.comm.collectives import redistribute
from autoparallel.graph.lines import marks_of
from autoparallel.passes.emitter import Emitter
from autoparallel.rules.calls import arguments, is_tensor, shape_of, tensor_operands

aten = torch.ops.aten

LOSSES = (
    operators.cross_entropy_sum, operators.cross_entropy_sum_sharded, aten.nll_loss_nd.default,
    aten.cross_entropy_loss.default,
)  # fmt: skip
"""The operators that sum over the rows of logits, their first operand."""
_OF_ROWS = (operators.cross_entropy_sum, operators.cross_entropy_sum_sharded)
"""Those of them whose rows may have several dims: the classes are the last one."""
_ELEMENTWISE = (
    aten._to_copy.default, aten.to.dtype, aten.clone.default, aten.alias.default, aten.tanh.default, aten.neg.default,
    aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.add.Tensor, aten.sub.Tensor,
    aten.clamp.default,
)  # fmt: skip
_SOFTMAX = (aten.log_softmax.int, aten._log_softmax.default)
_VIEWS = (aten.slice.Tensor, aten.select.int, aten.reshape.default)


@dataclass(frozen=True)
class Head:
    """A product that makes logits, and the loss that reads them.

    Attributes:
        product: the call of the product.
        rows: its operand whose rows the logits have.
        between: what is done to the logits, row by row or as views of rows, in order.
        loss: the call that sums over the rows.
    """

    product: fx.Node
    rows: fx.Node
    between: tuple[fx.Node, ...]
    loss: fx.Node

    @property
    def views(self) -> tuple[fx.Node, ...]:
        """The views among what is done to the logits."""
        return tuple(node for node in self.between if node.target in _VIEWS)


def find_heads(graph: fx.Graph, *, alone: bool = True) -> Iterator[Head]:
    """The losses of a graph that are sums over rows of logits; those that nothing else reads, unless not ``alone``."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in LOSSES and (head := _head_of(node, alone)) is not None:
            yield head


def _head_of(loss: fx.Node, alone: bool) -> Head | None:
    values = arguments(loss)
    node = loss.args[0]
    if values.get("reduction", 2) != 2 or not isinstance(node, fx.Node):
        return None
    rank = len(shape_of(node))
    if rank < 2 or rank > 2 and loss.target not in _OF_ROWS:
        return None
    between: list[fx.Node] = []
    while node.op == "call_function" and not (alone and len(node.users) > 1):
        rows = _rows_of(node)
        if rows is not None:
            return Head(node, rows, tuple(reversed(between)), loss)
        if not (_keeps_rows(node) or _views_rows(node)):
            return None
        between.append(node)
        node = tensor_operands(node)[0]
    return None


def _rows_of(node: fx.Node) -> fx.Node | None:
    """The operand of a product whose rows its result has; None for what is no product with one matrix."""
    operands = tensor_operands(node)
    if node.target is aten.linear.default:
        return operands[0]
    if node.target in (aten.mm.default, aten.matmul.default):
        return operands[0] if len(shape_of(operands[0])) > 1 and len(shape_of(operands[1])) == 2 else None
    if node.target is aten.addmm.default:
        return operands[1] if len(shape_of(operands[0])) < 2 else None
    return None


def _keeps_rows(node: fx.Node) -> bool:
    """Whether each row of a call's result is made of that row of its first operand."""
    operands = tensor_operands(node)
    if not operands or operands[0] is not node.args[0] or not is_tensor(node):
        return False
    rank = len(shape_of(operands[0]))
    if node.target in _SOFTMAX:
        return arguments(node)["dim"] in (-1, rank - 1)
    if node.target is redistribute:
        return not {f"S{dim}" for dim in range(rank - 1)}.intersection(node.args[1:3])
    alike = rank == len(shape_of(node))  # what is broadcast along the rows has no dim for them
    return node.target in _ELEMENTWISE and alike and all(len(shape_of(x)) < 2 for x in operands[1:])


def _views_rows(node: fx.Node) -> bool:
    """Whether a call is a view that leaves the last dim as it is."""
    x = node.args[0]
    if node.target not in _VIEWS or not isinstance(x, fx.Node):
        return False
    before, after = shape_of(x), shape_of(node)
    if node.target is aten.reshape.default:
        return bool(len(before) > 1 and after and before[-1] == after[-1])
    return bool(arguments(node)["dim"] % len(before) != len(before) - 1)


def raise_row_views(module: fx.GraphModule) -> None:
    """Rewrites the graph of ``module`` in place."""
    for head in list(find_heads(module.graph)):
        if head.views:
            _raise(head)
    module.graph.eliminate_dead_code()


def _raise(head: Head) -> None:
    emit = Emitter(head.loss)
    rows, width = head.rows, shape_of(head.rows)[-1]
    for view in head.views:
        others = list(view.args[1:])
        if view.target is aten.reshape.default:
            others[0] = [*others[0][:-1], width]  # type: ignore[index, misc]
        rows = _repeat_call(emit, view, (rows, *others))
    place = head.product.args.index(head.rows)
    logits = _repeat_call(emit, head.product, (*head.product.args[:place], rows, *head.product.args[place + 1 :]))
    for node in head.between:
        if node not in head.views and node.target is not aten.clone.default:  # copied for the views alone
            logits = _repeat_call(emit, node, (logits, *node.args[1:]))
    head.loss.replace_input_with(head.between[-1], logits)


def _repeat_call(emit: Emitter, node: fx.Node, args: tuple[Any, ...]) -> fx.Node:
    """The call once more, on other arguments; it stays that of its own module."""
    new = emit(node.target, *args, **node.kwargs)
    new.meta.update(marks_of(node))
    return new
