"""Operators that researchers use: indexing, sorting, einsum, func, norms."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.programs.inplace import Two
from tests.capture.registry import program
from tests.capture.runner import numbers


def sequences(step: int) -> tuple[Tensor]:
    return (numbers(4, 4, 8, seed=step),)


@program(ranks=True)
class Einsum(Two):
    def forward(self, x: Tensor) -> Tensor:
        q, k = self.a(x).view(-1, 2, 4), self.b(x).view(-1, 2, 4)
        return torch.einsum("bhd,bgd->bhg", q, k).softmax(-1)


@program(ranks=True)
class TopK(Two):
    def forward(self, x: Tensor) -> Tensor:
        values, index = self.a(x).topk(3, dim=-1)
        return values.softmax(-1) @ self.b.weight[:3] + self.b(x).gather(1, index).sum(-1, keepdim=True)


@program()
class SortAndCumsum(Two):
    """Sparsemax."""

    def forward(self, x: Tensor) -> Tensor:
        z = self.a(x)
        s, _ = z.sort(dim=-1, descending=True)
        k = torch.arange(1, 9, dtype=z.dtype)
        support = (1 + k * s > s.cumsum(-1)).sum(-1, keepdim=True)
        tau = (s.cumsum(-1).gather(-1, support - 1) - 1) / support
        return self.b((z - tau).clamp(min=0))


@program()
class AdvancedIndexing(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        index = torch.arange(x.shape[0])
        return h[index, x.argmax(-1)][:, None] * self.b(x)[:, [1, 2, 5]] + h[..., None][:, 0]


@program()
class SafeWhere(Two):
    """where with a branch that has no finite gradient."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        positive = h > 0
        return torch.where(positive, torch.where(positive, h, 1.0).sqrt(), self.b(x))


@program()
class NanGradient(Two):
    """The gradient is nan in eager, too."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return torch.where(h > 0, h.sqrt(), 0.0) + self.b(x)


@program(batch=lambda step: (numbers(2, 8, seed=step).repeat(2, 1),), ranks=True)
class MinMaxTies(Two):
    """Reductions whose gradients are shared between ties, which lie on different ranks."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return h.amax(0) + h.max() + h.min(0).values + self.b(x).median(-1, keepdim=True).values + h.amin(1).sum()


@program(ranks=True)
class NormsOverTheBatch(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h = (h - h.mean(0)) / h.std(0).clamp(min=1e-5)
        return self.b(h) / h.norm() + torch.linalg.vector_norm(h, 3) + h.var(unbiased=False)


@program()
class ClampWithTensors(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).clamp(min=self.b(x) - 0.1, max=torch.tensor(0.5))


@program()
class LinearAlgebra(Two):
    def forward(self, x: Tensor) -> Tensor:
        w = self.a.weight
        gram = w @ w.T + torch.eye(8)
        return torch.linalg.solve(gram, self.b(x).T).T + torch.linalg.cholesky(gram).diagonal().log().sum()


@program(ranks=True)
class LeastSquares(Two):
    """A grid that is fitted, as a KAN's is, and one per row."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x), self.b(x)
        each = torch.linalg.lstsq(a.view(-1, 4, 2), b.view(-1, 4, 2), rcond=1e-12).solution
        vector = torch.linalg.lstsq(a[:, :2], b[:, 0])[0]
        return torch.linalg.lstsq(a[:, :3], b).solution.sum() + each.flatten(1) * vector.sum()


@program(refused="its .solution alone")
class LeastSquaresWithTheirResiduals(Two):
    def forward(self, x: Tensor) -> Tensor:
        solved = torch.linalg.lstsq(self.a(x)[:, :3], self.b(x))
        return solved.residuals + solved.solution.sum()  # refused


@program()
class Orthogonal(Two):
    """Matrix exponential and QR."""

    def forward(self, x: Tensor) -> Tensor:
        skew = self.a.weight - self.a.weight.T
        q, _ = torch.linalg.qr(self.b.weight)
        return x @ torch.matrix_exp(skew) @ q


@program(refused=None if torch.__version__ >= "2.13" else "write the derivative out", line=False)
class ForwardModeDerivative(Two):
    """torch.func.jvp inside, which torch traces from 2.13 on; before, it fails when all lines have run."""

    def forward(self, x: Tensor) -> Tensor:
        out, tangent = torch.func.jvp(lambda t: self.a(t).tanh(), (x,), (torch.ones_like(x),))
        return out + tangent


@program()
class PerSampleGradient(Two):
    """torch.func.grad and vmap inside."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(torch.func.grad(lambda t: self.a(t).tanh().sum()))(x)


@program()
class GradientInForward(Two):
    """autograd.grad with create_graph: a gradient penalty, a force field."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_(True)
        energy = self.b(self.a(x).tanh()).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force


@program()
class FunctionalCall(Two):
    def forward(self, x: Tensor) -> Tensor:
        weights = {k: v * 2 for k, v in self.a.named_parameters()}
        return torch.func.functional_call(self.a, weights, (x,)) + self.b(x)


@program(batch=sequences, ranks=True)
class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(-1, 4, 3, 2, 4).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / math.sqrt(4) + torch.full((4, 4), float("-inf")).triu(1)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


@program(batch=sequences)
class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool, self.up = nn.Conv1d(4, 8, 3, padding=1), nn.MaxPool1d(2), nn.ConvTranspose1d(8, 4, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.pool(self.conv(x).relu())) + F.interpolate(x[..., ::2], scale_factor=2, mode="linear")


@program(batch=sequences)
class AlibiAndPadding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = F.pad(self.a(x), (0, 0, 1, 0), value=1.0)
        distance = (torch.arange(5)[:, None] - torch.arange(5)).clamp(min=0)
        return (torch.exp(-distance * 0.5).tril() @ h).logcumsumexp(1)


@program()
class BagOfComputedRows(nn.Module):
    """Sums of rows of a table that is computed: torch has an operator for bags without gradient, and one with."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(24).view(4, 6) % 4
        return F.embedding_bag(places, self.a(x[:4]), mode="sum")


@program(ranks=True)
class Covariances(Two):
    """Which look at whether their divisors are positive."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x), self.b(x)
        weights = torch.arange(1, x.shape[0] + 1)
        weighed = torch.cov(a.T, correction=0, fweights=weights, aweights=b.sigmoid()[:, 0])
        also = torch.cov(a.T, aweights=b.sigmoid()[:, 1])
        return a @ (torch.cov(b.T) + torch.corrcoef(a.T) + weighed + also + b[:, 0].cov())


@program()
class ComplexCorrelations(Two):
    def forward(self, x: Tensor) -> Tensor:
        z = torch.complex(self.a(x), self.b(x)).T
        return torch.view_as_real(torch.corrcoef(z) + z[0].corrcoef())


@program(ranks=True)
class PartsThatEndWhereTensorsSay(Two):
    ends: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ends", torch.tensor([1, 5]))

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = torch.tensor_split(self.a(x), self.ends, dim=1)
        left, right = self.b(x).tensor_split(torch.tensor(2), 1)
        return first * second + third.sum(1, keepdim=True) * left * right


@program(batch=lambda step: (torch.zeros(1, dtype=torch.int64),))
class ScalarAsRow(nn.Module):
    """A number, which has no dims, counts as a row where it is looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.tensor(0.5))

    def forward(self, places: Tensor) -> tuple[Tensor, Tensor]:
        return self.rate.exp().index_select(0, places), self.rate.index_add(0, places, self.rate)


@program()
class Combinations(Two):
    def forward(self, x: Tensor) -> Tensor:
        pairs, triples = torch.combinations(self.a.bias), torch.combinations(self.b.bias, 3, with_replacement=True)
        none = torch.combinations(self.a.bias, len(self.a.bias) + 1)
        return self.a(x) + pairs.prod(1).sum() + triples.prod(1).sum() + none.sum()


@program(ranks=True)
class ConnectionistTemporalClassification(Two):
    """Of lengths that are tensors, numbers, and those of one sequence."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        odds = torch.stack([self.a(x), self.b(x), self.a(x.tanh())]).log_softmax(-1)
        lengths = (x[:, 0] > 0).long() + 1
        targets = x[:, :3].argsort(-1)[:, :2] + 1
        losses = F.ctc_loss(odds, targets, torch.full_like(lengths, 3), lengths, reduction="none")
        total = F.ctc_loss(odds, targets.flatten(), (3, 3, 3, 2), (2, 2, 2, 2), blank=7, reduction="sum")
        none = F.ctc_loss(odds[:1], targets, lengths.clamp(max=1), lengths, zero_infinity=True)
        return losses, total, none, F.ctc_loss(odds[:, 0], targets[0], lengths.new_tensor(3), lengths.new_tensor(2))


@program(ranks=True)
class ClassificationOfSelectedTargets(Two):
    """As transformers gives the targets: one after the other, without what is padded."""

    def forward(self, x: Tensor) -> Tensor:
        odds = torch.stack([self.a(x), self.b(x), self.a(x.tanh())]).log_softmax(-1)
        targets, mask = x[:, :2].argsort(-1) + 1, x[:, :2] > -0.5
        lengths = torch.full((len(x),), 3)
        return nn.CTCLoss(zero_infinity=True)(odds, targets.masked_select(mask), lengths, mask.sum(-1))


@program(ranks=True)
class ReturnsAHistogram(Two):
    """Of what is differentiated, which a histogram is not."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.a(x)
        return self.b(h), torch.histc(h, 5, -1, 1)
