"""Parts of tensors at places that values tell: queues, crops, rolls."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

from tests.capture.registry import loop, program
from tests.capture.runner import Run, numbers, sgd


class Queue(nn.Module):
    """As MoCo has one."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8)
        self.register_buffer("queue", torch.linspace(-1, 1, 8 * 16).view(8, 16))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def put(self, keys: Tensor) -> None:
        at = int(self.at)
        self.queue[:, at : at + keys.shape[0]] = keys.T
        self.at[0] = (at + keys.shape[0]) % 16

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.encoder(x))
        scores = h @ self.queue.clone().detach()
        self.put(h)
        return scores


@program(ranks=True)
class PutIntoAQueue(Queue):
    pass


@program(ranks=True)
class PutByItem(Queue):
    """With a filled place, and rows of the queue in front."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = self.queue.T.contiguous()

    @torch.no_grad()
    def put(self, keys: Tensor) -> None:
        at, rows = self.at.item(), keys.size(0)
        self.queue[at : at + rows] = keys.detach()
        self.at.fill_((at + rows) % 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(x)
        scores = h @ self.queue.clone().T
        self.put(h)
        return scores


@program(ranks=True)
class OneRowAtATime(Queue):
    """A ring of means, added to, with numbers for values."""

    def put(self, keys: Tensor) -> None:
        at = int(self.at)
        self.queue[:, at] = keys.mean(0).detach()
        self.queue[at, 3:5] = 0.5
        self.queue[..., at + 1] += 1.0
        self.at.add_(1)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 16)
        self.register_buffer("at", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        out = self.part(self.encoder(x), int(self.at))
        self.at += 1
        return out

    def part(self, h: Tensor, at: int) -> Any:
        raise NotImplementedError


@program(ranks=True)
class Crops(Counting):
    def part(self, h: Tensor, at: int) -> Tensor:
        return h[:, at : at + 4] * h.narrow(1, at + 1, 4) + h[..., at + 2 : at + 6]


@program(ranks=True)
class CropsOfImages(Counting):
    """In two dims, beside a new one."""

    def part(self, h: Tensor, at: int) -> Tensor:
        image = h.view(-1, 1, 4, 4)
        i = at % 2
        return image[:, 0, i : i + 2, i + 1 : i + 3][:, None].flatten(1) + image[:, :, i, 1 : 1 + 4 - 1].sum(-1)


@program(ranks=True)
class Elements(Counting):
    def part(self, h: Tensor, at: int) -> Tensor:
        return h[:, at] + h.select(1, at + 1) * h[1, at - 3] + torch.select(h, -1, at)


@program(ranks=True)
class ElementsByTensors(nn.Module):
    """A place that is a tensor of no dims is one that values tell, too."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 16)
        self.register_buffer("last", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(x)
        most = h.detach().sum(0).argmax()
        self.last[most] = 2.0
        return h[:, most] * h[most % 4, most - 1] + h[most % 4].sum() * self.last.sum()


@program(ranks=True)
class SegmentsByTensors(nn.Module):
    """As in VITS: each row's segment begins elsewhere, at tensors of no dims."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(x)
        begins = h.detach()[:, :12].argmax(1)
        out = torch.zeros_like(h[:, :4])
        for i in range(h.shape[0]):
            end = begins[i] + 5 - 1
            begin = end - 3
            out[i] = h[i, begins[i] : begins[i] + 4] * h[i, begin : 1 + end]
        return out


@program(ranks=True)
class Rolled(Counting):
    def part(self, h: Tensor, at: int) -> Tensor:
        most = int(h.detach().sum(0).argmax())
        return torch.roll(h, -most, 1) * torch.arange(16.0) + h.roll((at, 1), (1, 1))


@program(ranks=True)
class WrittenThroughAPart(Counting):
    """Eager's part is a view."""

    def part(self, h: Tensor, at: int) -> Tensor:
        part = h[:, at : at + 4]
        part.mul_(3.0)
        doubled = part * 2
        row = h[:, at + 8]
        row += 2.0
        return torch.cat([h, doubled, row[:, None]], 1)


@program(ranks=True)
class BesideIndices(Counting):
    """Places beside tensors that index, or a mask; as numbers and as tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.linspace(-1, 1, 64).view(4, 16))

    def part(self, h: Tensor, at: int) -> Tensor:
        rows = torch.tensor([0, 2, 1])
        mask = torch.arange(16) % 3 == 0
        self.seen[rows, self.at] = 5.0
        self.seen[at, mask] += 1.0
        self.seen[at : at + 2, rows] *= 2.0
        h = h * self.seen.sum(0)
        return h[rows, at] + h[self.at, rows] + h[at : at + 2, rows].sum() + h[rows, at : at + 2].sum(1)


@program(ranks=True)
class WrittenAtTwoPlaces(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(4, 16))

    def part(self, h: Tensor, at: int) -> Tensor:
        self.seen[at, self.at + 1] = 3.0
        self.seen[at : at + 2, at : at + 3] += h.detach()[:2, at + 1 : at + 4]
        out = h * 1.0
        out[at : at + 2, at] = h[0, at : at + 2]
        return out @ self.seen.T


@program(ranks=True)
class FromTheEnd(Counting):
    """Negative places, steps, and lists of places."""

    def part(self, h: Tensor, at: int) -> Tensor:
        back = at + 6
        h = h * 1.0
        h[:, -back : -back + 4] *= 2.0
        steps = h[:, at : at + 8 : 2] + h[:, -back - 3 : -back + 4 : 2]
        return steps * h[:, -back : -back + 4] + h[:, [at, at + 1, 3, -at - 1]]


@program(ranks=True)
class NarrowedAtATensor(Counting):
    def part(self, h: Tensor, at: int) -> Tensor:
        return h.narrow(1, self.at, 4) + torch.narrow(h, -1, start=self.at + 1, length=h.shape[0])[:, :1]


@program(ranks=True)
class RolledAsAWhole(Counting):
    def part(self, h: Tensor, at: int) -> Tensor:
        return h.roll(at) + torch.roll(h, -at)


@program(ranks=True)
class ReturnedPlace(Counting):
    """The number that was read, though the buffer moves on."""

    def part(self, h: Tensor, at: int) -> Any:
        self.before = at
        return h[:, at : at + 4], at


@program(ranks=True)
class AtAPlaceDrawn(nn.Module):
    """Segments of audio, by Python's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        at = random.randint(0, 12)
        return self.encoder(x)[:, at : at + 4]


@program(ranks=True, random=True)
class AtAPlaceDrawnByTorch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        at = torch.randint(0, 12, (1,)).item()
        return self.encoder(x)[:, at : at + 4]


@loop(ranks=True)
def a_queue_that_goes_round(run: Run) -> None:
    """Many calls, one trace."""
    model = run.compile(Queue().double())
    optimizer = sgd(model)
    for step in range(6):
        loss = model(numbers(8, 8, seed=step)).square().mean()
        run.note("loss", loss)
        loss.backward()
        run.note_gradients(model)
        run.note_state(model)
        optimizer.step()
        optimizer.zero_grad()


# -- refused --------------------------------------------------------------------------------------------------------


@program(refused="read it again")
class ReadAfterAChange(Counting):
    def part(self, h: Tensor, at: int) -> Tensor:
        h = h * 2
        part = h[:, at : at + 4]
        h.add_(1.0)
        return part * 2  # refused


@program(refused="clone")
class ReturnedBehindAChange(Counting):
    def part(self, h: Tensor, at: int) -> Any:
        h = h * 2
        part = h[:, at : at + 4]  # refused
        h.add_(1.0)
        return part, h


@program(refused="write to the tensor itself")
class WrittenThroughAViewOfAPart(Counting):
    def part(self, h: Tensor, at: int) -> Tensor:
        part: Any = h[:, at : at + 4]
        part[:, 1:].mul_(2.0)  # refused
        return h


@program(refused="clone")
class KeptOfWhatCallsChange(Queue):
    """The next call may read it behind what it has put there."""

    kept: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.at += 4  # 0 and 1 would be told

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(x)
        at = int(self.at)
        self.put(h)
        if self.kept is not None:
            h = h + self.kept.sum()
        self.kept = self.queue[:, at : at + 4]  # refused
        return h


@program()
class MixedFromAPlaceOn(Counting):
    """As StyleGAN mixes styles: nobody knows how large the part is."""

    def part(self, h: Tensor, at: int) -> Tensor:
        h, other = h * 2, h.tanh()
        h[:, at:] = other[:, at:]
        return h
