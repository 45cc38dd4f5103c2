"""Leaves out layers that are copies of the one before them, for a shorter model that tells about the whole one.

Before (nodes of the layers "layers.0" to "layers.3"; "layers.1" to "layers.3" are alike, each reads the one before):
    linear = aten.linear(x, w0);  linear_1 = aten.linear(linear, w1)
    linear_2 = aten.linear(linear_1, w2);  linear_3 = aten.linear(linear_2, w3);  sum_1 = aten.sum(linear_3)
After leaving out "layers.2" and "layers.3":
    linear = aten.linear(x, w0);  linear_1 = aten.linear(linear, w1)
    sum_1 = aten.sum(linear_1)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoparallel.passes.name_nodes import layer_of

Decided = Callable[[fx.Node], Hashable]
"""What is decided about a node, apart from what the graph itself says."""


def stretches_of_layers(graph: fx.Graph) -> dict[str, list[fx.Node]]:
    """The calls of each layer, in the order of the graph, where they stand together."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    places: dict[str, list[int]] = {}
    for i, node in enumerate(calls):
        layer = layer_of(node)
        if layer is not None:
            places.setdefault(layer, []).append(i)
    return {
        layer: [calls[i] for i in place] for layer, place in places.items() if len(place) == place[-1] - place[0] + 1
    }


def find_alike(graph: fx.Graph, decided: Decided) -> list[list[str]]:
    """The runs of two and more layers in a row that are alike: the same calls on the same shapes, about which the same
    is decided, that read the same places of the layer before; only the next layer reads them, but for the last one."""
    stretches = stretches_of_layers(graph)
    calls = [node for node in graph.nodes if node.op == "call_function"]
    number = {node: i for i, node in enumerate(calls)}
    runs: list[list[str]] = []
    kinds: dict[int, Hashable] = {}
    signature: Hashable = None
    before: list[fx.Node] = []
    for layer, stretch in stretches.items():
        follows = bool(before) and number[before[-1]] + 1 == number[stretch[0]]
        mine = _signature(stretch, before if follows else [], decided, kinds)
        if follows and mine == signature and _read_within(before, stretch):
            runs[-1].append(layer)
        else:
            runs.append([layer])
        signature, before = mine, stretch
    return [run for run in runs if len(run) > 1]


def leave_out_layers(graph: fx.Graph, runs: Sequence[Sequence[str]], kept: Sequence[int]) -> fx.Graph:
    """A copy of a graph with so many layers of each run, the first ones, and without what only the others read."""
    stretches = stretches_of_layers(graph)
    left_out: set[fx.Node] = set()
    instead: dict[fx.Node, fx.Node] = {}  # of a run's last layer, which the rest of the graph reads
    for run, count in zip(runs, kept, strict=True):
        left_out.update(node for layer in run[count:] for node in stretches[layer])
        instead.update(zip(stretches[run[-1]], stretches[run[count - 1]], strict=True))
    read = {x for node in left_out for x in node.all_input_nodes if x.op == "placeholder"}
    left_out |= {x for x in read if left_out.issuperset(x.users)}
    short = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node not in left_out:
            copies[node] = short.node_copy(node, lambda x: copies[instead.get(x, x) if x in left_out else x])
    return short


def signature(graph: fx.Graph, decided: Decided) -> Hashable:
    """What graphs have in common that differ in names alone."""
    return _signature([node for node in graph.nodes if node.op == "call_function"], [], decided, {})


def _signature(
    stretch: list[fx.Node], before: list[fx.Node], decided: Decided, kinds: dict[int, Hashable]
) -> Hashable:
    """What layers that are alike have in common."""
    inside = set(stretch)
    places: dict[fx.Node, Hashable] = {node: ("before", i) for i, node in enumerate(before)}
    lines: list[Hashable] = []

    def place(x: fx.Node) -> str:
        if x not in places:
            own = x.op == "placeholder" and inside.issuperset(x.users)
            what = ("own", len(places), _kind(x, kinds)) if own else ("same", x.name)
            places[x] = (*what, decided(x))
        reads.append(places[x])
        return "_"

    for i, node in enumerate(stretch):
        reads: list[Hashable] = []
        arguments = repr(fx.map_arg((node.args, node.kwargs), place))
        lines.append((node.target, arguments, tuple(reads), _kind(node, kinds), decided(node)))
        places[node] = ("here", i)
    return tuple(lines)


def _kind(node: fx.Node, kinds: dict[int, Hashable]) -> Hashable:
    value = node.meta.get("val")
    if id(value) not in kinds:  # copies of a layer share their values
        kinds[id(value)] = tuple(
            (tuple(map(str, v.shape)), v.dtype) if isinstance(v, torch.Tensor) else str(v)
            for v in pytree.tree_leaves(value)
        )
    return kinds[id(value)], *(node.meta.get(flag) for flag in ("differentiable", "backward"))


def _read_within(stretch: Collection[fx.Node], following: Collection[fx.Node]) -> bool:
    readers = {*stretch, *following}
    return all(readers.issuperset(node.users) for node in stretch)


__all__ = ["find_alike", "leave_out_layers", "signature", "stretches_of_layers"]
