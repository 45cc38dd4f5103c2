"""Operators that work on each element alone, broadcasting as torch does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autoparallel.rules.calls import arguments, operand_shapes, tensor_operands
from autoparallel.rules.core import Rule, dim_names, dimwise, make_rule


def is_pointwise(target: Any) -> bool:
    """Whether torch's own tag says so of one of its operators, which writes nothing and draws nothing.

    What draws has a part to play in the numbers of other ranks, and what writes in place is not in a captured graph.
    Tags of operators from elsewhere are left aside: their backward is theirs, so their rule is, too.
    """
    return (
        isinstance(target, torch._ops.OpOverload)
        and target.namespace == "aten"
        and torch.Tag.pointwise in target.tags
        and torch.Tag.nondeterministic_seeded not in target.tags
        and not target._schema.is_mutable
    )


def pointwise(node: fx.Node, linear: Sequence[Sequence[int]] = ()) -> Rule:
    """The rule of a broadcasting operator: every dim of the result is a factor.

    Args:
        linear: sets of operands; one that has an operand which is a number in this call is left out.
    """
    shapes = operand_shapes(node)
    notation = f"{', '.join(['...'] * len(shapes))} -> ..."
    return make_rule(node, notation, linear=[group for group in linear if max(group) < len(shapes)])


def quotient(node: fx.Node) -> Rule:
    """The rule of a division, which is linear in what is divided."""
    first = isinstance(node.args[0], fx.Node) and tensor_operands(node)[0] is node.args[0]
    return pointwise(node, [(0,)] if first else [])


def masked_fill(node: fx.Node) -> Rule:
    """The rule of a mask that is filled with a number."""
    return pointwise(node, [(0,)] if arguments(node)["value"] == 0 else [])


def prelu(node: fx.Node) -> Rule:
    """The rule of a leaky ReLU with one slope for all channels, or one for each."""
    shape, slopes = operand_shapes(node)
    dims = dim_names(len(shape))
    channel = dims[min(1, len(dims) - 1)] if dims else "1"
    return dimwise(node, [dims, [channel] if slopes else []], dims)
