"""What stands for operators of torch's that are composed of others and that no rule knows.

``torch.concat`` is ``torch.cat`` by another name, ``Tensor.tile`` a view and a ``repeat``: torch differentiates them
through what they are composed of. A trace keeps them as one call all the same, which could only run whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.export import default_decompositions

from autoparallel import _torch
from autoparallel.rules import has_rule

aten = torch.ops.aten

ONE_CALL = frozenset({
    # Composed of a step for every position of a sequence, which torch runs in one kernel.
    aten.lstm.input, aten.lstm.data, aten.gru.input, aten.gru.data, aten.rnn_tanh.input, aten.rnn_tanh.data,
    aten.rnn_relu.input, aten.rnn_relu.data,
    # Composed of one that has no gradient where nobody asks for it, as in a trace.
    aten.embedding_bag.default, aten.embedding_bag.padding_idx,
    # Asks for a size, as every trace with an open batch does.
    aten.sym_size.int,
})  # fmt: skip
"""What stays one call."""

PRODUCTS = frozenset({
    aten.linalg_matmul.default, aten.linalg_multi_dot.default, aten.linalg_vecdot.default, aten.linalg_norm.default,
    aten.linalg_norm.ord_str, aten.linalg_matrix_norm.default, aten.linalg_matrix_norm.str_ord,
})  # fmt: skip
"""The linear algebra that is composed of products and norms. What factorizes looks at what it has found, to raise an
error, which no graph can have as an operator."""


def compositions(module: fx.GraphModule) -> dict[Any, Callable[..., Any]]:
    """How torch composes the operators without a rule, unless a module, and those that it calls, have none; and how a
    number that is copied becomes a tensor."""
    graphs = [each.graph for each in module.modules() if isinstance(each, fx.GraphModule)]
    of_numbers = {aten._to_copy.default: _torch.numbers.tensor_of}
    if not any(is_unknown_composite(node.target) for graph in graphs for node in graph.nodes):
        return of_numbers
    return {operator: how for operator, how in _compositions().items() if not has_rule(operator)} | of_numbers


def is_unknown_composite(target: Any) -> bool:
    """Whether a call's target is composed of operators that rules know better."""
    return isinstance(target, torch._ops.OpOverload) and _is_taken_apart(target) and not has_rule(target)


@functools.cache
def _compositions() -> dict[Any, Callable[..., Any]]:
    """How torch composes each of its operators that may be taken apart."""
    return {operator: how for operator, how in default_decompositions().items() if _is_taken_apart(operator)}


def _is_taken_apart(operator: torch._ops.OpOverload) -> bool:
    return (
        operator.namespace == "aten"
        and operator not in ONE_CALL
        and torch.Tag.maybe_aliasing_or_mutating not in operator.tags  # torch takes these apart in any case
        and (operator in PRODUCTS or not operator.name().startswith("aten::linalg_"))
        and _torch.export.is_composite(operator)
    )
