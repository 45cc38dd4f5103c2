"""Layers that are one operator: recurrent ones, samples of a grid, weights with a norm of their own."""

from __future__ import annotations

from torch import fx

from autoparallel.rules.calls import arguments, operand_shapes, shape_of
from autoparallel.rules.core import Rule, dim_names, dimwise
from autoparallel.rules.localize import divide_sizes


def recurrent(node: fx.Node) -> Rule:
    """The rule of a recurrent layer: every sample goes through it alone."""
    values = arguments(node)
    states, weights = len(values["states"]), operand_shapes(node)[1 + len(values["states"]) :]
    steps = ["n", "xs", "xi"] if values["batch_first"] else ["xs", "n", "xi"]
    return dimwise(
        node,
        [
            steps,
            *([f"xl{k}", "n", f"xw{k}"] for k in range(states)),
            *([f"x{k}_{d}" for d in range(len(shape))] for k, shape in enumerate(weights)),
        ],
        ["n", "xo"],
    )


def grid_sample(node: fx.Node) -> Rule:
    """The rule of values at places of a grid, ``[n, channels, ...]`` at ``[n, ..., coordinates]``, each alone."""
    spatial = len(shape_of(node)) - 2
    inside, places = [f"xi{k}" for k in range(spatial)], [f"p{k}" for k in range(spatial)]
    return dimwise(node, [["n", "c", *inside], ["n", *places, "xc"]], ["n", "c", *places], linear=[(0,)])


def affine_grid(node: fx.Node) -> Rule:
    """The rule of grids of places, ``[n, ..., coordinates]``, from a matrix for each sample."""
    places = [f"xo{k}" for k in range(len(shape_of(node)) - 1)]
    return dimwise(node, [["n", "xr", "xc"]], ["n", *places], linear=[(0,)], localize=divide_sizes("size"))


def weight_norm(node: fx.Node) -> Rule | None:
    """The rule of a weight whose direction and length are parameters: lengths are those of slices along one dim."""
    direction, length = operand_shapes(node)
    dim = arguments(node)["dim"]
    if len(length) != len(direction) or dim < 0:
        return None  # one length for the whole weight
    rank = len(direction)
    names = dim_names(rank, {*range(rank)} - {dim})
    return dimwise(node, [names, [names[d] if d == dim else "1" for d in range(rank)]], names, linear=[(1,)])


def stft(node: fx.Node) -> Rule:
    """The rule of the Fourier transforms of windows of signals, ``[t]`` or ``[n, t]``."""
    signal, *window = operand_shapes(node)
    rows = dim_names(len(signal) - 1)
    inner = [f"xo{k}" for k in range(len(shape_of(node)) - len(rows))]
    return dimwise(node, [[*rows, "xt"], *(["xw"] for _ in window)], [*rows, *inner], linear=[(0,)])
