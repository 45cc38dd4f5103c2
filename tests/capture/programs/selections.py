"""As many rows as values select: each step selects another number of them, one of them none."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.registry import program
from tests.capture.runner import numbers


def tagged(step: int) -> tuple[Any, ...]:
    """Eight sequences, and labels of which some are missing: some, all, then all but one."""
    labels = numbers(8, 6, seed=step).mul(3).long().clamp(-1, 3)
    if step:
        labels.fill_(-1)
    if step == 2:
        labels[3, 2] = 1
    return numbers(8, 6, 8, seed=step + 7), labels


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return self.loss(self.body(x).tanh(), labels)

    def loss(self, h: Tensor, labels: Tensor) -> Any:
        raise NotImplementedError


@program(batch=tagged, ranks=True)
class MaskedLoss(Tagger):
    def loss(self, h: Tensor, labels: Tensor) -> Any:
        logits, mask = self.head(h), labels >= 0
        return F.cross_entropy(logits[mask], labels[mask], reduction="sum"), logits


@program(batch=tagged, ranks=True)
class ActiveLoss(Tagger):
    """As many models of transformers have done it; the mean of none is not a number."""

    def loss(self, h: Tensor, labels: Tensor) -> Any:
        logits, active = self.head(h).view(-1, 4), labels.view(-1) != -1
        return F.cross_entropy(logits[active], labels.view(-1)[active]).nan_to_num(0.0) + h.square().mean()


@program(batch=tagged, ranks=True)
class MeansOfSelected(Tagger):
    """Losses of each kind, and how many were right; without a gradient where there is none in eager."""

    def loss(self, h: Tensor, labels: Tensor) -> Any:
        active, weight = labels >= 0, h.new_tensor([1.0, 2.0, 3.0, 0.5])
        logits, chosen, rows = self.head(h)[active], labels[active], h[active]
        right = (logits.argmax(-1) == chosen).to(h.dtype).mean()
        loss = F.cross_entropy(logits, chosen, weight, ignore_index=2, label_smoothing=0.1)
        fits = F.smooth_l1_loss(rows, rows.flip(-1)) + F.binary_cross_entropy_with_logits(
            rows[:, 0], chosen.to(h.dtype) / 3
        )
        pooled = rows.mean(0).nan_to_num(0.0).square().sum() + rows.std(-1).sum() / max(len(rows), 1)
        return loss.nan_to_num(0.0) + fits.nan_to_num(0.0) + pooled, right.nan_to_num(0.0), rows.half().mean()


@program(batch=tagged, ranks=True)
class PositionsOfRows(Tagger):
    def loss(self, h: Tensor, labels: Tensor) -> Any:
        places = torch.nonzero(labels.view(-1) >= 0).squeeze(-1)
        rows = self.head(h).view(-1, 4).index_select(0, places)
        return rows.logsumexp(-1).sum() / max(places.shape[0], 1)


@program(batch=tagged, ranks=True)
class PutsBackWhatItSelects(Tagger):
    def loss(self, h: Tensor, labels: Tensor) -> Any:
        out = torch.zeros_like(h)
        out[labels >= 0] = self.body(h[labels >= 0]).relu()
        return self.head(out).square().mean()


@program(batch=tagged, ranks=True)
class LoopOverExperts(Tagger):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 3), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def loss(self, h: Tensor, labels: Tensor) -> Any:
        rows = h.reshape(-1, 8)
        weights, chosen = self.router(rows).softmax(-1).max(-1)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            (places,) = torch.where((chosen == number) & (labels.view(-1) > -2))
            out.index_add_(0, places, expert(rows[places]) * weights[places, None])
        return self.head(out).square().mean()


class StackOfExperts(Tagger):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.stack = nn.Linear(8, 3), nn.Parameter(0.1 * torch.ones(3, 8, 8).cumsum(1))


@program(batch=tagged, ranks=True)
class LoopOverAStackOfExperts(StackOfExperts):
    def loss(self, h: Tensor, labels: Tensor) -> Any:
        rows = h.reshape(-1, 8)
        weights, chosen = self.router(rows).softmax(-1).topk(2)
        mask = F.one_hot(chosen, 3).permute(2, 1, 0) * (labels.view(-1) > -2)
        out = torch.zeros_like(rows)
        for expert in range(3):
            place, row = torch.where(mask[expert])
            made = F.linear(rows[row], self.stack[expert]).tanh() * weights[row, place, None]
            out.index_add_(0, row, made)
        return self.head(out).square().mean()


@program(batch=tagged, refused="loop over all that there may be")
class LoopOverTheExpertsThatAreHit(StackOfExperts):
    """As LongCat does it."""

    def loss(self, h: Tensor, labels: Tensor) -> Any:
        rows = h.reshape(-1, 8)
        weights, chosen = self.router(rows).softmax(-1).topk(2)
        mask = F.one_hot(chosen, 3).permute(2, 1, 0)
        out = torch.zeros_like(rows)
        for hit in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():  # refused
            expert = int(hit.item())
            place, row = torch.where(mask[expert].squeeze(0))
            made = F.linear(rows[row], self.stack[expert]).tanh() * weights[row, place, None]
            out.index_add_(0, row, made)
        return self.head(out).square().mean()


@program(batch=tagged, ranks=True)
class DifferenceOfMeans(Tagger):
    """Two selections of one tensor, and a third that reads of both."""

    def loss(self, h: Tensor, labels: Tensor) -> Any:
        low, high = h[labels < 1], h[labels >= 1]
        centre = low.sum(0) - high.sum(0)
        return (h[labels < 2] - centre).square().sum()


@program(batch=tagged, ranks=True)
class SelectsOnOneWay(Tagger):
    def loss(self, h: Tensor, labels: Tensor) -> Any:
        return h[labels > 0].sum() * h.mean() if labels.sum() > 0 else h.mean()


@program(batch=tagged, ranks=True)
class AsksHowManyItSelects(Tagger):
    """Of a size that is known only when the program runs, Python may ask, too."""

    def loss(self, h: Tensor, labels: Tensor) -> Any:
        rows = h[labels >= 0]
        return self.head(rows).square().mean() if rows.shape[0] > 1 else h.mean()


@program(batch=tagged, ranks=True)
class AsksBeforeItSelects(Tagger):
    def loss(self, h: Tensor, labels: Tensor) -> Any:
        mask = labels >= 0
        return F.cross_entropy(self.head(h)[mask], labels[mask]) if mask.any() else h.square().mean()


@program(batch=tagged, ranks=True)
class CountsDistinct(Tagger):
    def loss(self, h: Tensor, labels: Tensor) -> Any:
        values, places = torch.unique(labels, return_inverse=True)
        return (h.mean(-1) * places).sum() / values.numel()


@program(batch=tagged, ranks=True)
class MeanOfCodes(Tagger):
    """A buffer follows what was selected, without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("code", torch.zeros(8))

    def loss(self, h: Tensor, labels: Tensor) -> Any:
        with torch.no_grad():
            self.code.mul_(0.9).add_(h[labels >= 0].sum(0))
        return (self.head(h) * self.head(self.code)).sum()


@program(batch=tagged, ranks=True)
class ReturnsWhatItSelects(Tagger):
    """The loss is computed of it outside of the model."""

    def loss(self, h: Tensor, labels: Tensor) -> Any:
        return self.head(h)[labels >= 0], {"labels": labels[labels >= 0], "all": h}


@program(batch=tagged, random=True, ranks=True)
class DrawsForWhatItSelects(Tagger):
    """As experts do that drop some of what they make: torch draws nothing for no rows."""

    def loss(self, h: Tensor, labels: Tensor) -> Any:
        rows = h[labels >= 0]
        noisy = F.dropout(self.head(F.dropout(rows, 0.5)), 0.2) + 0.1 * torch.randn_like(self.head(rows))
        return noisy.sum() + F.dropout(h, 0.5).sum(), rows[torch.randperm(len(rows))].cumsum(0).sum(-1)


@program(batch=tagged, ranks=True)
class LargestOfWhatItSelects(Tagger):
    """Several results of one call have sizes again."""

    def loss(self, h: Tensor, labels: Tensor) -> Any:
        values, places = torch.cat([h[labels >= 0], h[0]]).max(0)
        return (self.head(values) * places[:4]).sum()


@program(batch=tagged, ranks=True)
class WritesFeaturesInPlaces(Tagger):
    """As images take the places of their tokens; the search predicts it, too."""

    def loss(self, h: Tensor, labels: Tensor) -> Any:
        features = self.body(h.flatten(0, 1)).relu()
        out = torch.zeros_like(h)
        out[labels >= -1] = features
        return self.head(out + h).square().mean()


@program(batch=tagged)
class AsksInEachLayer(Tagger):
    """The same question of the same unknown size, as attention of transformers asks whether there are several rows."""

    def loss(self, h: Tensor, labels: Tensor) -> Any:
        rows = h[self.body(h).sum(-1) > 0]
        for _ in range(7):
            rows = self.body(rows)
            if rows.shape[0] > 1:
                rows = rows * 2
        return rows.square().sum() + h.mean()


@program(batch=tagged, ranks=True)
class SelectsTwiceByOneMask(Tagger):
    def loss(self, h: Tensor, labels: Tensor) -> Any:
        mask = (labels >= 0)[..., None].expand_as(h)
        return F.l1_loss(h.masked_select(mask), self.body(h).masked_select(mask), reduction="sum")


@program(batch=tagged, ranks=True)
class AsksWhetherAnyAreSelected(Tagger):
    """As a loop over experts leaves out those without rows."""

    def loss(self, h: Tensor, labels: Tensor) -> Any:
        places = torch.where(labels.view(-1) > -1)[0]
        rows = h.view(-1, 8)[self.body(h).sum(-1).view(-1) > 0]
        out = h.mean()
        if places.numel():
            out = out + self.head(h).view(-1, 4)[places].square().sum()
        if not rows.shape[0]:
            return out * 2
        return out + (rows.mean() if rows.numel() else 0.0)


@program(batch=tagged, ranks=True)
class CountsThemByLen(Tagger):
    """As losses over pairs and reducers of such losses do."""

    def loss(self, h: Tensor, labels: Tensor) -> Any:
        scores = self.head(h).view(-1, 4).amax(-1)
        places = torch.nonzero(labels.view(-1) > -1).squeeze(1)
        large = scores[scores > 0]
        mean = large.sum() / len(large) if len(large) >= 1 else scores.sum() * 0
        if len(places) == 0:
            return mean
        return mean + scores[places].square().sum() / max(len(places), 1)


@program(batch=tagged, ranks=True)
class CountsUpToLengths(Tagger):
    """How often each entry of a codebook, or each class, comes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("used", torch.zeros(4))

    def loss(self, h: Tensor, labels: Tensor) -> Any:
        logits, found = self.head(h).view(-1, 4), labels.view(-1) + 1
        self.used += torch.bincount(logits.argmax(1), minlength=4)
        counts = found.bincount(minlength=h.shape[1])
        weights = torch.bincount(found, h[..., 0].detach().reshape(-1), minlength=5)
        return (logits.logsumexp(1) * (counts / counts.sum())[found]).sum() + weights.sum(), counts, weights


@program(batch=tagged, ranks=True)
class NumbersThatAreRows(Tagger):
    """Selected as numbers and viewed as rows, beside the same rows, which are as many."""

    def loss(self, h: Tensor, labels: Tensor) -> Any:
        h, mask = h.flatten(0, -2), labels.flatten() > 0
        numbers = h.masked_select(mask[:, None]).view(-1, h.shape[-1])
        rows = torch.where(h[mask] > 0, h[mask], numbers * 2)
        return F.mse_loss(self.head(rows), rows[:, :4] * len(numbers)) + h.mean()


@program(batch=tagged, ranks=True)
class SelectedAfterRows(Tagger):
    """What is made of a number of selected rows, where rows before have been asked for which have no gradient."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        h, mask = self.body(x).flatten(0, -2), labels.flatten() > 0
        rows = x.flatten(0, -2)[mask]
        if mask.any():
            h = h + rows.mean()
        h = h + x.flatten(0, -2)[~mask].shape[0] * 0.01
        return rows.square().sum() + h.square().mean() + self.head(x).sum()


@program(batch=tagged)
class CountsUpToTheLargest(Tagger):
    """Which is as many as they are multiplied with."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.body(x)[:, 0]
        counts = torch.bincount(logits.argmax(1).clamp(min=7))
        return (logits * counts).sum()


@program(batch=tagged)
class NamesASize(Tagger):
    """The text of a size is that of its number."""

    def loss(self, h: Tensor, labels: Tensor) -> Any:
        scale = {"8": 2.0, "6": 3.0}
        return self.head(h) * scale.get(str(h.shape[0]), 1.0) * scale.get(f"{h.shape[1]}", 1.0)
