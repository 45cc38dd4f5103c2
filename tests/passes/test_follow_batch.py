"""`mixes_rows`: whether microbatches compute what the whole batch does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoparallel.passes.follow_batch import mixes_rows
from tests.passes.support import captured


class Task(nn.Module):
    """A linear layer, and a loss of its rows."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(4, 4), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.layer(x), y)


def _found(loss: Callable[[Tensor, Tensor], Tensor]) -> str:
    graph = captured(Task(loss), torch.rand(8, 4), torch.zeros(8, dtype=torch.int64))
    results = graph.graph.output_node().args[0]
    return mixes_rows(graph.graph, [name for name in graph.inputs if name is not None], results)  # type: ignore[arg-type]


ALIKE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean over valid targets": lambda h, y: F.cross_entropy(h, y, ignore_index=2),
    "mean of squares": lambda h, y: F.mse_loss(h, torch.ones_like(h)),
    "sum over the rows' number": lambda h, y: h.square().sum() / h.shape[0],
    "the same for all rows": lambda h, y: (h - torch.arange(4).expand(h.shape[0], 4)).square().mean(),
    "its own rows, by number": lambda h, y: h[torch.arange(h.shape[0]), y].mean(),
    "along another dim": lambda h, y: torch.diff(h, dim=-1).cumsum(-1).mean(),
}
DIFFERENT: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "centred": (lambda h, y: (h - h.mean(0)).square().mean(), "sub"),
    "contrastive": (lambda h, y: F.cross_entropy(h @ h.T, torch.arange(h.shape[0])), "m"),
    "softmax over rows": (lambda h, y: h.softmax(0).square().mean(), "softmax"),
    "a square of the sum": (lambda h, y: h.sum().square(), "square"),
    "by the rows' number": (lambda h, y: (h / h.shape[0]).square().mean(), "div"),
    "the number of each row": (lambda h, y: (h.sum(1) * torch.arange(h.shape[0])).mean(), "mul"),
    "a mean over the rows' number": (lambda h, y: h.mean() / h.shape[0], "div"),
    "not of the batch": (lambda h, y: torch.ones(()) * 2, "mul"),
}


@pytest.mark.parametrize("loss", ALIKE)
def test_rows_that_stay_apart(loss: str) -> None:
    assert _found(ALIKE[loss]) == ""


@pytest.mark.parametrize("loss", DIFFERENT)
def test_rows_that_are_mixed_are_named(loss: str) -> None:
    function, operator = DIFFERENT[loss]
    assert operator in _found(function)
