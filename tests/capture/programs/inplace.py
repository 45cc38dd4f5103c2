"""In-place operators, and views that they write through."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.registry import program
from tests.capture.runner import tokens


class Two(nn.Module):
    """Two linear layers, for programs to use as they like."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)


class TwoAndAMean(Two):
    """With a buffer for programs to change."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))


@program(ranks=True)
class FillDiagonal(Two):
    """Self-similarities without the diagonal: contrastive losses."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        c = h @ h.T
        c.fill_diagonal_(0)
        return c.logsumexp(-1) + self.b(x).sum(-1)


@program()
class FillDiagonalOfCovariance(Two):
    """Barlow twins, VICReg."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) - self.a(x).mean(0)
        c = h.T @ h / (x.shape[0] - 1)
        return c.fill_diagonal_(1.0).square().sum() / 8 + self.b(x).var(0).mean()


@program(ranks=True)
class SliceAssignment(Two):
    """Half of a tensor of zeros is filled."""

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros(x.shape[0], 16)
        out[:, :8] = self.a(x)
        out[:, 8:] += self.b(x)
        return out


@program()
class DropoutThatDropsNothing(Two):
    """Its result is its operand, which is written to through either."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        same, other = F.dropout(h, 0.0), F.dropout(h, 0.5, training=False)
        h[:, :2] = 0.5
        other.mul_(self.b(x))
        return h + same * 2 + other


@program()
class MaskedAssignment(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h = h.clone()
        h[x > 0] = 0.5
        return self.b(h)


@program(ranks=True)
class MaskedFillInPlace(Two):
    def forward(self, x: Tensor) -> Tensor:
        scores = self.a(x)
        scores.masked_fill_(x < 0, float("-inf"))
        return self.b(scores.softmax(-1).nan_to_num())


@program()
class ReluInPlace(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.relu(self.a(x), inplace=True)).add_(1).mul_(2)


@program()
class WriteThroughView(Two):
    """A view is changed, the base is used."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) + 0
        left = h.view(-1, 2, 4)[:, 0]
        left.mul_(3)
        return self.b(h)


@program()
class WriteThroughChunks(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).clone()
        one, other = h[:, :4], h[:, 4:]
        one.add_(other)
        return self.b(h) * one.sum(-1, keepdim=True)


@program()
class WriteThroughTranspose(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).clone()
        h.t()[2].zero_()
        return self.b(h)


@program()
class IndexPut(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        out = torch.zeros_like(h)
        out[:, torch.tensor([3, 1, 1])] = h[:, :3] * 2
        out.index_add_(1, torch.tensor([0, 0, 5]), h[:, 3:6])
        return self.b(out)


@program(ranks=True)
class ScatterAdd(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        index = x.argsort(dim=-1)
        return torch.zeros_like(h).scatter_add_(1, index, h) + torch.zeros_like(h).scatter(1, index, self.b(x))


@program()
class CopyInPlace(Two):
    """``copy_`` into what was made without gradients, another shape."""

    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty(x.shape[0], 3, 8)
        out.copy_(self.a(x)[:, None])
        out[:, 1].copy_(self.b(x))
        return out


@program()
class DataOfActivation(Two):
    """``x.data`` shares memory and no history."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h) * h.data.abs().amax(-1, keepdim=True)


@program()
class DataOfWeight(Two):
    """Weights are read through ``.data`` for a scale."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) / self.a.weight.data.norm()


@program(batch=tokens)
class EmbeddingScaledInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.b = nn.Embedding(8, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.table(ids)
        h *= 8**0.5
        h[:, 0] = 0
        h += torch.arange(6.0)[:, None]
        return self.b(h)


@program(ranks=True)
class EmbeddingRenorm(nn.Module):
    """``max_norm`` changes the weight in forward: the rows that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 8, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x.abs().argmax(-1))


@program(ranks=True)
class EmbeddingRenormTwice(EmbeddingRenorm):
    """Items that are liked and items that are not, of one table."""

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x.abs().argmax(-1)) * self.table(x.argmin(-1))


@program()
class SwapColumns(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).clone()
        h[:, [0, 1]] = h[:, [1, 0]]
        h[..., ::2] *= -1
        return self.b(h)


@program()
class AccumulateInLoop(Two):
    """A running sum in place over a Python loop."""

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for i in range(4):
            total += torch.sin(self.a(x) * (i + 1)) / (i + 1)
        return self.b(total)


@program()
class BufferWrittenBySlice(nn.Module):
    """A queue of keys (MoCo): rows of a buffer are written, under no_grad."""

    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.register_buffer("queue", torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        q = F.normalize(self.a(x), dim=-1)
        logits = q @ self.queue.clone().T
        with torch.no_grad():
            self.queue[4:] = self.queue[:4].clone()
            self.queue[:4] = q
        return logits


@program()
class BufferGetsGradientHistory(nn.Module):
    """A buffer that takes a differentiable value without detach: eager keeps the graph until the next call."""

    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.register_buffer("last", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        out = h - self.last
        self.last = h.mean(0).detach()
        return out


@program(ranks=True)
class ViewsOfEinsum(Two):
    """An einsum of one operand without a sum gives a view: it is written to, and what it is a view of."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        w = self.a.weight * 1
        torch.einsum("ii->i", w).zero_()
        h = self.b(x)
        turned = torch.einsum("ij->ji", h)
        h.add_(1)
        return x @ w, turned * 2


@program(ranks=True)
class LossFromANumber(Two):
    """A loss that begins as a tensor of a number, to which terms are added in place."""

    def forward(self, x: Tensor) -> Tensor:
        loss = torch.tensor(0.0)
        for layer in (self.a, self.b):
            x = layer(x).tanh()
            loss += x.mean()
        return loss + x.square().sum()


@program(ranks=True)
class PowersInPlace(Two):
    """Powers in place, whose operator's overload is called otherwise than that which makes a new tensor."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h **= 2
        g = self.b(x)
        g.float_power_(2.0)
        return h + g.pow_(torch.tensor(2))


@program(ranks=True)
class CopiedIntoWholeNumbers(Two):
    """What a buffer of another dtype is given is cut off, also for who reads the buffer behind it."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(8, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.steps.copy_(10 * h.detach().mean(0))
        return self.b(h) * self.steps


@program(ranks=True)
class StatisticsInPlace(Two):
    """Buffers that are written several times, of which one becomes another's copy on the way."""

    average: Tensor
    before: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("before", torch.ones(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.relu(self.norm(self.a(x)), inplace=True)
        with torch.no_grad():
            self.average.lerp_(h.mean(0), 0.1)
            self.before.copy_(self.average)
            self.average.add_(1.0)
            self.before.mul_(2.0)
        g = self.b(h) * self.average.clone()
        self.average.mul_(0.5)
        return g + self.before, self.average * h


@program(refused="clone")
class ShiftedOverItself(Two):
    """As modded-nanogpt shifts its keys: in eager, each row that is written is read for the next."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h[1:, 2:6] = h[:-1, 2:6]  # refused
        return self.b(h)


@program(refused="clone")
class AddedOverItself(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h[:, 1:7] += h[:, :6]  # refused
        return self.b(h)


@program(ranks=True)
class PartsOfOneTensor(Two):
    """Parts beside each other, of which none has elements of another."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h[:, :3] = h[:, 5:]
        h[:, ::2] += h[:, 1::2]
        h[:, 4:].copy_(h[:, :4] * 2)
        h[:, 1] = h[:, 2]
        h[1:, 2:6] = h[:-1, 2:6].clone()
        return self.b(h)


@program(refused="clone")
class RowsOverThemselves(Two):
    """Seen below what ``vmap`` shows its function."""

    def forward(self, x: Tensor) -> Tensor:
        def shift(row: Tensor) -> Tensor:
            row = row.clone()
            row[1:] = row[:-1]  # refused
            return row

        return self.b(torch.vmap(shift)(self.a(x)))


@program(ranks=True)
class RowsByVmap(Two):
    """Parts of the rows that ``vmap`` shows its function."""

    def forward(self, x: Tensor) -> Tensor:
        def swap(row: Tensor, other: Tensor) -> Tensor:
            row = row.clone()
            row[0] = row[1]
            row[4:] = row[:4] * 2
            row[2:4] = other[:2]
            return row

        return self.b(torch.vmap(swap)(self.a(x), x))
