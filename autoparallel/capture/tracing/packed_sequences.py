"""Sequences of several lengths, packed for recurrent layers.

torch sorts them and takes them apart by steps, so that the lengths decide sizes.  A trace has padded sequences instead:
a recurrent layer goes over all steps, and what is behind an end changes nothing before it.  Backwards each sequence is
turned around by itself.  Where the model takes a packed one apart, its rows are those that a mask selects.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import rnn

from autoparallel.capture.tracing.stand_ins import replacement, replacements_of
from autoparallel.capture.tracing.trace import Trace
from autoparallel.graph.arrays import Array
from autoparallel.graph.lines import line_of_frame

_LAYERS: dict[str, Any] = {
    "LSTM": torch.lstm, "GRU": torch.gru, "RNN_TANH": torch.rnn_tanh, "RNN_RELU": torch.rnn_relu
}  # fmt: skip

_CLOSED = 1e4
"""What is added to a gate to open or close it altogether: its sigmoid is 1 or 0 in every dtype."""


@dataclass(frozen=True, eq=False)
class Packing:
    """How sequences are packed.

    Attributes:
        lengths: of the sequences, (sequences,).
        count: of the steps that they are padded to.
        order: the numbers of the sequences as they are packed, (sequences,); None where that is how they stand.
    """

    lengths: Tensor
    count: int
    order: Tensor | None

    @cached_property
    def sorted_lengths(self) -> Tensor:
        """Those of the sequences as they are packed, (sequences,)."""
        return self.lengths if self.order is None else self.lengths[self.order]

    @cached_property
    def within(self) -> Tensor:
        """Whether a step is within a sequence, as they are packed, (steps, sequences)."""
        return torch.arange(self.count).unsqueeze(1) < self.sorted_lengths

    @cached_property
    def batch_sizes(self) -> Tensor:
        """How many sequences have a step, (longest length,)."""
        sizes = self.within.sum(1)
        sizes = sizes[sizes > 0]
        vars(sizes)[_PACKING] = self
        return sizes

    @cached_property
    def places(self) -> Tensor | None:
        """Where each sequence is packed, (sequences,)."""
        return None if self.order is None else rnn.invert_permutation(self.order)


_PACKING = "packing"
"""The attribute of batch sizes that has their packing: with them a model packs what it has made of the rows."""


class PaddedSequence(rnn.PackedSequence):
    """Stands for a ``PackedSequence``.

    Attributes:
        steps: the padded sequences, (steps, sequences, features).
        packing: how they are packed.
    """

    steps: Tensor
    packing: Packing

    def __new__(cls, *fields: Any) -> Any:
        """A packed sequence of other leaves: of results of a call, among which the model returns one."""
        return tuple.__new__(rnn.PackedSequence, fields)

    @classmethod
    def of(cls, steps: Tensor, packing: Packing) -> PaddedSequence:
        """That of some steps."""
        sequence: PaddedSequence = tuple.__new__(cls, (None, None, None, None))
        sequence.steps, sequence.packing = steps, packing
        return sequence

    @cached_property
    def data(self) -> Tensor:
        """The rows, (rows, features)."""
        order = self.packing.order
        steps = self.steps if order is None else self.steps.index_select(1, order.to(self.steps.device))
        rows: Tensor = steps[self.packing.within.to(steps.device)]
        return rows

    batch_sizes = property(lambda self: self.packing.batch_sizes)
    sorted_indices = property(lambda self: self.packing.order)
    unsorted_indices = property(lambda self: self.packing.places)

    def __getitem__(self, key: Any) -> Any:
        names = self._fields[key]
        return getattr(self, names) if isinstance(names, str) else tuple([getattr(self, name) for name in names])

    def __iter__(self) -> Iterator[Any]:
        return iter(self[:])

    def to(self, *args: Any, **kwargs: Any) -> PaddedSequence:
        return PaddedSequence.of(self.steps.to(*args, **kwargs), self.packing)

    def _replace(self, **fields: Any) -> Any:
        return rnn.PackedSequence(*[fields.get(name, getattr(self, name)) for name in self._fields])


def _make(
    cls: type[rnn.PackedSequence],
    data: Tensor,
    batch_sizes: Tensor | None = None,
    sorted_indices: Tensor | None = None,
    unsorted_indices: Tensor | None = None,
) -> Any:
    """A ``PackedSequence`` of other rows that are packed as those of another one."""
    packing: Packing | None = None if batch_sizes is None else vars(batch_sizes).get(_PACKING)
    if packing is None:
        return _MAKE(cls, data, batch_sizes, sorted_indices, unsorted_indices)
    if sorted_indices is None and unsorted_indices is not None:
        sorted_indices = rnn.invert_permutation(unsorted_indices)
    within = packing.within.to(data.device)
    steps = data.new_zeros(*within.shape, *data.shape[1:])
    steps[within] = data
    if sorted_indices is not packing.order:
        lengths = packing.sorted_lengths
        back = None if sorted_indices is None else rnn.invert_permutation(sorted_indices)
        packing = Packing(lengths if back is None else lengths[back], packing.count, sorted_indices)
    back = packing.places
    return PaddedSequence.of(steps if back is None else steps.index_select(1, back.to(steps.device)), packing)


def _pack(
    trace: Trace, pack: Any, input: Tensor, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True
) -> PaddedSequence:
    trace.left_out[line_of_frame(sys._getframe(1))] = "a check of the lengths of sequences"
    steps = input.transpose(0, 1) if batch_first else input
    lengths = _as_tensor(lengths)
    order = None if enforce_sorted else lengths.sort(descending=True)[1]
    steps = _fill(steps, lengths, 0.0)  # what is padded with may be no number
    return PaddedSequence.of(steps, Packing(lengths, steps.shape[0], order))


def _as_tensor(lengths: Any) -> Tensor:
    """Lengths that are a tensor, a list of numbers, of which some may be open, or an array of numpy."""
    if isinstance(lengths, Array):
        lengths = lengths.tensor
    elif isinstance(lengths, np.ndarray):  # whose numbers Python was told
        lengths = lengths.tolist()
    elif isinstance(lengths, list | tuple) and any(isinstance(length, torch.SymInt) for length in lengths):
        lengths = torch.cat([torch.full((1,), length) for length in lengths])
    return torch.as_tensor(lengths, dtype=torch.int64)


def _pad(
    _: Trace,
    pad: Callable[..., tuple[Tensor, Tensor]],
    sequence: Any,
    batch_first: bool = False,
    padding_value: float = 0.0,
    total_length: int | None = None,
) -> tuple[Tensor, Tensor]:
    if not isinstance(sequence, PaddedSequence):
        return pad(sequence, batch_first, padding_value, total_length)
    x, count, lengths = sequence.steps, sequence.packing.count, sequence.packing.lengths
    length = int(lengths.max()) if total_length is None else total_length
    if padding_value:
        x = _fill(x, lengths, padding_value)
    if length != count:
        more = x.new_full((max(length - count, 0), *x.shape[1:]), padding_value)
        x = torch.cat([x[:length], more]) if length > count else x[:length]
    return x.transpose(0, 1) if batch_first else x, lengths


def _count_steps(steps: Tensor) -> Tensor:
    """The numbers of the steps, (steps, 1)."""
    return torch.arange(steps.shape[0], device=steps.device).unsqueeze(1)


def _fill(steps: Tensor, lengths: Tensor, value: float) -> Tensor:
    """The steps, with a number behind the ends."""
    behind = _count_steps(steps) >= lengths.to(steps.device)
    return steps.masked_fill(behind.view(*behind.shape, *[1] * (steps.dim() - 2)), value)


def _forward(_: Trace, forward: Callable[..., Any], layer: nn.RNNBase, input: Any, hx: Any = None) -> Any:
    if not isinstance(input, PaddedSequence):
        return forward(layer, input, hx)
    steps, lengths, numbers = input.steps, input.packing.lengths.to(input.steps.device), _count_steps(input.steps)
    within = numbers < lengths
    backwards = torch.where(within, lengths - 1 - numbers, numbers).unsqueeze(-1)  # what is behind an end stays
    sides = 2 if layer.bidirectional else 1
    sizes = [layer.proj_size or layer.hidden_size] + [layer.hidden_size] * (layer.mode == "LSTM")
    if hx is None:
        hx = [steps.new_zeros(layer.num_layers * sides, steps.shape[1], size) for size in sizes]
    states = [hx] if isinstance(hx, Tensor) else hx
    ends = []
    for number in range(layer.num_layers):
        results = []
        for place in range(number * sides, (number + 1) * sides):
            before = [state[place : place + 1] for state in states]
            turned = steps.gather(0, backwards.expand_as(steps)) if place % sides else steps
            result, *after = _run(layer.mode, turned, within, lengths, before, layer.all_weights[place])
            results.append(result.gather(0, backwards.expand_as(result)) if place % sides else result)
            ends.append(after)
        steps = torch.cat(results, -1) if sides == 2 else results[0]
        if layer.dropout and number < layer.num_layers - 1:
            steps = nn.functional.dropout(steps, layer.dropout, layer.training)
    last = tuple([torch.cat(parts) for parts in zip(*ends, strict=True)])
    return PaddedSequence.of(steps, input.packing), last if layer.mode == "LSTM" else last[0]


def _run(
    mode: str, steps: Tensor, within: Tensor, lengths: Tensor, before: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """What one layer makes of the steps in one direction, with zeros behind the ends, and its states there."""
    has_biases = len(weights) >= 4
    run: Any = _LAYERS[mode]
    options = (has_biases, 1, 0.0, False, False, False)
    if mode == "LSTM":  # whose cells keep what they hold behind the end: one feature more opens or closes their gates
        gates = torch.zeros(4, len(weights[0]) // 4, 1, dtype=steps.dtype, device=steps.device)
        gates[0], gates[1] = -_CLOSED, _CLOSED
        behind = (~within).to(steps.dtype).unsqueeze(-1)
        weights = [torch.cat([weights[0], gates.flatten(0, 1)], 1), *weights[1:]]
        result, _, *cells = run(torch.cat([steps, behind], -1), before, weights, *options)
    else:
        result, *cells = run(steps, before[0], weights, *options)[:1]
    last = (lengths - 1).view(1, -1, 1).expand(1, -1, result.shape[-1])
    return torch.where(within.unsqueeze(-1), result, 0.0), result.gather(0, last), *cells


_MAKE = rnn.PackedSequence.__new__

NAMES: tuple[tuple[Any, str, Any], ...] = (
    *replacements_of(rnn.pack_padded_sequence, _pack),
    *replacements_of(rnn.pad_packed_sequence, _pad),
    (rnn.PackedSequence, "__new__", staticmethod(_make)),
    *(replacement(cls, "forward", _forward) for cls in (nn.LSTM, nn.GRU, nn.RNN)),
)
"""The names of torch that are replaced while a model is traced."""
