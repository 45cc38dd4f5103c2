"""What a search is about, before anything is permitted, priced or chosen."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from functools import cached_property

from torch import fx

from autoparallel.graph.captured import Captured
from autoparallel.graph.fingerprint import fingerprint
from autoparallel.graph.layers import layer_of
from autoparallel.passes.raise_row_views import Head, find_heads
from autoparallel.passes.recompute_layers import checkpointed_layers, kept_in_layers
from autoparallel.placements import Invariant, Layout
from autoparallel.planner.calls.saved_tensors import SavedTensors, saved_tensors_of
from autoparallel.planner.calls.signatures import Signatures
from autoparallel.planner.request.request import Request


class Subject:
    """A captured graph on one mesh, and what is known of it.

    Args:
        may_recompute: the layers that may run again in the backward.
        microbatches: into how many a step is cut; the graph has the sizes of one.
        loss_chunks: into how many chunks of rows the loss is cut.
        offloads: whether the optimizer's states lie in host memory.

    Attributes:
        size: reads the graph's sizes, and tells which calls are alike.
        searched: the nodes that have a choice.
        checkpointed: the layers that run again in any case, because the model itself asks for it.
        open: the nodes of the layers for which it is open whether they run again, with their layers.
        products: what is not repeated where all else of these layers runs again, and whether that reads it.
        repeated: all else.
    """

    def __init__(
        self,
        captured: Captured,
        request: Request,
        may_recompute: Collection[str] = (),
        microbatches: int = 1,
        loss_chunks: int = 1,
        offloads: bool = False,
    ) -> None:
        self.captured, self.request, self.axis_sizes = captured, request, request.sizes
        self.profile, self.redistributor = request.profile, request.redistributor
        # A rank of a pipeline keeps its part of the parameters, and of its part of the activations as many
        # microbatches as are in flight (1F1B).
        self.microbatches, self.stages, self.loss_chunks = microbatches, max(1, request.stages), loss_chunks
        self.offloads = offloads
        self.invariant: Layout = (Invariant,) * len(self.axis_sizes)
        self.size = Signatures(captured.actual)
        self.searched = self._descendants()
        layers = ((node, layer_of(node)) for node in captured.graph.nodes if may_recompute)
        self.checkpointed = frozenset(checkpointed_layers(captured.graph)).intersection(may_recompute)
        self.open = {node: layer for node, layer in layers if layer is not None and layer in may_recompute}
        self.products = kept_in_layers(captured.graph, may_recompute)
        self.repeated = self.open.keys() - self.products.keys()
        self._parts: dict[fx.Node, tuple[float, float, float]] = {}

    @cached_property
    def saved_tensors(self) -> SavedTensors:
        """What the backward finds of each node."""
        return saved_tensors_of(self.captured.graph, self.size, self.profile, self.loss_chunks)

    @cached_property
    def fingerprint(self) -> str:
        """The digest of the graph, which plans are told by."""
        return fingerprint(self.captured)

    def parts(self, node: fx.Node) -> tuple[float, float, float]:
        """Bytes that the backward finds of each byte of a node; and where all but the products of its layer runs again,
        which keeps what these make, or the whole layer, which then keeps only what others read."""
        parts = self._parts.get(node)
        if parts is None:
            layer = self.open.get(node)
            outside = float(layer is not None and any(self.open.get(user) != layer for user in node.users))
            products = max(outside, float(self.products.get(node, False)))
            parts = self._parts[node] = self.saved_tensors.parts.get(node, 0.0), products, outside
        return parts

    @cached_property
    def kinds(self) -> dict[fx.Node, int]:
        """Numbers for the kinds of the calls that have a choice; those of one have the same, but for what a preset
        permits."""
        numbers: dict[Hashable, int] = {}
        kinds: dict[fx.Node, int] = {}
        for node in self.captured.graph.nodes:
            if node in self.searched and node.op == "call_function" and self.size.tensor(node) >= 0:
                kind = self.size.call(node), node in self.open, self.parts(node)
                kinds[node] = numbers.setdefault(kind, len(numbers))
        return kinds

    @cached_property
    def readers(self) -> dict[fx.Node, list[tuple[fx.Node, int]]]:
        """The calls that read each tensor, each with the place among its operands."""
        readers: dict[fx.Node, list[tuple[fx.Node, int]]] = {}
        for node in self.captured.graph.nodes:
            if node.op == "call_function":
                for place, operand in enumerate(self.size.operands(node)):
                    readers.setdefault(operand, []).append((node, place))
        return readers

    @cached_property
    def heads(self) -> list[Head]:
        """The losses that go through their rows in chunks, with the linear layers that make their logits."""
        return list(find_heads(self.captured.graph)) if self.loss_chunks > 1 else []

    def _descendants(self) -> set[fx.Node]:
        """Nodes that depend on a parameter or an input; the others (masks, positions) are set aside: every rank
        computes them whole."""
        roots = {*self.captured.parameters, *(n for n in self.captured.inputs if n is not None)}
        descendants: set[fx.Node] = set()
        for node in self.captured.graph.nodes:
            if node.op == "placeholder":
                if node.name in roots:
                    descendants.add(node)
            elif node.op == "call_function" and not descendants.isdisjoint(self.size.operands(node)):
                descendants.add(node)
        return descendants
