"""Operators with gradients of their own: indices, masks, order, accumulation along a dim."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.programs.inplace import Two
from tests.capture.registry import program
from tests.capture.runner import numbers


@program(ranks=True)
class WhereWithNanGradient(Two):
    """sqrt(0) in the branch that is not taken: the gradient is nan in eager, and must be here."""

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.a(x))
        return self.b(x) + torch.where(h > 0, h.sqrt(), torch.zeros_like(h)).sum() * 0 + h


@program(ranks=True)
class IndexPutAccumulate(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        index = torch.tensor([0, 2, 2, 5, 7, 7, 7, 1])
        out = torch.zeros_like(h)
        out.index_put_((torch.arange(h.shape[0])[:, None], index[None]), h, accumulate=True)
        return self.b(out)


@program()
class IndexAddAndCopy(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        out = torch.zeros_like(h).index_add(1, torch.tensor([0, 0, 3, 3, 4, 5, 6, 6]), h, alpha=2.0)
        out = out.index_copy(1, torch.tensor([1, 2]), h[:, :2] * 3)
        return self.b(out.index_fill(1, torch.tensor([7]), 0.5))


@program()
class MaskedScatter(Two):
    """As vision-language models put image features among text."""

    def forward(self, x: Tensor) -> Tensor:
        h, image = self.a(x), self.b(x)
        mask = (torch.arange(8) % 2 == 0).expand_as(h)
        return h.masked_scatter(mask, image[:, :4].contiguous()) * 2


@program(ranks=True)
class MaskedSelectOfFeatures(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h.masked_select(x > 0).sum() * h)


@program(ranks=True)
class ScatterReduce(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        index = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]).expand_as(h)
        most = torch.zeros(h.shape[0], 4, dtype=h.dtype).scatter_reduce(1, index, h, "amax", include_self=False)
        mean = torch.ones(h.shape[0], 4, dtype=h.dtype).scatter_reduce(1, index, h, "mean")
        return self.b(torch.cat([most, mean], 1))


@program(refused=None if torch.__version__ >= "2.12" else "keep it a tensor")
class Quantiles(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        q = torch.quantile(h, torch.tensor([0.25, 0.5, 0.9], dtype=h.dtype), dim=1)  # refused: torch 2.11 reads them
        return self.b(h - q.mean(0)[:, None]) + h.nanquantile(0.3, dim=1, keepdim=True)


@program(ranks=True)
class OrderOfRows(Two):
    """sort, argsort, median, kthvalue, mode of each row, and over the batch."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        order = h.argsort(-1)
        s = h.sort(stable=True, dim=-1).values.gather(-1, order)
        middle = h.median(-1, keepdim=True).values + h.kthvalue(3, -1, keepdim=True).values
        return self.b(s + middle) + h.median(0).values + h.sort(0, descending=True).values


@program(ranks=True)
class AlongADim(Two):
    """Cumulative operators."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sigmoid(self.a(x))
        out = h.cumprod(-1) + h.logcumsumexp(-1) + h.cummax(-1).values + h.cummin(-1).values
        return self.b(out + h.diff(prepend=h[:, :1])) + h.cumsum(0) + h.flip(0) + h.roll(1, 0)


@program(ranks=True)
class EinsumForms(Two):
    """Implicit output, ellipsis, a diagonal, a sum over all, lists of indices, three operands."""

    def forward(self, x: Tensor) -> Tensor:
        h, w = self.a(x).view(-1, 2, 4), self.b.weight.view(2, 4, 8)
        out = torch.einsum("bij,ijk", h, w)
        out = out + torch.einsum("...ij,ij...->...", h, w.mean(-1))[..., None]
        out = out * torch.einsum(h, [0, 1, 2], self.a.weight.view(2, 4, 8), [1, 2, 3], self.b.bias, [3], [0, 3])
        return out + torch.einsum("ii->i", self.a.weight) + torch.einsum("bij->", h)


@program()
class InPlaceOnViewOfWeight(Two):
    """A copy of a part of a parameter is changed, not the parameter."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.a.weight.clone()
        w[:4].mul_(2)
        w.view(-1)[::9] = 0
        return self.b(F.linear(x, w))


@program(ranks=True)
class InPlaceOnWeightView(Two):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.a.weight[:, 0].zero_()
        return self.b(self.a(x))


@program()
class InPlaceOfDetached(Two):
    """Statistics of a detached copy are changed in place."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        stats = h.detach().clone()
        stats -= stats.mean(0)
        stats[stats < 0] = 0
        return self.b(h * stats)


@program()
class OutArgument(Two):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            buffer = torch.empty_like(x)
            torch.mul(x, 2, out=buffer)
            torch.add(buffer, 1, out=buffer)
        return self.b(self.a(x) * buffer)


@program()
class UnfoldAndStrides(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        windows = h.unfold(1, 3, 1)
        return self.b(F.pad(windows.mean(-1), (1, 1), mode="replicate")) + h.as_strided(h.shape, h.stride())


@program(batch=lambda step: (numbers(4, 8, seed=step).to(torch.complex128),))
class ComplexInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(8, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.gain).abs().square() + (x * self.gain).angle() + torch.fft.ifft(x * self.gain).imag


@program(ranks=True)
class StraightThroughOfArgmax(Two):
    def forward(self, x: Tensor) -> Tensor:
        soft = self.a(x).softmax(-1)
        hard = F.one_hot(soft.argmax(-1), 8).to(soft.dtype)
        return self.b(hard + soft - soft.detach())


@program()
class BucketsAndBins(Two):
    """bucketize, searchsorted, histc under no_grad, tril indices."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        edges = torch.linspace(-1, 1, 5, dtype=h.dtype)
        place = torch.bucketize(h.detach(), edges)
        other = torch.searchsorted(edges, h.detach().contiguous(), right=True)
        i, j = torch.tril_indices(8, 8)
        pairs = (h[:, :, None] * h[:, None, :])[:, i, j]
        return self.b(h * place - other) + pairs.mean(-1, keepdim=True)


@program()
class DistancesAndTriplets(Two):
    def forward(self, x: Tensor) -> Tensor:
        p, q = self.a(x), self.b(x)
        d = torch.cdist(p, q)
        return F.triplet_margin_loss(p, q, q.roll(1, 0)) + d.square().mean() + F.pairwise_distance(p, q).mean()


@program()
class LossesOfTorch(Two):
    def forward(self, x: Tensor) -> Tensor:
        p, q = self.a(x), self.b(x)
        losses = [
            F.kl_div(p.log_softmax(-1), q.softmax(-1), reduction="batchmean"),
            F.huber_loss(p, q.detach(), delta=0.5),
            F.binary_cross_entropy_with_logits(p, q.sigmoid().detach(), pos_weight=torch.ones(8) * 2),
            F.cross_entropy(p, q.softmax(-1).detach(), label_smoothing=0.1),
            F.poisson_nll_loss(p, x.abs()),
            F.multi_margin_loss(p, x.argmax(-1)),
            F.smooth_l1_loss(p, q, reduction="none").amax(1).mean(),
        ]
        return torch.stack(losses).sum()


@program(ranks=True)
class MarginsThatAreJustKept(Two):
    """Whole numbers, between which many margins are exactly the least one, which has no gradient; beside what torch
    composes of others, with which it takes the losses apart."""

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.arange(1.0, 9.0)
        p, q = (h - h.detach() + h.detach().round() for h in (4 * self.a(x), 4 * self.b(x)))
        labels = x.argmax(-1)
        loss = torch.trapezoid(p, dim=1).mean()
        loss = loss + F.multi_margin_loss(p, labels) + F.multi_margin_loss(q, labels, 2, 3.0, weight, reduction="sum")
        return loss + F.multi_margin_loss(q, labels, margin=2.0, weight=weight, reduction="none").square().mean()
