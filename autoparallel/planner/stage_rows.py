"""What single operators cost a stage of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from autoparallel.decisions.decisions import SELECTIVE
from autoparallel.placements import Layout


@dataclass(frozen=True)
class Row:
    """What one operator costs one rank for one microbatch.

    Attributes:
        layer: what it is part of, if anything.
        activations: bytes that its backward needs.
        outside: of the result, where others than its layer read it, and its layer runs again.
        product: of the result, where it is kept and not repeated when all but the products of its layer runs again;
            None where the call is.
        moment: bytes that its gradients take while its backward runs.
        spared: those that are not kept, because it runs again in the backward.
        again: whether it does.
        kept: bytes of the parameters that are read here first, with gradients and optimizer states.
        reads: the parameters that it reads: the bytes where they lie, and where they are borrowed.
    """

    node: fx.Node
    layer: str | None
    forward: float
    backward: float
    activations: float
    outside: float
    kept: float
    reads: Mapping[fx.Node, tuple[float, float]]
    result: Layout
    product: float | None = None
    moment: float = 0.0
    spared: float = 0.0
    again: bool = False

    @property
    def inputs(self) -> float:
        """How long the gradients of inputs alone take; what runs again computes all of its gradients with them."""
        return self.backward if self.again else self.backward / 2

    def recomputed(self, layers: Mapping[str, str]) -> Row:
        """The same, run again in the backward where it is part of one of these layers, so much of which does."""
        if self.again or self.layer is None or self.layer not in layers:
            return self
        backward, left = self.backward + self.forward, self.outside
        if layers[self.layer] == SELECTIVE and self.product is not None:
            backward, left = self.backward, max(left, self.product)
        return replace(self, backward=backward, activations=left, spared=max(0.0, self.activations - left), again=True)


def largest_layer(rows: Sequence[Row]) -> float:
    """The most bytes that a layer's activations take while it runs again, beside what is kept of it."""
    layers: dict[str | None, float] = {}
    for row in rows:
        if row.again:
            layers[row.layer] = layers.get(row.layer, 0.0) + row.spared
    return max(layers.values(), default=0.0)


def moment_of(stage: Sequence[Row]) -> float:
    """The most bytes that a backward of a stage takes beside what is kept."""
    return largest_layer(stage) + max(row.moment for row in stage)
