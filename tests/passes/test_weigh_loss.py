"""`weigh_loss`: what the loss is a mean over, and the division that survives an empty count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autoparallel.capture.capture import capture
from autoparallel.capture.settings import CaptureSettings
from autoparallel.graph.captured import Captured, InputSpec, describe_inputs
from autoparallel.graph.losses import NO_LOSS
from autoparallel.operators import mean_or_sum, weighted_mean
from tests.passes.support import show


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w(x)


def captured(loss_fn: Callable[..., Any], target: Any, model: nn.Module | None = None) -> Captured:
    leaves, spec = pytree.tree_flatten(((torch.rand(8, 4), target), {}))
    specs, batch = describe_inputs(leaves)
    assert all(isinstance(s, InputSpec) for s in specs)
    return capture(model or Linear(), specs, spec, CaptureSettings(4, batch, loss_fn=loss_fn))


LABELS = torch.zeros(8, dtype=torch.int64)
VALUES = torch.zeros(8, 3)


def test_before_and_after() -> None:
    graph = captured(F.cross_entropy, LABELS)
    assert [line.rstrip() for line in show(graph.module)] == [
        "p_model_w_weight",
        "args_0",
        "args_1",
        "linear = aten.linear(args_0, p_model_w_weight)",
        "cross_entropy_sum = losses.cross_entropy_sum(linear, args_1, None, -100, 0.0)",
        "cross_entropy_weight = losses.cross_entropy_weight(args_1, None, -100, torch.float32)",
        "weighted_mean = losses.weighted_mean(cross_entropy_sum, cross_entropy_weight)",
        "return [weighted_mean, cross_entropy_weight]",
    ]
    assert (graph.weight.kind, graph.weight.output) == ("mean", 1)


def counted(out: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(out, y, reduction="sum"), (y >= 0).sum()


def counted_by_input(out: Tensor, y: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(out, y["labels"], reduction="sum"), y["count"]


def divided_by_input(out: Tensor, y: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(out, y["labels"], reduction="sum") / y["count"]


WITH_COUNT = {"labels": LABELS, "count": torch.tensor(5)}


@pytest.mark.parametrize(
    ("loss_fn", "target", "kind", "size"),
    [
        (lambda o, y: 0.5 * F.mse_loss(o, y), VALUES, "mean", 24),
        (lambda o, y: -(o * y).mean() / 3, VALUES, "mean", 24),
        (lambda o, y: (o - y).abs().sum() / o.shape[0], VALUES, "mean", 8),
        (lambda o, y: F.binary_cross_entropy_with_logits(o, y), VALUES, "mean", 24),
        (lambda o, y: F.mse_loss(o, y, reduction="sum"), VALUES, "sum", None),
        (lambda o, y: (o * y).sum() / 7, VALUES, "sum", None),
        (divided_by_input, WITH_COUNT, "sum", None),
        (lambda o, y: (o * y).sum() / torch.full((), 7.0), VALUES, "sum", None),
        (lambda o, y: F.cross_entropy(o, y["labels"]) / y["count"].sqrt(), WITH_COUNT, "mean", "output"),
        (lambda o, y: y["count"].exp() * o.square().mean(), WITH_COUNT, "mean", 24),
        (lambda o, y: divided_by_input(o, y) / y["count"], WITH_COUNT, "sum", None),
        (counted, LABELS, "mean", "output"),
        (counted_by_input, WITH_COUNT, "mean", "output"),
        (lambda o, y: ((o - y).abs().sum(), 4), VALUES, "mean", "output"),
        (lambda o, y: ((o - y).abs().sum(), y.numel()), VALUES, "mean", 24),
        (lambda o, y: ((o - y).abs().sum(), (y >= 0).sum().item()), VALUES, "mean", "output"),
        (lambda o, y: ((o - y).abs().sum(), max(1, (y >= 0).sum().item())), VALUES, "mean", "output"),
        (lambda o, y: F.nll_loss(F.log_softmax(o, 1), y), LABELS, "mean", "output"),
        (lambda o, y: F.cross_entropy(o, y) + o.square().mean(), LABELS, "mean", "output"),
        (lambda o, y: F.cross_entropy(o, y) / o.exp().sum(), LABELS, "unknown", None),
        (lambda o, y: F.mse_loss(o, y) - 0.1 * o.abs().mean() + 1.0, VALUES, "mean", 24),
        (lambda o, y: F.mse_loss(o, y) + o.sum(1).abs().mean(), VALUES, "mean", 24),
        (lambda o, y: (o * y).sum() + o.exp().sum() / 3, VALUES, "sum", None),
        (lambda o, y: (o * y).sum() + 1.0, VALUES, "unknown", None),
        (lambda o, y: (o * y).mean() + o.exp().max(), VALUES, "unknown", None),
        (lambda o, y: o.square().mean(0).sum(), VALUES, "mean", 8),
        (lambda o, y: F.cross_entropy(o, y) + 0.3 * F.cross_entropy(o.exp(), y), LABELS, "mean", "output"),
        (lambda o, y: F.cross_entropy(o, y) + F.cross_entropy(o, y, ignore_index=1), LABELS, "mean", "output"),
    ],
)
def test_what_a_loss_weighs(loss_fn: Callable[..., Any], target: Any, kind: str, size: Any) -> None:
    graph = captured(loss_fn, target)
    assert graph.weight.kind == kind, graph.weight
    assert bool(graph.weight.reason) == (kind == "unknown" or bool(graph.weight.others))
    assert (graph.weight.output is not None) == (size == "output")
    if isinstance(size, int):
        found = graph.weight.size
        assert (found if isinstance(found, int) else found.node.expr.subs(graph.actual)) == size


class Decayed(Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.w(x), self.w.weight.square().sum()


@pytest.mark.parametrize(
    ("loss_fn", "kind"),
    [
        (lambda o, y: F.cross_entropy(o[0], y) + 0.1 * o[1], "mean"),
        (lambda o, y: 0.1 * o[1] - o[0].mean(), "mean"),
        (lambda o, y: o[0].sum() + o[1], "unknown"),
        (lambda o, y: (o[0].sum(1) * (y > 0)).sum() / (y > 0).sum().clamp(min=1) + o[1], "unknown"),
        (lambda o, y: o[0].mean() + o[0].shape[0] * o[1], "unknown"),
        (lambda o, y: o[0].mean() + o[0].mean() * o[1], "mean"),
        (lambda o, y: o[0].sum() / (o[1] + 1), "sum"),
    ],
)
def test_what_reads_no_input_may_be_added_to_a_mean(loss_fn: Callable[..., Any], kind: str) -> None:
    graph = captured(loss_fn, LABELS, Decayed())
    assert graph.weight.kind == kind, graph.weight


def test_no_loss_weighs_nothing() -> None:
    leaves, spec = pytree.tree_flatten(((torch.rand(8, 4),), {}))
    specs, batch = describe_inputs(leaves)
    assert capture(Linear(), specs, spec, CaptureSettings(4, batch)).weight == NO_LOSS


@pytest.mark.parametrize(("weight", "grad", "expected"), [(2.0, 3.0, 1.5), (0.0, 3.0, torch.inf), (0.0, 0.0, 0.0)])
def test_a_gradient_of_zero_stays_one_in_a_mean_over_nothing(weight: float, grad: float, expected: float) -> None:
    total = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    mean = weighted_mean(total, torch.tensor(weight, dtype=torch.float64))
    mean.backward(torch.tensor(grad, dtype=torch.float64))
    assert mean.isfinite() == bool(weight)
    assert total.grad is not None and total.grad.item() == expected


def row_sum(out: Tensor, y: Tensor) -> Tensor:
    return out.square().sum(-1).sum() / (y > 0).sum()


@pytest.mark.parametrize(
    ("loss_fn", "least", "by_zero"),
    [
        (row_sum, 1.0, True),
        (lambda o, y: 0.5 * row_sum(o, y) + row_sum(o.exp(), y), 1.0, True),
        (counted, 0.0, False),
        (lambda o, y: row_sum(o, y) + 1.0, 0.0, False),
        (lambda o, y: o.square().sum(-1).sum() / (y > 0).sum().clamp(min=0.5), 0.5, False),
    ],
)
def test_what_stands_for_a_count_of_zero(loss_fn: Callable[..., Any], least: float, by_zero: bool) -> None:
    graph = captured(loss_fn, LABELS)
    assert (graph.weight.least, graph.weight.by_zero) == (least, by_zero)
    assert any(node.target is mean_or_sum for node in graph.graph.nodes) == by_zero
