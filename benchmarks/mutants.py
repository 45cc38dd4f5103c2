"""The faults that ``benchmarks.mutations`` puts into programs, one at a time."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoparallel import operators
from autoparallel.comm.collectives import redistribute
from autoparallel.comm.groups import group_name
from autoparallel.passes.hoist_parameter_chains import ParameterChain
from autoparallel.passes.insert_collectives import Redistribution
from autoparallel.passes.specification import Specification
from autoparallel.placements import (
    ACTIONS,
    Invariant,
    Layout,
    Partial,
    Placement,
    Replicate,
    Shard,
    action,
    format_layout,
)
from autoparallel.placements.redistribution import Step
from autoparallel.rules.calls import arguments, is_tensor, tensor_operands, with_argument

aten = torch.ops.aten
Change = Callable[[fx.Node], None]
Found = Iterator[tuple[str, str, Callable[[ParameterChain], ParameterChain]]]
"""Kinds of faults of a parameter's way, in words, and what puts them into it."""

_SUMS_AND_MEANS: dict[Any, Any] = {
    aten.sum.default: aten.mean.default,
    aten.mean.default: aten.sum.default,
    aten.sum.dim_IntList: aten.mean.dim,
    aten.mean.dim: aten.sum.dim_IntList,
}


@dataclass(frozen=True)
class Mutant:
    """One fault of one program.

    Attributes:
        kind: what kind of fault it is.
        key: the node, or the parameter.
        detail: the fault in words.
        on_graph, on_chain: puts it into the program's graph, or into the way of the parameter; one is None.
        equivalent: why nothing that runs is changed; empty where something is.
    """

    kind: str
    key: str
    detail: str
    on_graph: Callable[[fx.Graph], None] | None = None
    on_chain: Callable[[ParameterChain], ParameterChain] | None = None
    equivalent: str = ""


def graph_mutants(graph: fx.Graph, whole: fx.Graph, asked: Specification) -> Iterator[Mutant]:
    """The mutants of a program's graph, whose parameters are gathered in it.

    Args:
        whole: the captured graph it was made of.
        asked: what the program was to be.
    """
    origins = {n.meta["key"]: n for n in whole.nodes if n.op == "call_function" and "key" in n.meta}
    for index, node in enumerate(graph.nodes):
        found: list[tuple[str, str, Change, str]] = []
        if node.op in ("placeholder", "call_function") and is_tensor(node) and "placements" in node.meta:
            found += [("layout", *rest) for rest in _layouts(node)]
        if node.op == "call_function":
            if node.target is redistribute:
                found += _collectives(node, asked)
            else:
                found += _reductions(node)
                found += [("argument", *rest) for rest in _arguments(node, origins, asked)]
        for kind, detail, change, equivalent in found:
            key = str(node.meta.get("key", node.name))
            yield Mutant(kind, key, detail, _at(index, change), equivalent=equivalent)


def _at(index: int, change: Change) -> Callable[[fx.Graph], None]:
    return lambda graph: change(list(graph.nodes)[index])


def _drop(node: fx.Node) -> None:
    """Puts a call's first operand in its place."""
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    node.graph.erase_node(node)


def _layouts(node: fx.Node) -> Iterator[tuple[str, Change, str]]:
    layout: Layout = node.meta["placements"]
    for axis, placement in enumerate(layout):
        for moved in _others(placement, node.meta["val"].ndim)[::2]:  # every other one: they are many
            changed = (*layout[:axis], moved, *layout[axis + 1 :])
            detail = f"said to lie as {format_layout(changed)}, not as {format_layout(layout)}"

            def change(n: fx.Node, changed: Layout = changed) -> None:
                n.meta["placements"] = changed

            yield detail, change, ""


def _collectives(node: fx.Node, asked: Specification) -> Iterator[tuple[str, str, Change, str]]:
    step: Step = node.meta["redistribution"].step
    silent = not node.meta["backward"] and action(step.src, step.dst) == "nothing"
    alone = "the axis has one rank" if all(asked.axis_sizes[axis] == 1 for axis in step.axes) else ""
    equivalent = alone or ("moves nothing, and no gradient passes" if silent else "")
    yield "collective dropped", f"{step.src}->{step.dst} over {node.args[3]} dropped", _drop, equivalent
    dims = node.meta["val"].ndim
    steps = [replace(step, src=p) for p in _others(step.src, dims)]
    steps += [replace(step, dst=p) for p in _others(step.dst, dims)]
    for other in steps:
        if (other.src.kind, other.dst.kind) in ACTIONS and other.src != other.dst:
            moves = {action(s.src, s.dst) for s in (step, other)} == {"nothing"}
            same = alone or ("moves nothing either, and no gradient passes" if moves and silent else "")
            yield from _swapped("collective swapped", node, other, str(node.args[3]), same)
    for axes in [(i,) for i in range(len(asked.axes))] + [tuple(range(len(asked.axes)))]:
        if axes != step.axes:
            group = group_name(asked.prefix, asked.names, axes)
            yield from _swapped("collective over another axis", node, replace(step, axes=axes), group, equivalent)


def _swapped(kind: str, node: fx.Node, step: Step, group: str, same: str) -> Iterator[tuple[str, str, Change, str]]:
    """A redistribution that does another step; also one whose layout says so."""

    def change(n: fx.Node) -> None:
        n.args = (n.args[0], str(step.src), str(step.dst), group)

    def consistently(n: fx.Node) -> None:
        change(n)
        done: Redistribution = n.meta["redistribution"]
        n.meta["redistribution"] = Redistribution(step, done.before)
        n.meta["placements"] = step.apply(done.before)

    detail = f"{node.args[1]}->{node.args[2]} over {node.args[3]} as {step.src}->{step.dst} over {group}"
    yield kind, detail, change, same
    yield f"{kind}, and its layout", detail, consistently, same


def _reductions(node: fx.Node) -> Iterator[tuple[str, str, Change, str]]:
    """Sums for means, and what else is lost between summands and a loss; detaches."""
    target = node.target
    if target in _SUMS_AND_MEANS:
        single = node.args[0].meta["val"].numel() == node.meta["val"].numel()  # type: ignore[union-attr]

        def swap(n: fx.Node) -> None:
            n.target = _SUMS_AND_MEANS[n.target]

        kind = "mean for sum" if "sum" in str(target) else "sum for mean"
        yield kind, f"{target} swapped", swap, "of one element" if single else ""
    elif isinstance(target, torch._ops.OpOverload) and any(a.name == "reduction" for a in target._schema.arguments):
        reduction = arguments(node)["reduction"]
        if reduction in (1, 2):
            kind = "sum for mean" if reduction == 1 else "mean for sum"
            yield kind, "of a loss", lambda n: _set(n, "reduction", 3 - reduction), ""
    elif "scales" in node.meta:
        yield "sum for mean", "number of shards dropped", _drop, ""

        def double(n: fx.Node) -> None:
            n.args = (n.args[0], 2 * n.args[1])  # type: ignore[operator]

        yield "sum for mean", "number of shards doubled", double, ""
    elif target is operators.weighted_mean:
        yield "weight of the loss dropped", "the divisor", _drop, ""
    elif target in (aten.mul.Tensor, aten.div.Tensor) and is_tensor(node) and not node.meta["val"].ndim:
        if isinstance(node.args[0], fx.Node):
            yield "weight of the loss dropped", f"{node.args[1]}", _drop, ""
    elif target is aten.detach.default:
        source: Any = node.args[0]
        flows = source.meta["differentiable"]
        yield "detach dropped", "dropped", _drop, "" if flows else "nothing to be detached from"


def _set(node: fx.Node, name: str, value: Any) -> None:
    node.args, node.kwargs = with_argument(node.args, dict(node.kwargs), node, name, value)


def _arguments(
    node: fx.Node, origins: Mapping[str, fx.Node], asked: Specification
) -> Iterator[tuple[str, Change, str]]:
    """What a rank's call says otherwise than the global one: each argument as it was, or of other axes."""
    if node.target is operator.floordiv or node.target is operator.mul and not is_tensor(node):
        yield f"{node.target.__name__} by {node.args[1]} dropped", _drop, ""
        return
    origin = origins.get(str(node.meta.get("key", "")))
    if origin is None or "scales" in node.meta:
        return
    if origin.target is not node.target:
        yield "the global call", lambda n: _globalise(n, origin), ""
    names = [group_name(asked.prefix, [name], (0,)) for name, _ in asked.axes]
    local = pytree.tree_flatten((node.args, node.kwargs))[0]
    whole = pytree.tree_flatten((origin.args, origin.kwargs))[0]
    comparable = origin.target is node.target and len(whole) == len(local)
    for i, value in enumerate(local):
        if isinstance(value, fx.Node):
            continue
        others: list[Any] = []
        if comparable and not isinstance(whole[i], fx.Node) and whole[i] != value:
            others.append(whole[i])
        if isinstance(value, str):
            others += [value.replace(a, b) for a in names for b in names if a in value and a != b]
        for other in dict.fromkeys(others):

            def change(n: fx.Node, i: int = i, other: Any = other) -> None:
                leaves, tree = pytree.tree_flatten((n.args, n.kwargs))
                leaves[i] = other
                n.args, n.kwargs = pytree.tree_unflatten(leaves, tree)

            yield f"argument {value!r} as {other!r}", change, ""


def _globalise(node: fx.Node, origin: fx.Node) -> None:
    """Makes the global call of the local operands."""
    operands = iter(tensor_operands(node))
    node.target = origin.target
    node.args, node.kwargs = fx.map_arg((origin.args, origin.kwargs), lambda x: next(operands))


def chain_mutants(chains: list[ParameterChain], asked: Specification) -> Iterator[Mutant]:
    """The mutants of the ways of parameters to their uses and of their gradients back."""
    for chain in chains:
        for kind, detail, change in (*_gathers(chain), *(_syncs(chain, asked) if chain.trainable else ())):
            yield Mutant(kind, chain.name, detail, on_chain=change)


def _syncs(chain: ParameterChain, asked: Specification) -> Found:
    kind = "gradient reduction"
    yield f"{kind} dropped", "no gradient comes back", lambda c: replace(c, trainable=False)
    if chain.sync:
        yield f"{kind} moved", "reduced before and after adding up", lambda c: _reduced(c, c.sync, c.sync)
        yield f"{kind} dropped", "the whole of it", lambda c: _reduced(c, c.each, ())
    for i, step in enumerate(chain.sync):
        ends = [p for p in _others(step.dst, len(chain.shape)) if (step.src.kind, p.kind) in ACTIONS]
        others = [replace(step, dst=p) for p in ends]
        others += [replace(step, axes=(axis,)) for axis in range(len(asked.axes)) if (axis,) != step.axes]
        for other in (None, *others):
            sync = (*chain.sync[:i], *([other] if other is not None else []), *chain.sync[i + 1 :])

            def change(c: ParameterChain, sync: tuple[Step, ...] = sync) -> ParameterChain:
                return _reduced(c, c.each, sync)

            yield f"{kind} {'changed' if other is not None else 'dropped'}", f"{step} as {other}", change
    for axis, placement in enumerate(chain.gradient_layout):
        for moved in _others(placement, len(chain.shape)):
            layout = (*chain.gradient_layout[:axis], moved, *chain.gradient_layout[axis + 1 :])
            detail = f"made as {format_layout(layout)}"
            yield f"{kind} moved", detail, lambda c, layout=layout: replace(c, gradient_layout=layout)  # type: ignore[misc]


def _reduced(chain: ParameterChain, each: tuple[Step, ...], sync: tuple[Step, ...]) -> ParameterChain:
    return replace(chain, ways={**chain.ways, chain.when: (each, sync)})


def _gathers(chain: ParameterChain) -> Found:
    for use, path in enumerate(chain.paths):
        for i, step in enumerate(path):
            others: list[Step | None] = [None]
            others += [replace(step, dst=p) for p in _others(step.dst, len(chain.shape)) if p != step.src]
            for other in others:
                if other is None or (other.src.kind, other.dst.kind) in ACTIONS:
                    changed = (*path[:i], *([other] if other is not None else []), *path[i + 1 :])
                    paths = (*chain.paths[:use], changed, *chain.paths[use + 1 :])
                    detail = f"use {use}: {step} as {other}"
                    yield "parameter's way", detail, lambda c, paths=paths: replace(c, paths=paths)  # type: ignore[misc]
        for axis, placement in enumerate(chain.uses[use]):
            for other_use in _others(placement, len(chain.shape)):
                layout = (*chain.uses[use][:axis], other_use, *chain.uses[use][axis + 1 :])
                uses = (*chain.uses[:use], layout, *chain.uses[use + 1 :])
                detail = f"use {use} as {format_layout(layout)}"
                yield "parameter's use", detail, lambda c, uses=uses: replace(c, uses=uses)  # type: ignore[misc]


def _others(placement: Placement, dims: int) -> list[Placement]:
    every = [Invariant, Replicate, Partial, *(Shard(dim) for dim in range(dims))]
    return [p for p in every if p != placement]


__all__ = ["Mutant", "chain_mutants", "graph_mutants"]
