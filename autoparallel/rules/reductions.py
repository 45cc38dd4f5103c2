"""Sums, means and other reductions; softmax, scans and transforms along dims; normalisations."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import fx

from autoparallel.rules.calls import arguments, dims_of, operand_shapes, shape_of
from autoparallel.rules.core import Rule, dim_names, dimwise, make_rule
from autoparallel.rules.localize import divide_counts


def along(node: fx.Node, dims: Collection[int] | None = None, linear: bool = False) -> Rule:
    """The rule of an operator that works along some dims, those that the call names, and leaves the others alone.

    The dims along which it works stay whole; it may change their size.
    """
    rank = len(operand_shapes(node)[0])
    dims = dims_of(node) if dims is None else dims
    return dimwise(node, [dim_names(rank, dims)], dim_names(rank, dims, "xo"), linear=[(0,)] if linear else [])


def reduction(node: fx.Node, kind: str | None = None, linear: bool = True) -> Rule | None:
    """The rule of an operator that reduces some dims, those that the call names, of operands of one shape.

    Args:
        kind: ``"sum"`` or ``"mean"``; None where the dims that are reduced stay whole.
        linear: whether a sum or a mean is linear in its operand.
    """
    shape, *others = operand_shapes(node)
    if any(other != shape for other in others):
        return None  # what an operator that broadcasts reduces cannot be told from the factors
    dims = dims_of(node)
    names = dim_names(len(shape), () if kind else dims)
    keepdim = bool(arguments(node).get("keepdim"))
    return dimwise(
        node,
        [names, *(names for _ in others)],
        ["1" if i in dims else name for i, name in enumerate(names) if keepdim or i not in dims],
        reductions={names[i]: kind for i in dims} if kind else {},
        linear=[(0,)] if kind and linear else [],
    )


def pooled_indices(node: fx.Node) -> Rule:
    """The rule of the places of the largest in windows of the last dims."""
    rank = len(shape_of(node))
    return along(node, range(rank - int(arguments(node)["pool"].split("pool")[1][0]), rank))


def distance(node: fx.Node) -> Rule:
    """The rule of the distances between vectors along the last dim."""
    notation = f"... m, ... m -> ...{' 1' if arguments(node)['keepdim'] else ''}"
    return make_rule(node, notation, blocked=["m"])


def cross(node: fx.Node) -> Rule:
    """The rule of a cross product along a dim of three."""
    rank = len(shape_of(node))
    names = dim_names(rank, {arguments(node)["dim"] % rank})
    return dimwise(node, [names, names], names, linear=[(0,), (1,)])


def fourier(node: fx.Node) -> Rule:
    """The rule of a Fourier transform: linear over real numbers in any dims, some of which change in size."""
    values, rank = arguments(node), len(operand_shapes(node)[0])
    if values["dim"] is None and values.get("s") is not None:  # the last dims, as many as there are sizes
        return along(node, range(rank - len(values["s"]), rank), linear=True)
    return along(node, linear=True)


def histogram(node: fx.Node) -> Rule | None:
    """The rule of the counts of values in bins."""
    values = arguments(node)
    if values["min"] == values["max"]:
        return None  # torch takes the range from all the values there are
    return dimwise(node, [dim_names(len(operand_shapes(node)[0]))], ["x"])


def layer_norm(node: fx.Node) -> Rule:
    """The rule of a normalisation over the last dims, with or without a weight and a bias."""
    values, count = arguments(node), len(operand_shapes(node))
    inner = [f"x{i}" for i in range(len(values["normalized_shape"]))]
    weighted, biased = values["weight"] is not None, values.get("bias") is not None
    return dimwise(
        node,
        [["...", *inner], *[inner] * (count - 1)],
        ["...", *inner],
        linear=[(1,)] if weighted else [],
        additive=[count - 1] if weighted and biased else [],
    )


def _by_sample(node: fx.Node, channel: str, **options: Any) -> Rule:
    """The rule of a normalisation over the places of each sample, ``[n, channel, ...]``, and a part of its channels."""
    shape, *weights = operand_shapes(node)
    sample = ["n", channel, *(f"x{i}" for i in range(len(shape) - 2))]
    return dimwise(node, [sample, *([channel] for _ in weights)], sample, **options)


def group_norm(node: fx.Node) -> Rule:
    """The rule of a normalisation over groups of channels, of which whole ones are cut."""
    channels, groups = operand_shapes(node)[0][1], arguments(node)["num_groups"]
    localize = divide_counts("num_groups", factor="g")
    return _by_sample(node, "(g xc)", sizes={"g": groups, "xc": channels // groups}, localize=localize)


def instance_norm(node: fx.Node) -> Rule | None:
    """The rule of a normalisation of each channel of each sample."""
    values = arguments(node)
    if values["running_mean"] is not None or values["running_var"] is not None:
        return None  # its running statistics are means over the batch
    return _by_sample(node, "c")
