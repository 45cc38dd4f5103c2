"""Notes which layer of the model each call belongs to.

[Note: layers] A layer is an item of a list of modules (``ModuleList``, ``Sequential``), the outermost one that a call
is in: what a block holds in lists (experts, heads, an MLP) is of the block.  Unless the item is a stage, as models of
images have them: it does nothing but call others, among them several of one class, one list's items, that have parts
themselves.  These are layers then, and so is each other module that the stage calls (what makes images smaller).  What
computes something is told by class: a block that adds what enters it to its last result does so in some instances only.

Before (nodes of the modules "stages.0.blocks.0.up", "stages.0.blocks.1.up" and "stages.0.shrink.conv"):
    linear = aten.linear(x, w0);  linear_1 = aten.linear(linear, w1);  conv = aten.conv2d(linear_1, w2)
After:
    layer: "stages.0.blocks.0";   layer: "stages.0.blocks.1";          layer: "stages.0.shrink"
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cache

from torch import fx, nn

from autoparallel.graph.layers import paths_around
from autoparallel.rules.calls import is_tensor


def mark_layers(graph: fx.Graph, kinds: Mapping[str, type]) -> None:
    """Sets ``layer`` in the ``meta`` of every call of a captured graph that belongs to one (see [Note: layers]).

    Args:
        kinds: the classes of the model's modules, by path.
    """
    calls = [node for node in graph.nodes if node.op == "call_function"]
    layers = _Layers(kinds, {node.meta["module"] for node in calls if is_tensor(node)})
    for node in calls:
        if (layer := layers.around(node.meta["module"])) is not None:
            node.meta["layer"] = layer


class _Layers:
    """The layers of a model, by the paths of modules that compute something themselves."""

    def __init__(self, kinds: Mapping[str, type], computing: set[str]) -> None:
        self._kinds = kinds
        self._computing = {self._kinds.get(path) for path in computing}
        self._owners = {path for inner in computing for path in paths_around(inner) if path != inner}
        self.around = cache(self._around)
        self._lists = cache(self._lists_of_stage)

    def _around(self, path: str) -> str | None:
        """The layer that a module belongs to."""
        layer = next(filter(self._is_item, paths_around(path)), None)
        while layer is not None and layer != path and (lists := self._lists(layer)):
            inner = [part for part in paths_around(path) if part.startswith(f"{layer}.")]
            block = next((part for part in inner if part.rpartition(".")[0] in lists), None)
            if block is None:
                return inner[0]
            layer = block
        return layer

    def _lists_of_stage(self, layer: str) -> frozenset[str]:
        """The lists of blocks that a stage calls one by one; none where it is no stage."""
        blocks: Counter[tuple[str, type | None]] = Counter()
        for path in self._owners:
            owner = path.rpartition(".")[0]
            if f"{owner}.".startswith(f"{layer}.") and self._is_item(path):
                between = [part for part in paths_around(owner) if len(part) >= len(layer)]
                if self._computing.isdisjoint(map(self._kinds.get, between)):
                    blocks[owner, self._kinds.get(path)] += 1
        return frozenset(owner for (owner, _), count in blocks.items() if count > 1)

    def _is_item(self, path: str) -> bool:
        owner, _, name = path.rpartition(".")
        return name.isdigit() or issubclass(self._kinds.get(owner, object), nn.ModuleList | nn.Sequential)
