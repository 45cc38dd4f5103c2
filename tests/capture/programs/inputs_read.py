"""Python that reads whole numbers of the inputs: each step has others, the last those of the first."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from autoparallel.text import LOGGER
from tests.capture.programs.loops import finish
from tests.capture.registry import loop, program
from tests.capture.runner import Run, numbers, sgd

LENGTHS = ([3, 4], [1, 6], [3, 4])


def ragged(step: int) -> tuple[Any, ...]:
    """Eight sequences of seven tokens, and how the tokens fall into two parts."""
    return numbers(8, 7, 8, seed=step), torch.tensor(LENGTHS[step])


def padded(step: int) -> tuple[Any, ...]:
    """Four sequences, of which as many tokens count as a mask says."""
    lengths = torch.tensor(([6, 2, 5, 6], [6, 3, 4, 6], [6, 2, 5, 6])[step])
    return numbers(4, 6, 8, seed=step), torch.arange(6) < lengths[:, None]


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        return self.read(self.a(x).tanh(), lengths)

    def read(self, h: Tensor, lengths: Tensor) -> Any:
        raise NotImplementedError


@program(batch=ragged, ranks=True)
class SplitsByLengths(Reader):
    def read(self, h: Tensor, lengths: Tensor) -> Any:
        return [self.b(part).mean(1) * (i + 1) for i, part in enumerate(h.split(lengths.tolist(), dim=1))]


@program(batch=ragged, ranks=True)
class CutsToTheLongest(Reader):
    def read(self, h: Tensor, lengths: Tensor) -> Any:
        most = int(lengths.max())
        return self.b(h[:, :most]).sum(1) / most, self.b(h)[:, : lengths.max()].mean(1)


@program(batch=ragged, ranks=True)
class LoopsOverParts(Reader):
    def read(self, h: Tensor, lengths: Tensor) -> Any:
        out, start = torch.zeros_like(h), 0
        for length in lengths:
            stop = start + length.item()
            if length > 3:
                out[:, start:stop] = h[:, start:stop].flip(1)
            start = stop
        return self.b(out + h)


def kinds_of_rows(step: int) -> tuple[Any, ...]:
    """Eight sequences, and the kind of each."""
    kinds = ([0, 1, 1, 3, 0, 1, 1, 3], [2, 2, 2, 2, 2, 2, 2, 2], [0, 1, 1, 3, 0, 1, 1, 3])
    return numbers(8, 7, 8, seed=step), torch.tensor(kinds[step])


@program(batch=kinds_of_rows, ranks=True)
class LoopsOverKinds(Reader):
    def read(self, h: Tensor, lengths: Tensor) -> Any:
        kinds, places, counts = torch.unique(lengths, return_inverse=True, return_counts=True)
        out = h.mean(1) * (places + 1).unsqueeze(1)
        for kind, count in zip(kinds, counts, strict=True):
            out = out + self.b(h[lengths == kind]).sum() * kind / count
        for i in range(len(kinds)):
            out = out + i * kinds[i] * h[places == i].mean()
        return out


@program(batch=kinds_of_rows)
class LoopsOverRuns(Reader):
    def read(self, h: Tensor, lengths: Tensor) -> Any:
        out: list[Tensor] = []
        start = 0
        for stop in lengths.unique_consecutive(return_counts=True)[1].cumsum(0):
            out.append(self.b(h[start:stop]).mean(0) * stop)
            start = int(stop)
        return torch.cat(out)


@program(batch=lambda step: ([numbers(4, n, 8, seed=9 * step + i) for i, n in enumerate((6, 6, 4, 4, 4)[: 5 - step])],))
class CutsSetsOfCrops(nn.Module):
    """Crops of one size go through the layers together, as in DINO; what it loops over follows from sizes alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, crops: list[Tensor]) -> Tensor:
        sizes = torch.tensor([crop.shape[1] for crop in crops])
        start, out = 0, torch.empty(0, dtype=crops[0].dtype)
        for stop in torch.cumsum(torch.unique_consecutive(sizes, return_counts=True)[1], 0):
            out = torch.cat([out, self.a(torch.cat(crops[start:stop])).tanh().mean(1)])
            start = stop
        return out


@program(batch=ragged)
class RepeatsByLengths(Reader):
    def read(self, h: Tensor, lengths: Tensor) -> Any:
        parts = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        sums = h.new_zeros(h.shape[0], len(lengths), 8).index_add(1, parts, h)
        spread = sums.repeat_interleave(lengths, dim=1)
        return self.b(spread * parts[:, None])


@program(batch=ragged, ranks=True)
class RepeatsByOneLength(Reader):
    """One count for all: of a row with a single image, as in NaViT."""

    def read(self, h: Tensor, lengths: Tensor) -> Any:
        first = lengths[:1]
        rows = torch.repeat_interleave(first), torch.arange(1).repeat_interleave(repeats=first), torch.arange(7)
        spread = h.mean(1, keepdim=True).repeat_interleave(first, dim=1)
        return self.b(spread) * int(first), self.b(h + pad_sequence([*rows]).sum(1)[:, None])


@program(batch=ragged)
class BoundsOfParts(Reader):
    """Sums that count up, changed in place, as arrays of numpy."""

    def read(self, h: Tensor, lengths: Tensor) -> Any:
        bounds = torch.zeros(len(lengths) + 1, dtype=torch.long)
        bounds[1:] = lengths.cumsum(0)
        bounds.clamp_(max=h.shape[1])
        return [self.b(h[:, i:j]).mean(1) for i, j in itertools.pairwise(np.asarray(bounds))]


@program(batch=ragged)
class TensorsAsSizes(Reader):
    """As Mistral 3 cuts images: sizes are tensors of no dims."""

    def read(self, h: Tensor, lengths: Tensor) -> Any:
        first, second = h.split([*lengths], dim=1)
        ones = torch.ones(lengths[0], 2).sum() + h.new_zeros((lengths[1],)).numel()
        tiles = self.b(second).view(len(h), lengths[1], 2, -1).narrow(1, 0, lengths.min()).sum(1)
        return self.b(first).mean(1) * ones, F.unfold(first.reshape(-1, 1, lengths[0], 8), 1).sum(-1), tiles


@program(batch=ragged)
class PositionsOfParts(Reader):
    def read(self, h: Tensor, lengths: Tensor) -> Any:
        positions = torch.cat([torch.arange(length) for length in lengths])
        return self.b(h) * torch.tensor([lengths.max() + 1, lengths.min(), 3, 4]), positions


@program(batch=padded, ranks=True)
class GroupsOfRows(Reader):
    """As Qwen2-VL finds positions of text and images, in each sequence without what is padded."""

    def read(self, h: Tensor, lengths: Tensor) -> Any:
        out = []
        for row, mask in zip(h, lengths, strict=True):
            kinds = torch.arange(mask.shape[0])[mask].remainder(4).div(2, rounding_mode="floor")
            for kind, group in itertools.groupby(kinds.tolist()):
                rows = row[mask][: len(list(group))]
                out.append(self.b(rows).mean(0) * (kind + 1))
        return torch.stack(out).sum(0) / len(out)


@program(batch=padded, ranks=True)
class AddsToTheSelected(Reader):
    """As many rows as something else has says how many a mask selects."""

    def read(self, h: Tensor, lengths: Tensor) -> Any:
        h = h.clone()
        extra = self.b.weight.new_ones(int(lengths.sum()), 8).cumsum(0)
        h[lengths, :] = h[lengths, :].clone() + extra
        return self.b(h)


@program(batch=ragged)
class WithTheLayersAlike(Reader):
    """Each layer of a stack reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def read(self, h: Tensor, lengths: Tensor) -> Any:
        for layer in self.layers:
            first, second = h.split(lengths.tolist(), dim=1)
            h = torch.cat([layer(first), layer(second).tanh()], dim=1)
        return self.b(h)


@program(batch=ragged)
class EachLayerReadsAnother(WithTheLayersAlike):
    def read(self, h: Tensor, lengths: Tensor) -> Any:
        for number, layer in enumerate(self.layers):
            h = layer(h) * (1 + lengths[number % 2].item()) / 4
        return self.b(h)


@program(batch=ragged)
class EachWayAProgramOfItsOwn(Reader):
    """What no program of both ways can do: the inputs alone tell which it is."""

    def read(self, h: Tensor, lengths: Tensor) -> Any:
        if lengths[0] > 2:
            self.last = 1.0
            return h.sum(-1)
        return self.b(h), h


@program(batch=ragged)
class AsManyAsTheLargestSays(Reader):
    """``bincount`` and ``one_hot`` of an input, without a number of classes."""

    def read(self, h: Tensor, lengths: Tensor) -> Any:
        counts = torch.bincount(lengths).to(h.dtype)
        weighed = (lengths - 1).bincount(weights=lengths.double())
        chosen = nn.functional.one_hot(lengths).to(h.dtype).sum(0)
        return self.b(h[:, :2]).flatten(1) * (counts.square().sum() + weighed.sum()), chosen * h.sum()


def labelled(step: int) -> tuple[Any, ...]:
    """Forty rows and their classes, of which some are there."""
    return numbers(40, 8, seed=step), torch.arange(40) % (20 - step % 2)


@program(batch=labelled)
class AsksWhichClassesAreThere(Reader):
    """As the Lovász loss does: more answers than numbers may be read, and all sizes stay open."""

    def read(self, h: Tensor, lengths: Tensor) -> Any:
        losses = []
        for number in range(20):
            rows = (lengths == number).to(h.dtype)
            if rows.sum() == 0:
                continue
            losses.append((rows @ h).square().sum() / rows.sum())
        return sum(losses) * self.b(h)


@program(batch=ragged)
class ChecksBesideReading(Reader):
    """What only raises is left out, also where it asks by ``item()``."""

    def read(self, h: Tensor, lengths: Tensor) -> Any:
        if h.isnan().any().item():
            raise ValueError("not a number")
        return self.b(h[:, : lengths.max().item()])


@program(batch=ragged)
class ReadsTheSumBeforeAWrite(Reader):
    def read(self, h: Tensor, lengths: Tensor) -> Any:
        later = lengths + 1
        total = later.sum()
        later.mul_(2)
        return self.b(h[:, : later.min().item()]) * int(total), torch.tensor([h[0, 0, :1], h[0, 0, 1:2]])


@program(batch=padded, ranks=True)
class WritesThroughViews(Reader):
    """As SmolVLM marks a first image: what lies in one memory is read by another view of it."""

    def read(self, h: Tensor, lengths: Tensor) -> Any:
        rows = lengths.any(1)
        rows[0] |= ~rows.any()
        marks = torch.zeros_like(h[..., 0], dtype=torch.long)
        turned, last = marks.t(), marks[-1]
        for row, n in zip(marks, lengths.sum(1), strict=True):
            row[:n] = 1
        turned[0].add_(2)
        last.view(2, 3)[1, 1:] += lengths[0, :2]
        marks[1:].data.clamp_(max=2)
        sizes = [*turned.sum(0).tolist(), *last.tolist(), int(rows.sum())]
        marks.fill_(7)
        spread = last[:1].expand(3)
        last[0] = 4
        sizes += [*last.tolist(), *spread.tolist(), turned[1, 1].item()]
        return self.b(h * sum(size * 0.9**place for place, size in enumerate(sizes)))


@program(batch=padded)
class WritesOneOfTwoParts(Reader):
    """Views of one memory of which nobody holds the whole; a part that is written leaves the other alone."""

    def read(self, h: Tensor, lengths: Tensor) -> Any:
        first, second = torch.unravel_index(lengths.sum(1), (3, 4))
        first.mul_(2)
        second[1:] = first[1:]
        places = [*first.tolist(), *second.tolist()]
        return self.b(h * sum(size * 0.9**place for place, size in enumerate(places)))


@program(batch=ragged, refused="make it contiguous")
class ReadsAnotherPlaceOfAMemory(Reader):
    """What lies beside a view is not of its values."""

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        last = (lengths + 1)[1:]
        first = last.add_(1).as_strided((1,), (1,), 0)  # refused
        return self.b(self.a(x)[:, : first.item()])


@program(batch=padded, ranks=True)
class AttendsGloballyWhereAsked(Reader):
    """As Longformer does: positions as a tuple, a length that is divided by torch, a size of an interpolation."""

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        h = self.a(x).tanh()
        if not (mask == 0).flatten().any().item():
            return self.b(h)
        asked = mask.nonzero(as_tuple=True)
        most = mask.sum(1).max()
        kept = torch.div(h.shape[1], 2, rounding_mode="trunc") + most
        spread = F.interpolate(h.mT, size=(kept,), mode="linear").sum(-1)
        chosen = h[asked] * len(asked[0])
        return self.b(h.index_put(asked, chosen)).sum(1) + self.b(spread)


@program(batch=ragged)
class WritesWhatItComputesThroughAView(Reader):
    """Nobody knows the values of a memory to which what follows from parameters was written, by another name of it: a
    number of it is a size that values tell."""

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        later = lengths + 1
        later.data[0] = self.a(x).argmax()
        return self.b(self.a(x)[:, : later[0].item()])


@program(batch=ragged)
class ReadsAListThatIsWritten(Reader):
    """What nobody follows is a size that values tell."""

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        later = lengths + 1
        torch._foreach_add_([later], 1)
        return self.b(self.a(x)[:, : later.min().item()])


@program(batch=ragged, refused="change the tensor")
class WritesToNumpy(Reader):
    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        later = lengths.clone()
        later.numpy()[0] += 1  # refused
        return self.b(self.a(x)[:, : later.min().item()])


@program(batch=ragged, random=True)
class ReadsWhatItDraws(Reader):
    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        most = torch.randint(1, 3, (1,)) + lengths[:1]
        return self.b(self.a(x)[:, : most.item()])


@program(batch=ragged)
class ReadsWhatItComputes(Reader):
    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        most = self.a(x).argmax(-1).clamp(max=3).max() + lengths.min()
        return self.b(self.a(x)[:, : most.item()])


@program(batch=ragged, between=lambda model, step: model.most.fill_(3 + step), ranks=True)
class ReadsABuffer(Reader):
    """Behind a keyword of a call that Python reads the result of."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("most", torch.tensor(3))

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        most = lengths.max().clamp(max=self.most)
        return self.b(self.a(x)[:, : most.item()])


@program(batch=ragged)
class ChangesWhatItReads(Reader):
    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        lengths.add_(1)
        return self.b(self.a(x)[:, : lengths.max().item()])


class Pools(nn.Module):
    """Graph convolutions with self loops, pooled by graphs, as torch_geometric's are: a vector says how many."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, edges: Tensor, graphs: Tensor) -> Tensor:
        edges = edges[:, edges[0] != edges[1]]
        nodes = torch.arange(x.shape[0])
        source, target = torch.cat([edges, torch.stack([nodes, nodes])], 1)
        degrees = torch.zeros(x.shape[0], dtype=x.dtype).index_add(0, target, torch.ones_like(target, dtype=x.dtype))
        h = self.a(x)
        h = torch.zeros_like(h).index_add(0, target, h[source] / degrees[source].sqrt().unsqueeze(1)).tanh()
        pooled = h.new_zeros(int(graphs.max()) + 1, h.shape[1]).index_add(0, graphs, h)
        return self.b(pooled)


@program(ranks=True)
class StepsOnAGrid(nn.Module):
    """A solver with a fixed step: what Python reads of times follows from numbers, of which the trace has all."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        times = torch.linspace(0, 1, 3).to(x)
        count = torch.ceil((times[-1] - times[0]) / 0.3 + 1).item()
        grid = torch.arange(0, count).type_as(times) * 0.3 + times[0]
        grid[-1] = times[-1]
        ends: list[Tensor] = [x]
        for before, now in itertools.pairwise(grid):
            x = x + (now - before) * self.a(x).tanh()
            while len(ends) < len(times) and now >= times[len(ends)]:
                ends.append(x)
        return torch.stack(ends) * sum(times.tolist())


@loop(ranks=True)
def pools_of_graphs(run: Run) -> None:
    """As many nodes and edges as there are, which are no reason for a trace; the last batch has fewer graphs."""
    lines: list[str] = []
    listener = lambda record: not lines.append(record.getMessage())  # noqa: E731
    model = run.compile(Pools().double())
    optimizer = sgd(model)
    LOGGER.addFilter(listener)
    try:
        for step, counts in enumerate(([3, 5, 4, 4], [6, 2, 5, 5], [3, 3, 5, 3], [4, 4, 4, 6], [5, 5])):
            generator = torch.Generator().manual_seed(step)
            edges = torch.randint(0, sum(counts), (2, 20 + 3 * step), generator=generator)
            graphs = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
            model(numbers(sum(counts), 8, seed=step), edges, graphs).square().mean().backward()
            finish(run, model, optimizer)
    finally:
        LOGGER.removeFilter(listener)
    again = [line for line in lines if "once more" in line]
    assert len(again) <= 1 and all("int(graphs.max())" in line for line in again), again
