"""What linear layers hide of what they exchange, where they run in chunks of rows (see ``passes.chunk_linears``).

What brings a sum to its readers travels beside the products that make it; any other redistribution, beside those of
the linear layers that read it.  In ``n`` chunks an exchange and the products beside it take as long as the longer of
the two and one chunk of the shorter, and ``n`` latencies.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import fx

from autoparallel.passes.chunk_linears import LINEAR
from autoparallel.placements import Layout, largest_piece
from autoparallel.placements.redistribution import PARTIAL
from autoparallel.planner.calls.options import Reader, Variable
from autoparallel.planner.space.subject import Subject
from autoparallel.planner.thresholds import THRESHOLDS


class Overlaps:
    """Tells what chunks hide of each redistribution.

    Attributes:
        counts: the numbers of chunks that are compared; none where nothing overlaps, or a pipeline's stages run.
    """

    def __init__(self, subject: Subject) -> None:
        request, self.profile, self.axis_sizes = subject.request, subject.profile, subject.axis_sizes
        self.size, chunks = subject.size, request.linear_chunks
        # These are not cut: the losses behind them go through their rows in chunks.
        self._heads = [head.product for head in subject.heads]
        counts = THRESHOLDS.linear_chunks if chunks is None and not request.stages else (chunks or 1,)
        self.counts = tuple(count for count in counts if count > 1 and self.profile.overlap)

    def hidden(
        self,
        producer: Variable,
        readers: Sequence[Reader],
        columns: Sequence[Layout],
        codes: Sequence[np.ndarray],
        exchange: tuple[np.ndarray, np.ndarray],
        *,
        shared: bool,
        leaves: bool,
    ) -> np.ndarray | None:
        """Seconds of a redistribution that run beside products: [count, forward and backward, option, layout]; below
        zero where its chunks cost more than they hide. None where no linear layer makes the tensor, nor are all its
        readers such.

        Args:
            columns: the layouts that each option's result may be brought into; each option's of the one reader, unless
                they are ``shared``.
            codes: the placements of each option's result and of these, as numbers (see ``LayoutTable.codes``).
            exchange: the seconds that takes, forward and backward, [option, layout] each.
            leaves: whether the tensor leaves the graph.
        """
        node = producer.node
        makes = self._is_free(node)
        reads = not leaves and all(self._is_free(reader.node) and not place for reader, place in readers)
        if not self.counts or not (makes or reads):
            return None
        rows, latency, sums = self._steps(producer, *codes)
        products = np.zeros((2, *rows.shape))
        if reads:
            products += _read_seconds(readers, columns, shared=shared)[:, None]
        if makes:
            passes = np.array([option.passes for option in producer.options]).T[:, :, None]
            products = np.where(sums | (not reads), passes, products)
        seconds = np.stack(exchange)
        hidden = []
        for count in self.counts:
            saved = (1 - 1 / count) * np.minimum(seconds, products) - (count - 1) * (latency + self.profile.launch)
            hidden.append(np.where((rows >= count) & (seconds > latency), self.profile.overlap * saved, 0.0))
        return np.stack(hidden)

    def _is_free(self, node: fx.Node) -> bool:
        linear = node.target is LINEAR and node not in self._heads and not node.kwargs
        return linear and bool(node.meta["val"].is_floating_point())

    def _steps(
        self, producer: Variable, before: np.ndarray, after: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each way between two layouts the rows that a rank can cut, none where it is more than one step or an
        exchange of all with all; the latency of its collective; and whether it brings a sum."""
        shape = self.size.shape(producer.node)
        one, other = np.broadcast_arrays(before[:, None], after[None])
        differs = one != other
        axis = differs.argmax(axis=-1)
        src, dst = (np.take_along_axis(codes, axis[..., None], axis=-1)[..., 0] for codes in (one, other))
        step = (differs.sum(axis=-1) == 1) & ((src < 0) | (dst < 0))
        last = len(shape) - 1
        dims = np.minimum(np.where(src < 0, last, src), np.where(dst < 0, last, dst))
        pieces = [largest_piece(shape, option.result, self.axis_sizes) for option in producer.options]
        leading = [np.cumprod([1, *piece]) for piece in pieces]
        rows = np.take_along_axis(np.array(leading), np.maximum(dims, 0), axis=1)
        each = [self.profile.step_seconds(self.axis_sizes, "all_gather", (a,), 0) for a in range(len(self.axis_sizes))]
        return np.where(step, rows, 0), np.array(each)[axis], src == PARTIAL


def _read_seconds(readers: Sequence[Reader], columns: Sequence[Layout], *, shared: bool) -> np.ndarray:
    """Seconds of the linear layers that read each layout, forward and backward: the fastest that do; [2, layout]."""
    if not shared:
        return np.array([option.passes for option in readers[0][0].options]).T
    total = np.zeros((2, len(columns)))
    for reader, place in readers:
        fastest: dict[Layout, tuple[float, float]] = {}
        for option in reader.options:
            need = option.needs[place]
            fastest[need] = min(option.passes, fastest.get(need, (np.inf, np.inf)))
        total += np.array([fastest.get(column, (0.0, 0.0)) for column in columns]).T
    return total
