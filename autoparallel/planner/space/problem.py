"""What a search solves: a factor graph over the choices for the nodes of a forward graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from torch import fx

from autoparallel.placements import Layout
from autoparallel.planner.calls.options import Option
from autoparallel.planner.solve.budget import Budget
from autoparallel.planner.solve.factors import Factors
from autoparallel.rules.calls import tensor_operands

Reader = tuple["Variable", int]
"""A consumer of a tensor, and which of its operands it is."""


@dataclass(slots=True)
class Variable:
    """The choice of one node, and its number in the factor graph."""

    node: fx.Node
    options: list[Option]
    number: int


@dataclass
class Problem:
    """A factor graph and what its variables mean.

    Attributes:
        sizes: the number of options of each variable.
        factors: cost in seconds.
        usage: memory in bytes.
        hidden: seconds that numbers of chunks of all linear layers hide, of which ``factors`` have the most taken off.
        variables: operator and parameter variables, by node.
        readers: the layouts of the shared-layout variables, by node, with the variable's number.
        layers: of each variable the layers of the model that it is in, the outermost first.
        again: by layer, the variable that says how much of it runs again in the backward: nothing, or one of
            ``RECOMPUTED``.
    """

    sizes: list[int] = field(default_factory=list)
    factors: Factors = field(default_factory=Factors)
    usage: Factors = field(default_factory=Factors)
    hidden: dict[int, Factors] = field(default_factory=dict)
    variables: dict[fx.Node, Variable] = field(default_factory=dict)
    readers: dict[fx.Node, tuple[list[Layout], int]] = field(default_factory=dict)
    layers: list[tuple[str, ...]] = field(default_factory=list)
    again: dict[str, int] = field(default_factory=dict)

    @cached_property
    def objective(self) -> Factors:
        """The factors, and next to nothing for each further option: so layers that are alike break ties alike, not by
        rounding."""
        ties, tables = Factors(), {size: 1e-12 * np.arange(size, dtype=np.float64) for size in set(self.sizes)}
        for number, size in enumerate(self.sizes):
            ties.add((number,), tables[size])
        return self.factors.joined(ties)

    @cached_property
    def budget(self) -> Budget:
        """The objective, to be minimised within limits on the usage."""
        return Budget(self.sizes, self.objective, self.usage, self.layers)

    def operands(self, node: fx.Node) -> list[fx.Node]:
        """What a node reads, in the order of its options' needs."""
        return tensor_operands(node) if node.op == "call_function" else []

    def node_of(self, variable: int | None) -> fx.Node | None:
        """The node that a variable, or the layout in which its readers share it, belongs to."""
        nodes = [node for node, v in self.variables.items() if v.number == variable]
        nodes += [node for node, (_, number) in self.readers.items() if number == variable]
        return nodes[0] if nodes else None

    def shares(self, factors: Factors, choices: Sequence[int]) -> dict[fx.Node, float]:
        """What the tables of some factors add up to, by the node that makes a tensor: a table's first variable."""
        nodes = {v.number: node for node, v in self.variables.items()}
        is_tensor = np.array([number in nodes for number in range(len(self.sizes))])
        shares: dict[fx.Node, float] = {}
        for scopes, entries in factors.entries(choices):
            its = is_tensor[scopes[:, 0]]
            for number, entry in zip(scopes[its, 0].tolist(), entries[its].tolist(), strict=True):
                node = nodes[number]
                shares[node] = shares.get(node, 0.0) + entry
        return shares

    def add(self, count: int, layers: tuple[str, ...] = ()) -> int:
        """A new variable with so many options."""
        self.sizes.append(count)
        self.layers.append(layers)
        return len(self.sizes) - 1
