"""What stands for operators of torch's that are composed of others and that no rule knows.

``torch.concat`` is ``torch.cat`` by another name, ``Tensor.tile`` a view and a ``repeat``: torch differentiates them
through what they are composed of. A trace keeps them as one call all the same, which could only run whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx
from torch.export import default_decompositions

from autoparallel import _torch
from autoparallel.rules import has_rule

aten = torch.ops.aten

LOOPS = frozenset({
    aten.lstm.input, aten.lstm.data, aten.gru.input, aten.gru.data, aten.rnn_tanh.input, aten.rnn_tanh.data,
    aten.rnn_relu.input, aten.rnn_relu.data,
})  # fmt: skip
"""Composed of a step for every position of a sequence: they stay one call, which torch runs in one kernel."""


def compositions(nodes: Iterable[fx.Node]) -> dict[Any, Callable[..., Any]]:
    """How torch composes the operators without a rule; nothing when no such operator is among the nodes."""
    if not any(_is_unknown_composite(node.target) for node in nodes):
        return {}
    table = default_decompositions()
    return {operator: table[operator] for operator in table if _is_unknown_composite(operator)}


def _is_unknown_composite(target: Any) -> bool:
    return (
        isinstance(target, torch._ops.OpOverload)
        and target.namespace == "aten"
        and target not in LOOPS
        and _torch.is_composite(target)
        and not has_rule(target)
    )
