"""What a search solves: a factor graph over the choices of a space, and their prices.

The variables are

- for each operator: its mode on every mesh axis (``rules.typing``), which gives the layouts it needs and makes;
- for each tensor with several consumers: the layout they all read it in, so that a redistribution shared by several
  consumers is one choice with one price;
- for each parameter: its layout at rest, and whether it is gathered per use or per microbatch;
- for each layer for which that is open: whether all but its products, or all of it, runs again in the backward.

The costs are compute and memory traffic on local sizes, forward and backward, and redistributions, forward and
backward, between what one side makes and the other needs.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import fx

from autoparallel.decisions.decisions import FULL, RECOMPUTED
from autoparallel.graph.layers import layers_of
from autoparallel.placements import Layout
from autoparallel.planner.calls.options import Option, Reader, Variable
from autoparallel.planner.solve.budget import Budget
from autoparallel.planner.solve.factors import Factors
from autoparallel.planner.space.prices import Pricer, Prices, most_hidden
from autoparallel.planner.space.space import SearchSpace


@dataclass
class _Ends:
    """What tensors share that are alike and whose consumers are.

    Attributes:
        shared: the layouts in which several consumers may read one.
        leaving: the layouts in which one leaves the graph.
        prices: the tables to its consumers, once they are worked out.
        again: the table of what that costs once more, where its layer may run again.
        hidden: for each number of chunks, the table of what they hide of it.
    """

    shared: list[Layout] | None
    leaving: Sequence[Layout]
    prices: Prices | None = None
    again: np.ndarray | None = None
    hidden: Sequence[np.ndarray] = ()


class Problem:
    """A factor graph, and what its variables mean.

    Variables are numbered as the graph runs, a parameter's just before its first reader's and in its layer, and a
    shared layout's just after its producer's, so that layers that are alike have variables in the same order.

    Args:
        space: what there is to choose from.

    Attributes:
        sizes: the number of options of each variable.
        factors: cost in seconds; of one microbatch, with its share of what is paid once a step: the gathers of
            parameters that are kept, the reduction of gradients and the update.
        usage: memory in bytes.
        hidden: seconds that numbers of chunks of all linear layers hide, of which ``factors`` have the most taken off.
        variables: operator and parameter variables, by node.
        readers: the layouts of the shared-layout variables, by node, with the variable's number.
        layers: of each variable the layers of the model that it is in, the outermost first.
        again: by layer, the variable that says how much of it runs again in the backward: nothing, or one of
            ``RECOMPUTED``.
    """

    def __init__(self, space: SearchSpace) -> None:
        self.space = space
        subject = space.subject
        self.captured, self.size = subject.captured, subject.size
        self.searched, self.open = subject.searched, subject.open
        self._pricer = Pricer(space)
        self.sizes: list[int] = []
        self.factors, self.usage = Factors(), Factors()
        self.hidden = {count: Factors() for count in self._pricer.overlaps.counts}
        self.variables: dict[fx.Node, Variable] = {}
        self.readers: dict[fx.Node, tuple[list[Layout], int]] = {}
        self.layers: list[tuple[str, ...]] = []
        self.again: dict[str, int] = {}
        self._ends: dict[fx.Node, tuple[_Ends, Sequence[tuple[fx.Node, int]]]] = {}
        # What is alike is worked out once, by the options on both sides.
        self._ends_alike: dict[Hashable, _Ends] = {}
        self._own_prices: dict[Hashable, tuple[np.ndarray, np.ndarray | None]] = {}
        self._readers, self._leaving = subject.readers, self._leaving_layouts()
        nodes = self.captured.graph.nodes
        operators = [node for node in nodes if node.op == "call_function" and space.options[node] is not None]
        for node in operators:
            if (layer := self.open.get(node)) is not None and layer not in self.again:
                self.again[layer] = variable = self._new_variable(1 + len(RECOMPUTED), (layer,))
                if layer in subject.checkpointed:
                    answers = np.array([0.0 if much == FULL else np.inf for much in (None, *RECOMPUTED)])
                    self.factors.add((variable,), answers)
            for operand in self.size.operands(node):
                if operand.op == "placeholder" and operand not in self.variables:
                    self._add(operand, layers_of(node))
            self._add(node, layers_of(node))
        for node in nodes:
            if node.op == "placeholder" and node not in self.variables:
                self._add(node, ())
        for producer in self.variables.values():
            self._connect(producer)

    @cached_property
    def objective(self) -> Factors:
        """The factors, and next to nothing for each further option: so layers that are alike break ties alike, not by
        rounding."""
        ties, sizes = Factors(), np.array(self.sizes)
        for size in dict.fromkeys(self.sizes):
            places = [(number,) for number in np.flatnonzero(sizes == size).tolist()]
            ties.extend(1e-12 * np.arange(size, dtype=np.float64), places)
        return self.factors.joined(ties)

    @cached_property
    def budget(self) -> Budget:
        """The objective, to be minimised within limits on the usage."""
        return Budget(self.sizes, self.objective, self.usage, self.layers)

    @cached_property
    def resting(self) -> float:
        """Bytes that parameters take at least, with their gradients and the optimizer's states, whatever is chosen."""
        names = self.captured.parameters
        choices = [v.options for node, v in self.variables.items() if node.name in names and node.users]
        least = {id(options): min([option.saved_bytes for option in options]) for options in choices}
        return sum(least[id(options)] for options in choices)

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

    # -- variables --------------------------------------------------------------------------------------------------

    def _new_variable(self, count: int, layers: tuple[str, ...]) -> int:
        """The number of a new variable with so many options."""
        self.sizes.append(count)
        self.layers.append(layers)
        return len(self.sizes) - 1

    def _recomputation_variable(self, node: fx.Node) -> tuple[int, ...]:
        """The variable that says how much of a node's layer runs again, where there is one."""
        return (self.again[self.open[node]],) if node in self.open else ()

    def _leaving_layouts(self) -> dict[fx.Node, list[Layout]]:
        """The layouts in which tensors leave the graph."""
        leaving: dict[fx.Node, list[Layout]] = {}
        for value, layout in zip(self.captured.graph.output_node().args[0], self.space.outputs, strict=True):  # type: ignore[arg-type]
            if isinstance(value, fx.Node) and layout is not None:
                leaving.setdefault(value, []).append(layout)
        return leaving

    def _add(self, node: fx.Node, layers: tuple[str, ...]) -> None:
        options = self.space.options[node]
        assert options is not None
        variable = Variable(node, options, self._new_variable(len(options), layers))
        self.variables[node] = variable
        alike = id(options), node in self.open, node in self.space.subject.repeated
        if alike not in self._own_prices:
            seconds = np.array([o.seconds for o in options])
            saved = np.array([o.saved_bytes for o in options])
            if node in self.open:
                again = np.array([o.again for o in options])
                seconds = np.stack(
                    [seconds, seconds + again * (node in self.space.subject.repeated), seconds + again], axis=-1
                )
                saved = np.stack([saved, [o.kept_bytes for o in options], [o.left_bytes for o in options]], axis=-1)
            self._own_prices[alike] = seconds, saved if saved.any() else None
        option_seconds, option_bytes = self._own_prices[alike]
        scope = variable.number, *self._recomputation_variable(node)
        self.factors.add(scope, option_seconds)
        if option_bytes is not None:
            self.usage.add(scope, option_bytes)
        consumers, leaves = self._readers.get(node, ()), self._leaving.get(node, ())
        if not consumers and not leaves:
            return
        # Worked out once for tensors that are alike and whose consumers are.
        layer = self.open.get(node)
        at = tuple([(id(self.space.options[r]), position, self.open.get(r) == layer) for r, position in consumers])
        key = (
            alike,
            self.size.tensor(node),
            node in self.searched,
            node.name in self.captured.parameters,
            at,
            tuple(leaves),
        )
        ends = self._ends_alike.get(key)
        if ends is None:
            ends = self._ends_alike[key] = _Ends(self._shared_layouts(node, options, consumers, leaves), leaves)
        self._ends[node] = ends, consumers
        if ends.shared is not None:
            self.readers[node] = ends.shared, self._new_variable(len(ends.shared), layers)

    def _shared_layouts(
        self,
        node: fx.Node,
        options: Sequence[Option],
        readers: Sequence[tuple[fx.Node, int]],
        leaving: Sequence[Layout],
    ) -> list[Layout] | None:
        """The layouts in which several consumers may read a tensor; None for one consumer."""
        # What depends on no parameter and no input is whole on every rank; each reader cuts what it needs.
        if node not in self.searched or len(readers) + len(leaving) < 2:
            return None
        wanted: dict[Layout, None] = {}
        for reader, position in readers:
            wanted |= dict.fromkeys([o.needs[position] for o in self.space.options[reader] or ()])
        if node.name not in self.captured.parameters:
            wanted |= dict.fromkeys([o.result for o in options])
        return list(wanted)

    # -- prices between variables -----------------------------------------------------------------------------------

    def _connect(self, producer: Variable) -> None:
        """Adds what it costs to bring a tensor to all its consumers."""
        node = producer.node
        if node not in self._ends:
            return
        ends, consumers = self._ends[node]
        readers = [(self.variables[reader], position) for reader, position in consumers]
        prices, factors = ends.prices, self.factors
        if prices is None:
            prices = ends.prices = self._pricer.price(producer, readers, ends.leaving, ends.shared)
            if prices.saved is not None and node not in self.open:
                prices.saved = np.ascontiguousarray(prices.saved[..., 0])
            ends.again, ends.hidden = self._again_prices(producer, readers, ends, prices)
        first, scope = producer.number, (producer.number, *[reader.number for reader, _ in readers])
        if ends.shared is not None:
            first = self.readers[node][1]
            scope = producer.number, first
        if ends.shared is not None or node not in self.searched:
            for (reader, _), table in zip(readers, prices.readers, strict=False):
                factors.add((first, reader.number), table)
            for table in prices.leaving:
                factors.add((first,), table)
        if node in self.searched:
            factors.add(scope, prices.source)
            if prices.usage is not None:
                self.usage.add(scope, prices.usage)
            with_answer = *scope, *self._recomputation_variable(node)
            if prices.saved is not None:
                self.usage.add(with_answer, prices.saved)
            if ends.again is not None:
                factors.add(with_answer, ends.again)
            for hidden, table in zip(self.hidden.values(), ends.hidden, strict=False):
                hidden.add(with_answer, table)

    def _again_prices(
        self, producer: Variable, readers: Sequence[Reader], ends: _Ends, prices: Prices
    ) -> tuple[np.ndarray | None, Sequence[np.ndarray]]:
        """What it takes more to bring a tensor to its consumers where its layer runs again, and what each number of
        chunks hides of the way, both by how much of the layer runs again where that is open."""
        node, layer, hidden = producer.node, self.open.get(producer.node), prices.hidden
        if layer is None:
            return None, () if hidden is None else list(hidden.sum(axis=1))
        inside = [(reader, position) for reader, position in readers if self.open.get(reader.node) == layer]
        part = every = np.zeros(prices.source.shape)
        repeats = bool(inside) and node in self.searched and bool(node.meta["backward"])
        if repeats:
            columns = ends.shared if ends.shared is not None else [o.needs[inside[0][1]] for o in inside[0][0].options]
            every, part = self._pricer.again(producer, columns)
        tables: list[np.ndarray] = []
        if hidden is not None:
            # Where all but the products runs again, linear layers are left whole.
            forward, backward = most_hidden(hidden)
            every, part = every - repeats * forward, part + forward + backward
            for first, then in hidden:
                tables.append(np.stack([first + then, 0 * first, (1 + repeats) * first + then], axis=-1))
        more = np.stack([0 * every, part, every], axis=-1)
        return more if more.any() else None, tables
