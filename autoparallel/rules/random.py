"""Operators that draw: each rank makes the numbers of its part, by their global positions."""

from __future__ import annotations

from torch import fx

from autoparallel.operators import draws
from autoparallel.rules.calls import arguments, shape_of, tensor_operands
from autoparallel.rules.core import Rule, make_rule, rule
from autoparallel.rules.localize import LocalCall, divide_sizes

_divide = divide_sizes("size")


def _localize(call: LocalCall) -> None:
    groups = call.dim_groups()
    before = arguments(call.node)["shards"].split(";") if arguments(call.node)["shards"] else [""] * len(groups)
    both = [",".join(filter(None, pair)) for pair in zip(before, groups, strict=True)]  # microbatches are outermost
    call.set_argument("shards", ";".join(both))


def _localize_sizes(call: LocalCall) -> None:
    _divide(call)
    _localize(call)


@rule(draws.dropout)
def _dropout(node: fx.Node) -> Rule:
    shape = shape_of(node)
    return make_rule("... -> ...", [shape], shape, linear=[(0,)], localize=_localize)


@rule(draws.draw_poisson, draws.draw_gamma)
def _sampled(node: fx.Node) -> Rule:
    shape = shape_of(node)
    return make_rule("... -> ...", [shape], shape, localize=_localize)


@rule(draws.draw, draws.draw_integers)
def _made(node: fx.Node) -> Rule:
    shape = shape_of(node)
    sizes = {f"d{dim}": size for dim, size in enumerate(shape)}
    result = tuple(() if isinstance(size, int) and size == 1 else (name,) for name, size in sizes.items())
    return Rule((), result, sizes, localize=_localize_sizes)


@rule(draws.draw_classes)
def _classes(node: fx.Node) -> Rule:
    weights, chosen = shape_of(tensor_operands(node)[0]), shape_of(node)
    rows = "n " if len(weights) == 2 else ""
    return make_rule(f"{rows}c -> {rows}k", [weights], chosen, blocked=["c", "k"], localize=_localize)
