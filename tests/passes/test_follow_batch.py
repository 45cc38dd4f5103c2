"""`weight_of_rows`: whether microbatches compute what the whole batch does, and what the loss of each weighs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoparallel.graph.losses import LossWeight
from tests.passes.support import captured


class Task(nn.Module):
    """A linear layer, and a loss of its rows."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(4, 4), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.layer(x), y)


def _weight(loss: Callable[[Tensor, Tensor], Tensor]) -> LossWeight:
    weight = captured(Task(loss), torch.rand(8, 4), torch.zeros(8, dtype=torch.int64)).weight
    assert weight is not None
    return weight


ROWS = torch.tensor([0, 1])
MATRIX = torch.eye(3) + 1
OVER_ROWS = nn.GRU(4, 3).requires_grad_(False)
OVER_TIMES = nn.GRU(4, 3, batch_first=True).requires_grad_(False)
ALIKE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean over valid targets": lambda h, y: F.cross_entropy(h, y, ignore_index=2),
    "mean of squares": lambda h, y: F.mse_loss(h, torch.ones_like(h)),
    "sum over the rows' number": lambda h, y: h.square().sum() / h.shape[0],
    "the same for all rows": lambda h, y: (h - torch.arange(4).expand(h.shape[0], 4)).square().mean(),
    "its own rows, by number": lambda h, y: h[torch.arange(h.shape[0]), y].mean(),
    "probabilities as targets": lambda h, y: F.cross_entropy(h, h.detach().softmax(1)),
    "clamped to one": lambda h, y: (h.sum(1) * (y > 0)).sum() / (y > 0).double().sum().clamp(min=1),
    "over a tensor of the rows' number": lambda h, y: h.square().sum() / torch.full((), h.shape[0]),
    "over the rows' number as a tensor": lambda h, y: h.square().sum() / torch.tensor(y.numel()),
    "sums that are added up": lambda h, y: sum([h[:, 0].sum(), h[:, 1].exp().sum()]) / (y > 0).sum(),
    "sums that are added to a tensor": lambda h, y: (torch.zeros(()) + h.square().sum()) / (y > 0).sum(),
    "sums over named dims": lambda h, y: h.square().mean(1).sum(0),
    "a mean over rows, added up": lambda h, y: h.mean(0).sum(),
    "a mean of two sums": lambda h, y: torch.stack([h.sum(), h.exp().sum()]).mean(),
    "a mean of means": lambda h, y: h.square().mean(1).mean(),
    "sums and means of dims, added up": lambda h, y: h.square().sum() - h.square().mean(1).sum(),
    "over a count and a bit": lambda h, y: h.sum() / ((y > 0).sum() + 1e-6),
    "over a count and one": lambda h, y: h.sum() / ((y > 0).sum() + 1),
    "selected rows, added up": lambda h, y: h[y > 0].square().sum(),
    "over numbers of a fixed ratio": lambda h, y: h.square().mean() + h.sum(1).exp().mean(),
    "distances": lambda h, y: F.l1_loss(h, torch.ones_like(h)),
    "a recurrent layer over times": lambda h, y: OVER_TIMES(h[:, None])[0].mean(),
    "of several results of no row": lambda h, y: h.square().mean() - torch.linalg.slogdet(MATRIX)[1],
    "along another dim": lambda h, y: torch.diff(h, dim=-1).cumsum(-1).mean(),
}
DIFFERENT: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "centred": (lambda h, y: (h - h.mean(0)).square().mean(), "sub"),
    "contrastive": (lambda h, y: F.cross_entropy(h @ h.T, torch.arange(h.shape[0])), "m"),
    "softmax over rows": (lambda h, y: h.softmax(0).square().mean(), "softmax"),
    "a square of the sum": (lambda h, y: h.sum().square(), "square"),
    "by the rows' number": (lambda h, y: (h / h.shape[0]).square().mean(), "div"),
    "the number of each row": (lambda h, y: (h.sum(1) * torch.arange(h.shape[0])).mean(), "mul"),
    "by a tensor of the rows' number": (lambda h, y: (h / torch.full((), h.shape[0])).square().sum(), "div"),
    "by a tensor of one over the rows' number": (lambda h, y: (h * torch.full((), 1 / h.shape[0])).sum(), "full"),
    "clamped to the rows' number": (lambda h, y: h.clamp(max=h.shape[0] * 0.1).mean(), "clamp"),
    "rows as often as there are rows": (lambda h, y: h.sum(1)[:, None].expand(h.shape[0], h.shape[0]).sum(), "expand"),
    "other rows, by number": (lambda h, y: h[torch.arange(h.shape[0])[:, None], y[None]].sum(1).mean(), "index"),
    "the first half of the rows, by number": (lambda h, y: h[torch.arange(h.shape[0] // 2)].sum(), "index"),
    "over whether there is one": (lambda h, y: h.sum() / (y > 0).sum().bool(), "to_copy"),
    "rows by a number that is fixed": (
        lambda h, y: (h.sum(1) / len("x" * h.shape[0])).sum(),
        "a number scales it",
    ),
    "rows by a number of the batch": (lambda h, y: (h.sum(1) / int(h.shape[0])).sum(), "div"),
    "a mean over the rows' number": (lambda h, y: h.mean() / h.shape[0], "quotient"),
    "a mean over selected rows, over their number": (lambda h, y: h[y > 0].mean() / h.shape[0], "weighted_mean"),
    "a quotient of two means": (lambda h, y: (h.sum(1) * y).mean() / y.double().mean(), "quotient"),
    "over the number's root": (lambda h, y: h.sum() / h.shape[0] ** 0.5, "div"),
    "over the number's square": (lambda h, y: h.sum() / h.shape[0] ** 2, "div"),
    "over what depends on the longest": (lambda h, y: h.sum() / y.max(), "max"),
    "over a count less one": (lambda h, y: h.sum() / ((y > 0).sum() - 1), "sub"),
    "means and sums": (lambda h, y: h.mean() + h.exp().sum(), "adds up means and sums"),
    "clamped to more than one": (lambda h, y: h.sum() / (y > 0).sum().clamp(min=2), "clamp"),
    "columns by numbers of rows": (lambda h, y: h.index_fill(1, y, 0.0).sum(), "index_fill"),
    "columns of the first rows": (lambda h, y: h.scatter_add(1, ROWS[None].expand(2, 2), MATRIX[:2]).sum(), "scatter"),
    "norms over rows": (lambda h, y: torch.renorm(h, 2, 1, 1.0).sum(), "renorm"),
    "rows turned around": (lambda h, y: (h * torch.rot90(h, 2, (0, 1))).sum(), "rot90"),
    "a diagonal of rows": (lambda h, y: torch.diagonal_scatter(h, h.new_zeros(3), 1).sum(), "diagonal_scatter"),
    "some rows reduced": (lambda h, y: h.index_reduce(0, ROWS, h.new_ones(2, 4), "amax").sum(), "index_reduce"),
    "places in the batch": (lambda h, y: h.put(torch.tensor([0, 9]), h.new_ones(2)).sum(), "put"),
    "a recurrent layer over rows": (lambda h, y: OVER_ROWS(h[:, None])[0].mean(), "gru"),
    "values at places": (lambda h, y: (h.sum(1) * h.take(y)).sum(), "take"),
    "values of other rows": (lambda h, y: h[torch.arange(h.shape[0]), 0].where(torch.isin(y, y - 1), 0).sum(), "isin"),
    "places among rows": (lambda h, y: (h.sum(1) * torch.searchsorted(y, y + 1)).sum(), "searchsorted"),
    "a matrix of rows": (lambda h, y: torch.linalg.householder_product(h, h.new_ones(4)).sum(), "householder"),
    "the first row": (lambda h, y: h[0].sum(), "select"),
    "rows beside rows": (lambda h, y: (h * h.flip(0)).mean(), "flip"),
    "over the detached loss": (lambda h, y: h.square().mean() / h.square().mean().detach(), "quotient"),
    "over a number that the batch fixes": (lambda h, y: h.sum() / len(range(h.shape[0])), "a number scales it"),
}


@pytest.mark.wide_where(lambda loss: loss not in list(ALIKE)[::4])
@pytest.mark.parametrize("loss", ALIKE)
def test_rows_that_stay_apart(loss: str) -> None:
    weight = _weight(ALIKE[loss])
    assert weight.kind != "unknown" and not weight.mixes, weight


@pytest.mark.wide_where(lambda loss: loss not in list(DIFFERENT)[::4])
@pytest.mark.parametrize("loss", DIFFERENT)
def test_rows_that_are_mixed_are_named(loss: str) -> None:
    function, operator = DIFFERENT[loss]
    weight = _weight(function)
    assert weight.kind == "unknown" and operator in weight.reason, weight
