"""What microbatches make of losses that nobody has thought of: sums and means, over whatever, times whatever, drawn at
random.

A window of `accumulate()`, and the microbatches of one call, have the gradients of the whole batch to 1e-9, or the loss
is refused.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autoparallel
from tests.runtime.support import gradients_off, make, run_on_ranks

SUMS = (
    "F.cross_entropy(h, y, ignore_index=-1, reduction='sum')", "(h.square().sum(1) * m).sum()", "h.square().sum()",
    "h[m].square().sum()", "torch.where(m[:, None], h, 0.0).abs().sum()", "h.square().mean(1).sum()",
    "h.logsumexp(1).sum()", "h.sum(1).square().sum()", "h.square().sum(0).mean()", "h.square().sum(0).max()",
    "h.mean(0).square().sum()", "(h - h.mean(0)).square().sum()", "h.norm()",
    "h.square().masked_select(m[:, None]).sum()", "sum(column.square().sum() for column in h.unbind(1))",
    "h.square().sum(1).cumsum(0).sum()",
)  # fmt: skip
OVER = (
    "1", "7", "x.shape[0]", "x.numel()", "len(x)", "m.sum()", "m.sum().clamp(min=1)", "m.sum().clamp(min=2)",
    "(m.sum() + 1e-3)", "(m.sum() - 1)", "(y != -1).sum()", "n", "self.held.sum()", "self.held[0]", "self.log.exp()",
    "m.double().mean()", "y.max()", "x.shape[0] ** 2", "x.shape[1]", "h.detach().abs().sum()", "(n * x.shape[0])",
)  # fmt: skip
MEANS = (
    "F.mse_loss(h, t)", "F.cross_entropy(h, y, ignore_index=-1)", "F.cross_entropy(h, y, self.held, ignore_index=-1)",
    "F.cross_entropy(h, y, ignore_index=-1, label_smoothing=0.1)", "h.square().mean()", "h[m].square().mean()",
    "F.kl_div(h.log_softmax(1), t.softmax(1), reduction='batchmean')", "h.square().mean(0).sum()", "h.std()",
    "h.square().sum(1).mean()", "F.smooth_l1_loss(h[:, 0], t[:, 0])", "h.square().mean(1).mean(0)",
    "h.square().mean().sqrt()",
)  # fmt: skip
TIMES = (
    *["{}"] * 9, "-0.5 * {}", "{} * n", "{} * self.log.exp()", "{} / self.held[1]", "{} * x.shape[0]",
    "{} / x.shape[0]", "{}.clamp(max=1e6)", "{} * m.double().mean()", "{}.reshape(1).sum()",
)  # fmt: skip
BESIDE = (*[""] * 9, " + self.log", " + 1.0", " + 0.1 * self.up.weight.square().sum()")


def losses_of(seed: int, count: int) -> list[str]:
    """Losses of one or two terms."""
    draw = random.Random(seed)

    def term() -> str:
        total = f"({draw.choice(SUMS)}) / {draw.choice(OVER)}" if draw.random() < 0.5 else draw.choice(MEANS)
        return draw.choice(TIMES).format(f"({total})")

    return [" + ".join(term() for _ in range(draw.choice((1, 1, 1, 1, 2)))) + draw.choice(BESIDE) for _ in range(count)]


REFUSALS = ("cannot tell what", "it cannot be told what", "cannot be put together", "cannot be cut into")


class Model(nn.Module):
    """A row is made of a row; what the loss is, is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.log = nn.Parameter(torch.tensor(0.3))
        self.register_buffer("held", torch.tensor([1.0, 0.5, 2.0, 1.5, 0.25, 3.0]))


def model_with(loss: str) -> type[Model]:
    """A model whose forward gives a loss."""
    text = f"def forward(self, x, y, m, t, n):\n    h = self.up(x).tanh()\n    return {loss}\n"
    names: dict[str, Any] = {"torch": torch, "F": F}
    exec(compile(text, f"<{loss}>", "exec"), names)
    return type("ModelWithLoss", (Model,), {"forward": names["forward"]})


def batch_of(rows: int, seed: int) -> list[Tensor]:
    """Rows, their labels of which some are ignored, which of them are chosen, and their targets."""
    generator = torch.Generator().manual_seed(seed)
    x, t = (torch.randn(rows, size, generator=generator, dtype=torch.float64) for size in (4, 6))
    y, m = torch.randint(-1, 6, (rows,), generator=generator), torch.rand(rows, generator=generator) < 0.6
    y[0], m[0] = 1, True
    return [x, y, m, t]


def _try(losses: list[str]) -> dict[str, tuple[str, float]]:
    """For each loss and way why it is refused, if it is, and how far the gradients are off."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    batches, n = [batch_of(rows, seed) for seed, rows in enumerate((4, 2, 6))], torch.tensor(3.0)
    whole = [torch.cat(parts) for parts in zip(*batches, strict=True)]
    outcomes: dict[str, tuple[str, float]] = {}
    for loss in losses:
        kind = model_with(loss)
        plain = make(kind)
        plain(*whole, n).backward()
        for way in ("window", "call"):
            options = {"microbatches": 3} if way == "call" else {}
            model = autoparallel.compile(make(kind), mesh, plan="fsdp", **options)
            try:
                if way == "call":
                    model(*whole, n).backward()
                else:
                    for window in model.accumulate(3, batches):
                        for batch in window:
                            model(*batch, n).backward()
            except (ValueError, RuntimeError) as error:
                assert any(refusal in str(error) for refusal in REFUSALS), (loss, error)
                outcomes[f"{way}: {loss}"] = str(error), 0.0
            else:
                outcomes[f"{way}: {loss}"] = "", gradients_off(model, plain)
    return outcomes


@pytest.mark.wide_where(lambda seed: seed > 0)
@pytest.mark.parametrize("seed", range(4))
def test_microbatches_make_the_gradients_of_the_batch_or_are_refused(seed: int) -> None:
    for outcomes in run_on_ranks(_try, losses_of(seed, 16), world_size=2):
        wrong = {name: off for name, (_, off) in outcomes.items() if off > 1e-9}
        assert not wrong, wrong
        exact = [name for name, (reason, _) in outcomes.items() if not reason]
        assert 2 < len(exact) < len(outcomes) - 2, exact
