"""Which calls of a program are compiled together.

[Note: regions] A body runs as it does in plain autograd: gathers, regions that run again, losses in chunks and what
has Python of its own for the backward stay calls of the body.  What stands between them is cut where layers begin and
end, and each piece of a layer becomes one call.  Pieces that are alike share what they were compiled to, so compiling
takes as long for twelve layers as for four.  Collectives of activations stay inside of their region.  What stands
between layers (embeddings, the head, the loss) runs in plain autograd: to compile it takes half as long again as the
layer, for a part of the step that does not grow with the model.  A graph without layers is compiled whole.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from autoparallel import _torch
from autoparallel._torch.numbers import OPEN
from autoparallel.graph.layers import layer_of
from autoparallel.operators import control_flow, flex, opaque, selective_checkpoint
from autoparallel.passes import split_weight_gradients
from autoparallel.rules.calls import is_tensor

aten = torch.ops.aten

_PYTHON = {module.__name__ for module in (control_flow, flex, opaque, selective_checkpoint, split_weight_gradients)}
"""Where the operators stand that look at values, have Python in their backward, or compile what they run."""

_FUNCTIONS = frozenset({*_torch.numbers.FUNCTIONS.values(), operator.mod, operator.pow})
"""What no backend computes where it makes a float."""


def find_regions(graph: fx.Graph) -> list[list[fx.Node]]:
    """The calls of each region; reorders the graph so that they stand together.

    A layer's gathers come before its first call: where they stand depends on which parameters share a collective, and
    layers would not be alike.  A region computes the sizes that it needs itself, from tensors that it reads.
    """
    regions: list[list[fx.Node]] = []
    _mark_shaped_by_functions(graph)
    for group in _groups(graph):
        end = group[-1].next
        for region, nodes in _in_order(group):
            for node in nodes:
                end.prepend(node)
            if region and any(_computes(node) for node in nodes):
                regions.append(nodes)
    inside = {node: number for number, nodes in enumerate(regions) for node in nodes}
    _copy_sizes(graph, regions, inside)
    return regions


def worth_compiling(regions: list[list[fx.Node]]) -> list[list[fx.Node]]:
    """The regions of layers; all where there are none."""
    return [nodes for nodes in regions if any(map(layer_of, nodes))] or regions


def _groups(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """All calls, cut where layers begin and end, and between layers so that each piece has one gather."""
    calls = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    layers = [layer_of(node) for node in calls]
    last = {layer: i for i, layer in enumerate(layers)}
    group: list[fx.Node] = []
    i = 0
    while i < len(calls):
        layer, after = layers[i], last[layers[i]] + 1
        if layer is not None and set(layers[i:after]) <= {layer, None}:
            yield from [group] if group else []
            yield calls[i:after]
            group, i = [], after
            continue
        if calls[i].op == "call_module" and _is_gather(calls[i]) and any(map(_is_gather, group)):
            yield group
            group = []
        group.append(calls[i])
        i += 1
    yield from [group] if group else []


def _in_order(group: Sequence[fx.Node]) -> Iterator[tuple[bool, list[fx.Node]]]:
    """The calls of a group, those of one region together; and whether they are a region.

    The gathers, then by turns what does not wait for a call that is not compiled, and such calls.
    """
    gathers = [node for node in group if _is_gather(node)]
    yield False, gathers
    depths = dict.fromkeys(gathers, 0)
    for node in group:
        if node not in depths:
            waits = not _is_plain(node)
            read = [x for x in node.all_input_nodes if x in depths]
            depths[node] = max((depths[x] + (waits and _is_plain(x) and not _is_gather(x)) for x in read), default=0)
    for depth in range(max(depths.values(), default=0) + 1):
        nodes = [node for node in group if depths[node] == depth and not _is_gather(node)]
        yield True, [node for node in nodes if not _is_plain(node)]
        yield False, [node for node in nodes if _is_plain(node)]


def _is_gather(node: fx.Node) -> bool:
    return "bucket" in node.meta


def _is_plain(node: fx.Node) -> bool:
    """Whether a call is not compiled."""
    if node.op != "call_function":
        return True
    if node.target is operator.getitem:
        return _is_gather(node) or _is_plain(node.args[0])  # type: ignore[arg-type]
    return _BY_FUNCTIONS in node.meta or getattr(node.target, "__module__", "") in _PYTHON


_BY_FUNCTIONS = "shaped by functions"
"""The mark of a call that is not compiled, as no backend computes the size that it makes."""


def _mark_shaped_by_functions(graph: fx.Graph) -> None:
    """Marks the calls that make a tensor of a size that is made of functions of numbers, as of
    ``x[:, : math.ceil(math.sqrt(x.shape[1]))]``."""
    numbers = _made_of_functions([node for node in graph.nodes if _is_size(node)])
    expressions = [size.meta["val"].node.expr for size, dtype in numbers.items() if dtype == torch.float64]
    for node in graph.nodes if expressions else ():
        if not numbers.keys().isdisjoint(node.all_input_nodes) and is_tensor(node):
            sizes = [size for size in node.meta["val"].shape if not isinstance(size, int)]
            if any(size.node.expr.has(*expressions) for size in sizes):
                node.meta[_BY_FUNCTIONS] = True


def _is_size(node: fx.Node) -> bool:
    """Whether a call gives a number."""
    return node.op == "call_function" and isinstance(node.meta.get("val"), (int, float, *OPEN))


def _computes(node: fx.Node) -> bool:
    """Whether a call makes memory of its own."""
    if _is_size(node) or not isinstance(node.target, torch._ops.OpOverload):
        return getattr(node.target, "__module__", "").startswith("autoparallel")
    return not _torch.export.gives_view(node.target)


def _made_of_functions(sizes: Sequence[fx.Node]) -> dict[fx.Node, torch.dtype]:
    """The numbers that are results of functions, or made of such, and the dtypes of tensors that hold them."""
    dtypes: dict[fx.Node, torch.dtype] = {}
    for size in sizes:
        value = size.meta.get("val")
        is_result = size.target in _FUNCTIONS and isinstance(value, torch.SymFloat)
        if is_result or not dtypes.keys().isdisjoint(size.all_input_nodes):
            if isinstance(value, torch.SymFloat):
                dtypes[size] = torch.float64
            elif isinstance(value, torch.SymInt):
                dtypes[size] = torch.int64
    return dtypes


def _copy_sizes(graph: fx.Graph, regions: list[list[fx.Node]], inside: dict[fx.Node, int]) -> None:
    """Gives each region, and each call outside of them, copies of the sizes that it reads; functions of numbers, which
    no backend computes, are called outside of regions, with all that is made of them: Dynamo fixes what is floored."""
    copies: dict[tuple[object, fx.Node], fx.Node] = {}
    sizes = [node for node in graph.nodes if _is_size(node)]
    of_functions = _made_of_functions(sizes)

    def copy(size: fx.Node, reader: fx.Node) -> fx.Node:
        number = inside.get(reader)
        key = reader if number is None else number, size
        if key not in copies and number is not None and size in of_functions:
            tensor = _insert_call(regions[number][0], aten.scalar_tensor.default, size, dtype=of_functions[size])
            tensor.replace_input_with(size, copy(size, tensor))
            copies[key] = _insert_call(reader, aten.item.default, tensor)
            copies[key].meta = dict(size.meta)
            regions[number].insert(regions[number].index(reader), copies[key])
        elif key not in copies:
            read = {x: copy(x, reader) for x in size.all_input_nodes if _is_size(x)}
            with graph.inserting_before(reader):
                copies[key] = graph.node_copy(size, lambda x: read.get(x, x))
            if number is not None:
                regions[number].insert(regions[number].index(reader), copies[key])
        return copies[key]

    originals = set(sizes)
    for node in list(graph.nodes):
        if node not in originals:
            for x in [x for x in node.all_input_nodes if x in originals]:
                node.replace_input_with(x, copy(x, node))
    for size in reversed(sizes):
        if size in inside:
            regions[inside[size]].remove(size)
        graph.erase_node(size)


def _insert_call(node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A new call in front of a node, whose result is a number, or a tensor of one."""
    with node.graph.inserting_before(node):
        call = node.graph.call_function(target, args, kwargs)
    call.meta["val"] = torch.empty((), dtype=torch.float64)
    return call
