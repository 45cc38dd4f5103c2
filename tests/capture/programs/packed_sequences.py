"""Sequences of several lengths that are packed for recurrent layers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import rnn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.capture.registry import program
from tests.capture.runner import numbers

LENGTHS = torch.tensor([6, 2, 4, 1])


def several(step: int) -> tuple[Tensor, Tensor]:
    return numbers(4, 6, 8, seed=step), LENGTHS.roll(step)


class Packs(nn.Module):
    """Reads what comes out, and the states at the ends."""

    make: Any = partial(nn.LSTM, 8, 5, batch_first=True)
    total: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.rnn = self.make()
        size, sides = self.rnn.proj_size or 5, 1 + self.rnn.bidirectional
        self.each, self.last = nn.Linear(size * sides, 3), nn.Linear(size, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, states = self.rnn(packed)
        padded, counts = pad_packed_sequence(out, batch_first=True, total_length=self.total)
        hidden, cells = states if isinstance(states, tuple) else (states, states)
        return self.each(padded), self.last(hidden).sum(0) + cells.sum(), counts


@program(batch=several, ranks=True)
class PacksForAnLSTM(Packs):
    pass


@program(batch=several, ranks=True)
class PacksForBothDirections(Packs):
    make = partial(nn.LSTM, 8, 5, 2, batch_first=True, bidirectional=True)
    total = 6


@program(batch=several)
class PacksForAProjection(Packs):
    make = partial(nn.LSTM, 8, 5, batch_first=True, bidirectional=True, proj_size=3)


@program(batch=several)
class PacksForAGRU(Packs):
    make = partial(nn.GRU, 8, 5, 2, bias=False, batch_first=True, bidirectional=True)


@program(batch=lambda step: (numbers(4, 6, 8, seed=step), torch.tensor([3, 1, 2, 3])), ranks=True)
class PacksForAShorterOutput(Packs):
    """None is as long as the padding: all of them together are shorter, and are padded with something else."""

    make = partial(nn.RNN, 8, 5, nonlinearity="relu")

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        packed = rnn.pack_padded_sequence(x.transpose(0, 1), lengths.tolist(), enforce_sorted=False)
        out, last = self.rnn(packed)
        padded, _ = rnn.pad_packed_sequence(out, padding_value=-1.0)
        longer, counts = rnn.pad_packed_sequence(out, total_length=9, padding_value=0.5)
        return padded, longer.sum(0), last + counts.sum()


@program(batch=several)
class PooledOverSteps(Packs):
    """The mean over the steps of each, with states that are given."""

    make = partial(nn.GRU, 8, 5, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        packed = pack_padded_sequence(input=x, lengths=lengths, batch_first=True, enforce_sorted=False)
        out, last = self.rnn(input=packed, hx=torch.ones(1, len(x), 5, dtype=x.dtype))
        padded, counts = pad_packed_sequence(sequence=out, batch_first=True)
        return self.each(padded.sum(1) / counts[:, None]), self.last(last), counts


def with_gaps(step: int) -> tuple[Tensor, Tensor]:
    """Behind an end stands what is no number, or far too large."""
    x, lengths = several(step)
    behind = torch.arange(6) >= lengths[:, None]
    return x.masked_fill(behind[:, :, None], float("nan") if step % 2 else -1e9), lengths


@program(batch=with_gaps, ranks=True)
class PacksWhatIsPaddedWithAnything(Packs):
    """Nothing is read behind an end."""

    make = partial(nn.LSTM, 8, 5, 2, batch_first=True, bidirectional=True)


@program(batch=with_gaps)
class PadsWhatItPacks(Packs):
    """Without a layer between: zeros stand behind the ends."""

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        padded, counts = pad_packed_sequence(packed, batch_first=True, total_length=7)
        numbers, _ = pad_packed_sequence(
            pack_padded_sequence(x.detach().isnan().sum(-1), lengths, True, False), True, -1.0
        )
        return self.each(self.rnn(padded)[0]), numbers, counts


@program(batch=lambda step: (numbers(4, 6, 8, seed=step), torch.tensor([6, 4, 3, 1])))
def packs_by_functions_that_it_holds() -> nn.Module:
    """They were imported by another function, or are attributes."""
    from torch.nn.utils.rnn import pack_padded_sequence as pack

    class Holds(Packs):
        make = partial(nn.GRU, 8, 5, batch_first=True)

        def __init__(self) -> None:
            super().__init__()
            self.pad = partial(pad_packed_sequence, batch_first=True)

        def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            out, last = self.rnn(pack(x, lengths, batch_first=True))
            padded, counts = self.pad(out)
            return self.each(padded), self.last(last), counts

    return Holds()


def falling(step: int) -> tuple[Tensor, Tensor]:
    return numbers(4, 6, 8, seed=step), torch.tensor([[6, 4, 3, 1], [6, 6, 2, 1], [5, 4, 3, 2]][step])


@program(batch=falling, ranks=True)
class RowsOfPacked(Packs):
    """As captions of images are learned: each word counts once, whatever sentence it is of."""

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        out, _ = self.rnn(pack_padded_sequence(x, lengths, batch_first=True))
        words = pack_padded_sequence(x.argmax(-1) % 3, lengths, batch_first=True)[0]
        return self.each(out.data).mean(0), nn.functional.cross_entropy(self.each(out[0]), words)


@program(batch=falling, ranks=True)
class PacksRowsAnew(Packs):
    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        data, sizes, *_ = pack_padded_sequence(x, lengths, batch_first=True)
        out, states = self.rnn(rnn.PackedSequence(data.relu(), sizes))
        return self.each(out.data), *states, pad_packed_sequence(out)[0], sizes


@program(batch=several)
class PacksRowsOfUnsorted(Packs):
    """With the order of before, and without one."""

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        packed = packed._replace(data=packed.data.relu()).to(x.dtype)
        out, (last, _) = self.rnn(packed)
        other = rnn.PackedSequence(out.data.tanh(), out.batch_sizes, None, out.unsorted_indices)
        longest_first = rnn.PackedSequence(out.data, out.batch_sizes)
        padded = [pad_packed_sequence(each)[0] for each in (other, longest_first)]
        return self.each(other.data), last, *padded, packed.sorted_indices, packed.unsorted_indices


@program(batch=lambda step: (*numbers(6, 8, seed=step).split([3, 1, 2]),))
class PacksAList(Packs):
    def forward(self, *sequences: Tensor) -> Any:
        out, _ = self.rnn(rnn.pack_sequence(sequences, enforce_sorted=False))
        return [self.each(sequence) for sequence in rnn.unpack_sequence(out)]


@program(batch=lambda step: (numbers(4, 6, 8, seed=step), torch.tensor([6, 4, 3, 1]).add(step).clamp(max=6)))
class LengthsOfNumpy(Packs):
    """As encoders of speech synthesis write it."""

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        packed = pack_padded_sequence(x, lengths.cpu().numpy(), batch_first=True)
        out, (hidden, _) = self.rnn(packed)
        padded, counts = pad_packed_sequence(out, batch_first=True)
        return self.each(padded), self.last(hidden), counts


@program(batch=lambda step: (numbers(4, 6, 8, seed=step), torch.tensor([6, 4, 3, 1])))
class MasksBehindLengthsOfNumpy(Packs):
    """Through ``.data``: gradients are as without the mask."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
        packed = pack_padded_sequence(x, lengths.cpu().numpy(), batch_first=True)
        padded, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        out = self.each(padded)
        out.data.masked_fill_((torch.arange(6) >= lengths[:, None])[..., None], 0.0)
        return out


@program(batch=several, ranks=True)
class ReturnsPacked(Packs):
    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        out, (hidden, _) = self.rnn(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        return out, self.last(hidden)
