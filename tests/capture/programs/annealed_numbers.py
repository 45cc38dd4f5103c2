"""Numbers that a loop or the calls anneal, as arguments of torch's functions: one trace serves their values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.programs.inplace import Two
from tests.capture.programs.loops import finish
from tests.capture.registry import loop, program
from tests.capture.runner import SEED, Run, numbers, sgd


def annealed(run: Run, values: tuple[float, ...] = (0.1, 0.15, 0.2, 0.25, 0.3, 0.35)) -> None:
    """A step for each value, which is an argument of the call."""
    model = run.compile(run.program.make().double())
    optimizer = sgd(model)
    torch.manual_seed(SEED)
    for step, value in enumerate(values):
        with run.numbers(step):
            out = model(numbers(4, 8, seed=step), value)
        run.note("output", out)
        out.square().mean().backward()
        finish(run, model, optimizer)
        run.note_state(model)


@program(loop=annealed, random=True, ranks=True)
class DropsByAnArgument(Two):
    """Elements and whole channels, in place and not, and weights of attention."""

    def forward(self, x: Tensor, rate: float) -> Tensor:
        h = F.dropout(self.a(x), rate, self.training)
        h = F.dropout2d(h.view(2, 2, 2, 4), p=rate).view(4, 8) + F.dropout1d(h.view(2, 2, 8), rate).view(4, 8)
        q = F.dropout(h * 1.0, p=rate, inplace=True).view(1, 2, 2, 8)
        k = q[:, :1]
        h = F.scaled_dot_product_attention(q, k, k, is_causal=True, dropout_p=rate, enable_gqa=True)
        mask = torch.zeros(2, 2).log()
        return self.b(h.view(4, 8) + F.scaled_dot_product_attention(q, q, q, mask.fill_(0.5), rate).reshape(4, 8))


@program(loop=annealed, ranks=True)
class LosesByAnArgument(Two):
    """Thresholds and margins of losses, and labels that are smoothed."""

    def forward(self, x: Tensor, n: float) -> Tensor:
        h, y, labels = self.a(x), self.b(x), x.argmax(-1)
        weight = torch.arange(1.0, 9.0)
        loss = F.huber_loss(h, y, delta=n) + F.smooth_l1_loss(h, y, beta=n, reduction="sum")
        loss = loss + F.huber_loss(h, x, "none", n).mean() + F.cross_entropy(h, labels, label_smoothing=n)
        loss = loss + F.cross_entropy(h, labels, weight, label_smoothing=n, ignore_index=3)
        loss = loss + F.cross_entropy(h, labels, label_smoothing=n, reduction="none")[0]
        loss = loss + F.cross_entropy(h, y.detach().softmax(-1), label_smoothing=n)
        loss = loss + F.triplet_margin_loss(h, x, y, margin=n, swap=True)
        loss = loss + F.margin_ranking_loss(h, y, x.sign(), margin=n)
        return loss + F.gaussian_nll_loss(h, x, y.square(), eps=n)


@program(loop=annealed, ranks=True)
class FunctionsOfANumber(Two):
    """Python's and numpy's, of which those of numpy give floats."""

    def forward(self, x: Tensor, n: float) -> Tensor:
        scale = math.log10(n) + math.log1p(n) + math.expm1(n) + math.erf(n) + math.fmod(-n, 0.04) + math.copysign(n, -1)
        scale += np.log10(n) + np.log1p(n) + np.exp2(n) + np.deg2rad(n) + np.rint(10 * n) + np.arctan(n)
        scale += np.round(n, 2) + np.clip(n, 0.15, 0.3) + np.minimum(n, 0.2) + np.maximum(n, 0.2)
        scale += np.interp(n, [0.1, 0.2, 1.0], [1.0, 2.0, 3.0])
        whole = torch.arange(8) * np.floor(4 * n) + torch.arange(8) * np.sign(n)
        h = self.a(x) * whole if math.isfinite(n) and not np.isnan(n) else self.b(x)
        return self.b(h) * float(scale) if isinstance(float(n), float) else h


@program(ranks=True)
class LeastVariance(Two):
    """Variances below the least one have a gradient all the same."""

    def forward(self, x: Tensor) -> Tensor:
        return F.gaussian_nll_loss(self.a(x), x, self.b(x).square(), full=True, eps=0.3, reduction="none")


@program(loop=annealed, random=True, ranks=True)
class DrawsByAnArgument(Two):
    """Noise of an annealed strength."""

    def forward(self, x: Tensor, n: float) -> Tensor:
        h = self.a(x)
        h = h + torch.empty_like(h).normal_(0, n) + torch.normal(0.0, n, (8,)) + torch.empty_like(h).uniform_(-n, n)
        return self.b(h * torch.empty_like(h).bernoulli_(n) + torch.randn_like(h) * n)


@program(loop=annealed, ranks=True)
class MakesTensorsOfAnArgument(Two):
    def forward(self, x: Tensor, n: float) -> Tensor:
        h = self.a(x) * torch.as_tensor(n) + x.new_tensor(n) * torch.tensor(n)
        return self.b(h - torch.quantile(h.detach(), n, dim=1, keepdim=True))


@program(loop=annealed, ranks=True)
class NormsByAnArgument(Two):
    """Running statistics that follow more slowly with time."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor, momentum: float) -> Tensor:
        self.norm.momentum = 0.5
        n = self.norm
        h = F.batch_norm(self.a(x), n.running_mean, n.running_var, n.weight, n.bias, self.training, momentum)
        return self.b(h)


class Dropping(Two):
    def __init__(self) -> None:
        super().__init__()
        self.drops = nn.ModuleList(nn.Dropout(0.1) for _ in range(3))
        self.step, self.tau, self.rounds = 4, 1.0, 1

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        for _ in range(self.rounds):
            h = self.a(h).tanh()
        for drop in self.drops:
            h = drop(h)
        return self.b(h) * min(1.0, self.step / 4) / self.tau


def set_by_loop(run: Run, change: Callable[[Any, int], None]) -> None:
    """Steps before which a loop changes the model, and evaluation in between."""
    model = run.compile(Dropping().double())
    optimizer = sgd(model)
    torch.manual_seed(SEED)
    for step in range(7):
        change(run.plain, step)
        run.changed()
        with run.numbers(step):
            out = model(numbers(4, 8, seed=step))
        run.note("output", out)
        out.square().mean().backward()
        finish(run, model, optimizer)
        run.note_state(model)


@loop(ranks=True, random=True)
def dropout_that_a_loop_anneals(run: Run) -> None:
    def anneal(model: Any, step: int) -> None:
        model.step = step
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.1 + 0.05 * step

    set_by_loop(run, anneal)


@loop(ranks=True, random=True)
def temperature_that_a_loop_cools(run: Run) -> None:
    def cool(model: Any, step: int) -> None:
        model.tau = 0.9**step

    set_by_loop(run, cool)


@loop(ranks=True, random=True)
def numbers_that_a_loop_sets_and_the_model_fixes(run: Run) -> None:
    """Each value is a trace of its own."""

    def change(model: Any, step: int) -> None:
        model.rounds, model.tau = 1 + step % 3, 1.0 + step

    set_by_loop(run, change)


def halves(size: Any) -> int:
    return int(size // 2)


@program(batch=lambda step: (numbers(4, (3, 5, 6)[step], 8, seed=step), step + 2, 0.5 * step + 0.1), ranks=True)
class WholeNumbersOfSizes(Two):
    """Sizes that are made whole numbers stay open."""

    def forward(self, x: Tensor, times: int, scale: float) -> Tensor:
        length, width = map(int, x.shape[1:])
        h = self.a(x)[:, : int(length * 0.7)]
        return self.b(h[:, halves(x.shape[1]) - 1 :]).sum(1) * int(times) / float(width)
