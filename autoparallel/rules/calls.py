"""Reading a call in a graph: its tensor operands, its arguments by name, its shapes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import torch
from torch import fx

from autoparallel._torch.numbers import is_one

aten = torch.ops.aten

Shape = tuple[Any, ...]

COPIES = (aten._to_copy.default, aten.clone.default, aten.alias.default)
"""Operators whose result is their operand, maybe rounded, and its gradient that of the result."""

READS = (aten.item.default, aten._local_scalar_dense.default)
"""What reads the number of a tensor into Python."""

CASTS = (*COPIES, aten.to.dtype, aten.detach.default)
"""What makes the same of a tensor, in another dtype or other memory."""


def is_tensor(node: fx.Node) -> bool:
    """Whether the node's value is one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def may_have_gradient(x: torch.Tensor) -> bool:
    """Whether the dtype of a tensor, real or complex, lets it be differentiated."""
    return x.is_floating_point() or x.is_complex()


def shape_of(node: fx.Node) -> Shape:
    """The node's global shape; ints and SymInts, but 1 where the trace takes for granted that a size is one.

    Torch may have found that after the tensor was made, so that it tells the size by an expression.
    """
    return tuple(1 if is_one(size) else size for size in node.meta["val"].shape)


def tensor_operands(node: fx.Node) -> list[fx.Node]:
    """The node's tensor operands in the order of the call, repeated where they repeat."""
    operands: list[fx.Node] = []

    def visit(arg: fx.Node) -> Any:
        if is_tensor(arg):
            operands.append(arg)
        return arg

    fx.map_arg((node.args, node.kwargs), visit)
    return operands


def selects_rows(node: fx.Node) -> bool:
    """Whether a call gives as many rows as values select, also where torch took their number from a later use, as in
    ``h[mask].view(x.shape[0], 3, 8)``: then no symbol tells."""
    if torch.Tag.dynamic_output_shape not in getattr(node.target, "tags", ()):
        return False
    if node.target in _SIZED_BY:  # it is sized by a number, where that is given
        position, name, unset = _SIZED_BY[node.target]
        return (node.args[position] if len(node.args) > position else node.kwargs.get(name, unset)) == unset
    operands = tensor_operands(node)
    return node.target is not aten.index.Tensor or any(x.meta["val"].dtype in MASKS for x in operands[1:])


MASKS = (torch.bool, torch.uint8)
_SIZED_BY = {aten.one_hot.default: (1, "num_classes", -1), aten.repeat_interleave.Tensor: (1, "output_size", None)}


def operand_shapes(node: fx.Node) -> list[Shape]:
    """The global shapes of the node's tensor operands."""
    return [shape_of(operand) for operand in tensor_operands(node)]


def map_tensor_operands(node: fx.Node, replace: Callable[[int, fx.Node], Any]) -> tuple[Any, Any]:
    """The node's args and kwargs with each tensor operand (by position) replaced."""
    count = 0

    def visit(arg: fx.Node) -> Any:
        nonlocal count
        if not is_tensor(arg):
            return arg
        count += 1
        return replace(count - 1, arg)

    args, kwargs = fx.map_arg((node.args, node.kwargs), visit)
    return args, kwargs


@cache
def _parameters(target: Any) -> tuple[tuple[str, Any], ...]:
    if isinstance(target, torch._ops.OpOverload):
        return tuple((a.name, a.default_value) for a in target._schema.arguments)
    return tuple(
        (p.name, None if p.default is p.empty else p.default) for p in inspect.signature(target).parameters.values()
    )


def arguments(node: fx.Node) -> dict[str, Any]:
    """The call's arguments by the names of its schema, defaults filled in."""
    names = _parameters(node.target)
    bound = dict(names)
    bound.update(zip((name for name, _ in names), node.args, strict=False))
    bound.update(node.kwargs)
    return bound


def dims_of(node: fx.Node) -> list[int]:
    """The dims that a call names in ``dim`` or ``dims``, counted from the front; every dim where it names none."""
    values, rank = arguments(node), len(operand_shapes(node)[0])
    named = values["dims"] if "dims" in values else values.get("dim")
    dims = [named] if isinstance(named, int) else named or range(rank)
    return [dim % rank for dim in dims if rank]


def with_argument(node_args: tuple[Any, ...], kwargs: dict[str, Any], node: fx.Node, name: str, value: Any) -> Any:
    """``(args, kwargs)`` of the call with one argument replaced, whether it was given by position or by name."""
    position = [parameter for parameter, _ in _parameters(node.target)].index(name)
    if position < len(node_args):
        return (*node_args[:position], value, *node_args[position + 1 :]), kwargs
    return node_args, {**kwargs, name: value}


def casts_of(node: fx.Node) -> list[fx.Node]:
    """A value, what it is a cast or a copy of, and so on."""
    chain = [node]
    while chain[-1].target in CASTS:
        chain.append(chain[-1].args[0])  # type: ignore[arg-type]
    return chain


def ancestors(
    graph: fx.Graph, results: Collection[fx.Node], through: Callable[[fx.Node], bool] = lambda node: True
) -> list[fx.Node]:
    """What some results are made of, and themselves, in the order of the graph.

    Args:
        through: whether what a node is made of counts, too.
    """
    needed = set(results)
    for node in reversed(graph.nodes):
        if node in needed and through(node):
            needed.update(node.all_input_nodes)
    return [node for node in graph.nodes if node in needed]


def followers(graph: fx.Graph, sources: Collection[fx.Node]) -> set[fx.Node]:
    """What is made of some nodes, and themselves."""
    reached = set(sources)
    for node in graph.nodes:
        if not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
    return reached
