"""Operators that draw: each rank makes the numbers of its part, by their global positions."""

from __future__ import annotations

from torch import fx

from autoparallel.rules.calls import arguments, operand_shapes, shape_of
from autoparallel.rules.core import Rule, dim_names, dimwise
from autoparallel.rules.localize import LocalCall, divide_sizes


def localize_draw(call: LocalCall) -> None:
    """Tells an operator that draws which axes shard its result."""
    groups = call.dim_groups()
    before = arguments(call.node)["shards"].split(";") if arguments(call.node)["shards"] else [""] * len(groups)
    both = [",".join(filter(None, pair)) for pair in zip(before, groups, strict=True)]  # microbatches are outermost
    call.set_argument("shards", ";".join(both))


_divide_sizes = divide_sizes("size")


def _localize_sized(call: LocalCall) -> None:
    _divide_sizes(call)
    localize_draw(call)


def sized(node: fx.Node) -> Rule:
    """The rule of a draw that is given the sizes of its result."""
    return dimwise(node, [], dim_names(len(shape_of(node))), localize=_localize_sized)


def classes(node: fx.Node) -> Rule:
    """The rule of a draw of classes by their weights, for each row of them."""
    rows = ["n"] * (len(operand_shapes(node)[0]) - 1)
    return dimwise(node, [[*rows, "xc"]], [*rows, "xk"], localize=localize_draw)
