"""Moves layers into calls that keep only what they read, and run again in the backward.

Activation checkpointing (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016) by layers: the saved
tensors of a layer become those that enter it, for the price of one more forward, its collectives included.  A layer of
which all but the products runs again keeps what its products, its attention and its collectives make, too, and repeats
none of them (see [Note: kept calls] in ``operators.selective_checkpoint``).  What is gathered is gathered again, as in
Megatron-LM: kept, it would take the memory of its pieces once for each rank.

Before (nodes of the layers "layers.0" and "layers.1", of which the first is recomputed):
    linear = aten.linear(x, w0);  tanh = aten.tanh(linear)
    linear_1 = aten.linear(tanh, w1)
After, with a Region of the first two calls as the submodule "recompute_0":
    recompute_0 = self.recompute_0(x, w0);  getitem = recompute_0[0]
    linear_1 = aten.linear(getitem, w1)
Where all but its products runs again, the Region's calls are (nothing that runs again reads a result made ``once``):
    keeping_linear = Keeping(aten.linear)(x, w0);  tanh = aten.tanh(keeping_linear)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from autoparallel import operators
from autoparallel._torch.export import copy_node, forward_of, gives_view, graph_module
from autoparallel.comm import ranges
from autoparallel.graph.layers import is_checkpointed, layer_of, stretches_of_layers
from autoparallel.operators.experts import grouped_linear_exchanged, grouped_linear_sharded
from autoparallel.operators.selective_checkpoint import Keeping, KeptResults
from autoparallel.placements.placement import COLLECTIVES
from autoparallel.rules import rule_for
from autoparallel.rules.calls import is_tensor

_SAVE_NOTHING = {operator.getitem, torch.ops.aten.add.Tensor, torch.ops.aten.sub.Tensor}
"""Calls of which autograd saves nothing, beside views and redistributions."""


class Region(nn.Module):
    """A stretch of a program that is computed again in its backward.

    Args:
        layer: the module path that it is of.
        program: its calls.

    Attributes:
        around: is entered around each time that it runs again.
        function: runs the program; made of it when it is first run, as a program that is predicted never is.
    """

    def __init__(self, layer: str, program: fx.GraphModule) -> None:
        super().__init__()
        self.layer, self.program = layer, program
        self.function: Callable[..., Any] | None = None
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext

    def forward(self, *arguments: Any) -> Any:
        if self.function is None:  # the second run ends in an exception, when it has made enough
            self.function = forward_of(self.program)
        return self.run(self.function, *arguments)

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls ``function`` and keeps its arguments, from which the backward calls it again."""
        state, results = operators.random_state(), KeptResults()

        @contextmanager
        def first() -> Iterator[None]:
            with ranges.named(lambda: self.layer), results.filled():
                yield

        @contextmanager
        def again() -> Iterator[None]:
            named = ranges.named(lambda: f"{self.layer}, computed again")
            with named, operators.draw_from(state), results.read(), self.around():
                yield

        return checkpoint(
            function,
            *arguments,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (first(), _EachTime(again)),
        )


class _EachTime(AbstractContextManager[None]):
    """A context that is made anew each time that it is entered: a graph that is kept runs a region again and again."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._entered.append(self._make())
        self._entered[-1].__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


def regions_of(module: fx.GraphModule) -> dict[str, Region]:
    """The regions of a program, by the names of their submodules: layers in its order, then losses in chunks."""
    return {name: part for name, part in module.named_children() if isinstance(part, Region)}


def find_layers(graph: fx.Graph) -> list[str]:
    """The layers of a model that can be recomputed: items of a list or a sequence of modules whose calls stand
    together, and which save something that only they read, in the order of the graph."""
    layers = []
    for layer, stretch in stretches_of_layers(graph).items():
        inside = set(stretch)
        if any(node.meta["backward"] and inside.issuperset(node.users) for node in stretch):
            layers.append(layer)
    return layers


def checkpointed_layers(graph: fx.Graph) -> list[str]:
    """The layers that can be recomputed of which the model itself has a part computed again in the backward."""
    marked = {layer_of(node) for node in graph.nodes if is_checkpointed(node) and node.meta["backward"]}
    return [layer for layer in find_layers(graph) if layer in marked] if marked else []


def is_kept(node: fx.Node) -> bool:
    """Whether a call is not repeated where all but the products of its layer runs again: whether it is a product,
    attention, or sends something to other ranks, unless it gathers."""
    if node.op != "call_function" or not is_tensor(node):
        return False
    if "redistribution" in node.meta:
        kind = node.meta["redistribution"].step.action
        return kind in COLLECTIVES and kind != "all_gather"
    if node.target in (grouped_linear_exchanged, grouped_linear_sharded):
        return True
    rule = rule_for(node)
    return rule is not None and bool(rule.flops or rule.exchange)


def kept_calls(nodes: Sequence[fx.Node]) -> dict[fx.Node, bool]:
    """The calls of a layer that are not repeated where all but the products runs again, in their order; and whether the
    others, or what is saved for their backward, read what they make.

    Args:
        nodes: of the layer, in the order of the graph.
    """
    calls = {node: False for node in nodes if is_kept(node)}
    inside = set(nodes)
    read: set[fx.Node] = set()  # what the second run must make, or find
    for node in reversed(nodes):
        if node in calls:
            calls[node] = node in read
            saves = bool(node.meta.get("backward")) and "redistribution" not in node.meta
        else:
            nothing = gives_view(node.target) or node.target in _SAVE_NOTHING or "redistribution" in node.meta
            saves = node in read or bool(node.meta.get("backward")) and not nothing
        if saves:
            read.update(x for x in node.all_input_nodes if x in inside)
    return calls


def kept_in_layers(graph: fx.Graph, layers: Collection[str]) -> dict[fx.Node, bool]:
    """The calls of several layers of a graph as :func:`kept_calls` tells them."""
    calls: dict[str, list[fx.Node]] = {layer: [] for layer in layers}
    for node in graph.nodes if calls else ():
        if node.op == "call_function" and (layer := layer_of(node)) in calls:
            calls[layer].append(node)
    return {node: wanted for nodes in calls.values() for node, wanted in kept_calls(nodes).items()}


def recompute_layers(module: fx.GraphModule, layers: Mapping[str, bool]) -> None:
    """Rewrites ``module`` in place.

    Args:
        layers: by module path, whether all but the products runs again; else the whole layer does.
    """
    graph = module.graph
    order = dict.fromkeys(layer for node in graph.nodes if (layer := layer_of(node)) in layers)
    for layer in layers:
        if layer not in order:
            raise ValueError(f"there is no layer {layer!r} to recompute")
    for number, layer in enumerate(order):
        assert layer is not None
        name = f"recompute_{number}"
        stretch = _stretch(graph, layer)
        if not stretch:
            continue
        program = outline(module, stretch, name)
        if layers[layer]:
            nodes = [node for node in program.graph.nodes if node.op not in ("placeholder", "output")]
            for node, wanted in kept_calls(nodes).items():
                node.target = Keeping(node.target, wanted)
        module.add_submodule(name, Region(layer, program))


def _stretch(graph: fx.Graph, layer: str) -> list[fx.Node]:
    """All nodes from the first of a layer to its last, with the gathers of parameters that only they read; but not what
    another layer's region, between whose nodes it stood, returns of it."""
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    places = [i for i, node in enumerate(nodes) if layer_of(node) == layer and not _is_returned(node)]
    if not places:
        return []
    first, last = places[0], places[-1]
    inside = set(nodes[first : last + 1])
    while first and "bucket" in nodes[first - 1].meta and inside.issuperset(nodes[first - 1].users):
        first -= 1
        inside.add(nodes[first])
    stretch = nodes[first : last + 1]
    start = next(node for node in stretch if "bucket" not in node.meta)
    for call in [node for node in stretch if node.op == "call_module"]:
        if not all(inside.issuperset(item.users) for item in call.users):  # others read it, too: gathered before
            for node in [call, *call.users]:
                start.prepend(node)
                stretch.remove(node)
    return stretch


def _is_returned(node: fx.Node) -> bool:
    return node.target is operator.getitem and "region" in node.args[0].meta  # type: ignore[union-attr]


def outline(owner: fx.GraphModule, nodes: Sequence[fx.Node], name: str) -> fx.GraphModule:
    """Moves nodes into a graph of their own, which is called in their place."""
    graph = owner.graph
    inside = set(nodes)
    entering = list(dict.fromkeys(x for node in nodes for x in node.all_input_nodes if x not in inside))
    leaving = [node for node in nodes if any(user not in inside for user in node.users)]
    inner = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in entering:
        copies[node] = inner.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in nodes:
        copies[node] = copy_node(inner, node, copies.__getitem__)
    inner.output(tuple(copies[node] for node in leaving))
    with graph.inserting_after(nodes[-1]):
        call = graph.create_node("call_module", name, tuple(entering), {}, name)
    call.meta = {"region": name}
    point = call
    for i, node in enumerate(leaving):
        with graph.inserting_after(point):
            point = item = graph.call_function(operator.getitem, (call, i))
        item.meta = dict(node.meta)
        node.replace_all_uses_with(item, delete_user_cb=lambda user: user not in inside)
    for node in reversed(nodes):
        graph.erase_node(node)
    program = graph_module(fx.Graph())
    for node in nodes:
        if node.op == "call_module":
            program.add_submodule(str(node.target), owner.get_submodule(str(node.target)))
    program.graph = inner
    return program
