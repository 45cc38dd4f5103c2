"""The layers of a graph, as ``passes.mark_layers`` has noted them, and which of them repeat."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoparallel.operators.control_flow import kind_of, take_apart
from autoparallel.operators.draws import NUMBERS


def layer_of(node: fx.Node) -> str | None:
    """The path of the layer that a node belongs to, such as ``"blocks.3"``; None where it belongs to none."""
    return node.meta.get("layer")


def mark_checkpointed(node: fx.Node) -> None:
    """Marks a call that the model makes in a region of ``torch.utils.checkpoint``, as decomposing it keeps."""
    _mark(node, "checkpointed", True)


def is_checkpointed(node: fx.Node) -> bool:
    """Whether the model makes a call in a region of ``torch.utils.checkpoint``."""
    return "checkpointed" in node.meta.get("custom", {})


def mark_kernels(node: fx.Node, kernels: tuple[str, ...]) -> None:
    """Marks a call with the names of the kernels that the model lets it run on, as decomposing it keeps."""
    _mark(node, "kernels", kernels)


def kernels_of(node: fx.Node) -> tuple[str, ...] | None:
    """The names of the kernels that a call may run on; None where the model does not say."""
    kernels: tuple[str, ...] | None = node.meta.get("custom", {}).get("kernels")
    return kernels


def _mark(node: fx.Node, name: str, value: object) -> None:
    node.meta["custom"] = {**node.meta.get("custom", {}), name: value}


def draw_of(node: fx.Node) -> int | None:
    """The number of the draw that a call makes, among those of a call of the model; None where it draws nothing."""
    place = NUMBERS.get(node.target)  # type: ignore[arg-type]
    return None if place is None else cast(int, node.args[place])


def with_draw(node: fx.Node, number: int) -> tuple[Any, ...]:
    """The arguments of a call that draws, with another number of the draw."""
    place = NUMBERS[node.target]  # type: ignore[index]
    return (*node.args[:place], number, *node.args[place + 1 :])


def paths_around(path: str) -> list[str]:
    """The paths of the modules around a module, the outermost first, and its own: ``"blocks"``, ``"blocks.3"``."""
    parts = path.split(".") if path else []
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def layers_of(node: fx.Node) -> tuple[str, ...]:
    """The layer that a node belongs to, and the modules with a number in it, the outermost first: ``"blocks.3"``,
    ``"blocks.3.experts.1"``."""
    layer = layer_of(node)
    return () if layer is None else _modules_with_numbers(layer, str(node.meta["module"]))


@functools.lru_cache(maxsize=4096)
def _modules_with_numbers(layer: str, path: str) -> tuple[str, ...]:
    inner = paths_around(path)[layer.count(".") + 1 :]
    return (layer, *[part for part in inner if part[-1].isdigit()])


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


@dataclass(frozen=True)
class Run:
    """Layers in a row that are alike: the same calls on the same shapes, reading the same places of the layer before.

    Only the next layer reads a layer, but for the last one.  Nodes are known by their names, which copies of a graph
    share.

    Attributes:
        members: the paths of the layers.
        calls: for each layer its calls, in the order of the graph.
        placeholders: for each layer the placeholders that it alone reads, in the order in which it does.
    """

    members: tuple[str, ...]
    calls: tuple[tuple[str, ...], ...]
    placeholders: tuple[tuple[str, ...], ...]

    def nodes(self, member: int) -> tuple[str, ...]:
        """The calls of a layer and the placeholders that it alone reads."""
        return self.calls[member] + self.placeholders[member]

    def parts(self, kind: Callable[[str], Hashable]) -> list[Run]:
        """The runs of two and more of its layers whose nodes are of the same kinds, place by place."""
        kinds = [tuple(map(kind, self.nodes(i))) for i in range(len(self.members))]
        rows = [list(row) for _, row in itertools.groupby(range(len(kinds)), kinds.__getitem__)]
        return [
            Run(*[tuple([of[i] for i in row]) for of in (self.members, self.calls, self.placeholders)])  # type: ignore[arg-type]
            for row in rows
            if len(row) > 1
        ]


def find_runs(graph: fx.Graph) -> tuple[Run, ...]:
    """The runs of a graph."""
    number = {node: i for i, node in enumerate(node for node in graph.nodes if node.op == "call_function")}
    kinds = Kinds()
    rows: list[list[tuple[str, list[fx.Node], list[fx.Node]]]] = []
    before: list[fx.Node] = []
    last: list[fx.Node] = []
    for layer, stretch in stretches_of_layers(graph).items():
        follows = bool(last) and number[last[-1]] + 1 == number[stretch[0]]
        alike = compare(last, stretch, kinds, before) if follows else None
        if alike is not None and _read_within(last, stretch):
            rows[-1][-1][2][:] = alike.placeholders.values()
            rows[-1].append((layer, stretch, [*alike.placeholders]))
        else:
            rows.append([(layer, stretch, [])])
        before, last = last if follows else [], stretch
    return tuple(
        Run(tuple(members), tuple(map(_names, calls)), tuple(map(_names, placeholders)))
        for members, calls, placeholders in (zip(*row, strict=True) for row in rows if len(row) > 1)
    )


def _names(nodes: Sequence[fx.Node]) -> tuple[str, ...]:
    return tuple([node.name for node in nodes])


def _read_within(stretch: Sequence[fx.Node], following: Sequence[fx.Node]) -> bool:
    readers = {*stretch, *following}
    return all(readers.issuperset(node.users) for node in stretch)


class Kinds:
    """What is known of nodes, but for their names and what they read."""

    def __init__(self) -> None:
        self._values: dict[int, Hashable] = {}
        self._calls: dict[fx.Node, tuple[Hashable, list[fx.Node]]] = {}

    def of(self, node: fx.Node) -> Hashable:
        """A node's value, and what passes have found out about it."""
        value = node.meta.get("val")
        if id(value) not in self._values:  # copied layers share their values
            self._values[id(value)] = tuple(
                (tuple(map(str, v.shape)), v.dtype, v.requires_grad) if isinstance(v, torch.Tensor) else str(v)
                for v in pytree.tree_leaves(value)
            )
        factors = tuple(sorted(map(str, node.meta.get("batch_factors", ()))))
        return self._values[id(value)], node.meta.get("differentiable"), node.meta.get("backward"), factors

    def call(self, node: fx.Node) -> tuple[Hashable, list[fx.Node]]:
        """A call without what it reads, and what it reads; of a draw, its number is left out, too."""
        if node in self._calls:  # a layer is compared with the one before it and with the one behind it
            return self._calls[node]
        arguments, reads = take_apart(node.args if draw_of(node) is None else with_draw(node, 0), node.kwargs)
        self._calls[node] = (kind_of(node.target), arguments, self.of(node), node.meta["key"].rpartition("/")[2]), reads
        return self._calls[node]


@dataclass(frozen=True)
class Alike:
    """How a layer repeats the one before it.

    Attributes:
        carried: of the calls of the layer before, those that it reads, with their places.
        placeholders: the ones that it alone reads, with those that the layer before reads in their place.
    """

    carried: dict[fx.Node, int] = field(default_factory=dict)
    placeholders: dict[fx.Node, fx.Node] = field(default_factory=dict)


def compare(
    first: Sequence[fx.Node], second: Sequence[fx.Node], kinds: Kinds, before: Sequence[fx.Node] | None = None
) -> Alike | None:
    """How the second of two layers in a row repeats the first one; None where it does not.

    Args:
        before: the layer before the first one, of which that reads the same places; None where it may read anything.
    """
    if len(first) != len(second):
        return None
    here = {node: i for i, node in enumerate(second)}
    there = {node: i for i, node in enumerate(first)}
    alike = Alike()
    entered: dict[fx.Node, fx.Node] = {}

    def is_private(x: fx.Node, layer: dict[fx.Node, int]) -> bool:
        return x.op == "placeholder" and layer.keys() >= x.users.keys()

    def same(x: fx.Node, y: fx.Node) -> bool:
        if y in here:
            return there.get(x) == here[y]
        if y in there:  # what the layer before hands on
            alike.carried[y] = there[y]
            if before is not None:
                return there[y] < len(before) and x is before[there[y]]
            return x not in there and kinds.of(x) == kinds.of(y) and entered.setdefault(y, x) is x
        if is_private(y, here):
            return is_private(x, there) and kinds.of(x) == kinds.of(y) and alike.placeholders.setdefault(y, x) is x
        return x is y

    for a, b in zip(first, second, strict=True):
        (what_a, reads_a), (what_b, reads_b) = kinds.call(a), kinds.call(b)
        if what_a != what_b or not all(map(same, reads_a, reads_b)):
            return None
    return alike
