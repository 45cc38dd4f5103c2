"""What it costs to bring a tensor from the layout that its producer makes to those that its consumers read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import fx

from autoparallel.placements import Layout
from autoparallel.placements.redistribution import PARTIAL, LayoutTable, local_numel
from autoparallel.planner.calls.options import Reader, Variable
from autoparallel.planner.space.interleaving import dealing_seconds, deals_out, dealt_bytes
from autoparallel.planner.space.overlaps import Overlaps
from autoparallel.planner.space.space import SearchSpace
from autoparallel.rules.calls import is_tensor


@dataclass
class Prices:
    """The tables of one tensor: from its producer, to its consumers, to what leaves the graph; and bytes.

    Attributes:
        saved: bytes that the backward finds more, or less, where what it finds is redistributed first, by how much of
            the layer runs again: nothing, or one of ``RECOMPUTED``.
        hidden: what chunks of linear layers hide of the way from its producer, of which the most is taken off already
            (see ``Overlaps.hidden``).
    """

    source: np.ndarray
    usage: np.ndarray | None
    saved: np.ndarray | None = None
    hidden: np.ndarray | None = None
    readers: list[np.ndarray] = field(default_factory=list)
    leaving: list[np.ndarray] = field(default_factory=list)


class Pricer:
    """Prices redistributions between the options of a space.

    Attributes:
        overlaps: what chunks of linear layers hide.
    """

    def __init__(self, space: SearchSpace) -> None:
        self.space, subject, self.overlaps = space, space.subject, Overlaps(space.subject)
        self.captured, self.size, self.searched = subject.captured, subject.size, subject.searched
        self.saved_tensors, self.products = subject.saved_tensors, subject.products
        self.heads = {head.product for head in subject.heads}
        self.redistributor, self.profile = subject.redistributor, subject.profile
        self.axis_sizes, self.microbatches, self.stages = subject.axis_sizes, subject.microbatches, subject.stages

    def price(
        self,
        producer: Variable,
        readers: Sequence[Reader],
        leaving: Sequence[Layout],
        shared: Sequence[Layout] | None,
    ) -> Prices:
        """The tables between a tensor's producer, the layout that all its consumers share, and these."""
        node = producer.node
        if node not in self.searched:
            shared = [o.result for o in producer.options]
            return self._price_readers(Prices(np.zeros(0), None), node, readers, leaving, shared)
        columns = shared
        if columns is None:
            columns = [leaving[0]] if leaving else [o.needs[readers[0][1]] for o in readers[0][0].options]
        source, usage = self._source_prices(producer, columns), self._gathered_bytes(producer, columns)
        saved = self._redistributed_bytes(producer, columns)
        prices = Prices(source, usage if usage is not None and usage.any() else None, saved)
        if is_tensor(node) and self.overlaps.counts:
            forward, _ = self.again(producer, columns)
            both = forward, self._matrix(node, [o.result for o in producer.options], columns) - forward
            table = self._table(node)
            codes = [table.codes[table.places(x)] for x in ([o.result for o in producer.options], columns)]
            hidden = self.overlaps.hidden(
                producer, readers, columns, codes, both, shared=shared is not None, leaves=bool(leaving)
            )
            if hidden is not None and (hidden > 0).any():
                prices.hidden, prices.source = hidden, source - most_hidden(hidden).sum(axis=0)
        if shared is not None:
            return self._price_readers(prices, node, readers, leaving, shared)
        if leaving:  # as its one layout is wanted
            prices.source, prices.usage, prices.saved = prices.source[:, 0], None, None
            prices.hidden = None if prices.hidden is None else prices.hidden[..., 0]
        return prices

    def _price_readers(
        self,
        prices: Prices,
        node: fx.Node,
        readers: Sequence[Reader],
        leaving: Sequence[Layout],
        rows: Sequence[Layout],
    ) -> Prices:
        """Adds the tables from one of some layouts to each reader; readers that are alike have the very same one."""
        if is_tensor(node):
            tables: dict[tuple[int, int], np.ndarray] = {}
            for reader, position in readers:
                key = id(reader.options), position
                if key not in tables:
                    tables[key] = self._matrix(node, rows, [o.needs[position] for o in reader.options])
                prices.readers.append(tables[key])
            for layout in leaving:
                prices.leaving.append(self._matrix(node, rows, [layout])[:, 0])
        return prices

    def _table(self, node: fx.Node, backward: bool | None = None) -> LayoutTable:
        return self.redistributor.table(
            self.size.shape(node),
            node.meta["val"].element_size(),
            bool(node.meta["differentiable"]),
            bool(node.meta["backward"]) if backward is None else backward,
            uneven=node.name in self.captured.parameters,
        )

    def _matrix(self, node: fx.Node, rows: Sequence[Layout], columns: Sequence[Layout]) -> np.ndarray:
        table = self._table(node)
        return table.seconds[np.ix_(table.places(rows), table.places(columns))]

    def _source_prices(self, producer: Variable, columns: Sequence[Layout]) -> np.ndarray:
        """What it costs to bring each option's result into each layout."""
        node = producer.node
        if not is_tensor(node):
            return np.zeros((len(producer.options), len(columns)))
        prices = self._matrix(node, [o.result for o in producer.options], columns)
        if node.name in self.captured.parameters:
            table = self._table(node, backward=False)
            gathers = table.seconds[:, table.places(columns)]
            once = 1 / self.microbatches  # a step: gradients are reduced, and what is kept is gathered
            again = self._is_gathered_again(node)
            for i, option in enumerate(producer.options):
                gather = gathers[table.index[option.result]]
                if option.gather == "per_use":
                    prices[i] = once * (prices[i] - gather) + gather * (1 + again)
                else:
                    prices[i] *= once
            prices = prices + self.space.permits.forbidden(self.space.options, node, columns)
        elif deals_out(node):
            shape = self.size.shape(node)
            prices = prices + dealing_seconds(node, shape, producer.options, columns, self.axis_sizes, self.profile)
        return prices

    def _is_gathered_again(self, parameter: fx.Node) -> bool:
        """Whether the backward gathers once more what is gathered per use: where a reader saves it, or another
        parameter that it reads, which is gathered with it."""
        parts, names = self.saved_tensors.parts, self.captured.parameters
        beside = [x for user in parameter.users for x in user.all_input_nodes if x.name in names]
        return any(parts.get(x, 0.0) >= 1.0 for x in beside) and not self.heads.issuperset(parameter.users)

    def again(self, producer: Variable, columns: Sequence[Layout]) -> tuple[np.ndarray, np.ndarray]:
        """What it takes to bring each option's result into each layout once more: where all of its layer runs again,
        and where all but the products does, and of the collectives gathers alone."""
        table = self._table(producer.node, backward=False)
        between = np.ix_(table.places([option.result for option in producer.options]), table.places(columns))
        every: np.ndarray = table.seconds[between]
        return every, np.where(table.gathered[between], every, 0.0)

    def _redistributed_bytes(self, producer: Variable, columns: Sequence[Layout]) -> np.ndarray | None:
        """The bytes that the backward finds of what is brought from each option's result into each layout, less those
        counted with the option; by answer, as the last dim."""
        node = producer.node
        product, alone = self.products.get(node), self.saved_tensors.read.get(node)
        if node.name in self.captured.parameters or deals_out(node) or (alone is None and not product):
            return None
        shape, size = self.size.shape(node), float(node.meta["val"].element_size())
        results = [option.result for option in producer.options]
        before = size * np.array([[local_numel(shape, layout, self.axis_sizes)] for layout in results])
        after = size * np.array([local_numel(shape, layout, self.axis_sizes) for layout in columns])
        table = self._table(node)
        places = table.places(results)
        differs = places[:, None] != table.places(columns)
        sums = (table.codes[places] == PARTIAL).any(axis=1)[:, None]
        none = np.zeros(differs.shape)
        # A view's bytes are counted with what it looks at, which may lie otherwise.
        counted = before if node in self.saved_tensors.parts else np.minimum(before, after)
        saved = none if alone is None else differs * (after - counted * alone)
        # With all but the products, a sum is not made again, but kept where the others read it.
        again = none if product is False else differs * sums * (after - before * bool(product))
        by_answer = np.stack([saved, again, none], axis=-1)
        return by_answer if by_answer.any() else None

    def _gathered_bytes(self, producer: Variable, columns: Sequence[Layout]) -> np.ndarray | None:
        node = producer.node
        if deals_out(node):
            shape, saved = self.size.shape(node), node in self.saved_tensors.parts
            return dealt_bytes(node, shape, producer.options, columns, self.axis_sizes, saved)
        if node.name not in self.captured.parameters:
            return None
        shape, itemsize = self.size.shape(node), node.meta["val"].element_size()
        held = np.array([local_numel(shape, column, self.axis_sizes) for column in columns])
        local = np.array([local_numel(shape, option.result, self.axis_sizes) for option in producer.options])
        # Over several microbatches gradients are added up as they are made; else each is reduced at once, and lives for
        # a moment only.
        gradient = max(itemsize, 4) if self.microbatches > 1 and node.meta["backward"] else 0
        each = np.array([itemsize * int(o.gather != "per_use") + gradient for o in producer.options])
        cast = self.captured.parameters[node.name] in self.captured.rest_dtypes
        used = np.where(cast | (held[None] > local[:, None]), each[:, None] * held[None], 0.0)
        return used / float(self.stages)


def most_hidden(hidden: np.ndarray) -> np.ndarray:
    """What the best number of chunks hides of each redistribution, forward and backward (see ``Overlaps.hidden``)."""
    best = hidden.sum(axis=1).argmax(axis=0)
    most: np.ndarray = np.take_along_axis(hidden, best[None, None], axis=0)[0]
    return np.where(most.sum(axis=0) > 0, most, 0.0)
