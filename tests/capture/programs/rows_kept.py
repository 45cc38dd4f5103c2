"""What a call keeps of its rows for the next ones, which lie over the mesh where the loss is known."""

from __future__ import annotations

from collections import deque

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.capture.programs.inplace import Two
from tests.capture.programs.loops import finish
from tests.capture.registry import loop
from tests.capture.runner import Run, numbers, sgd

ROWS = (8, 8, 4, 8)


def _train(run: Run, plain: Two) -> None:
    """A step for each number of rows, and evaluation in between."""
    model = run.compile(plain.double(), F.mse_loss)
    optimizer = sgd(model)
    for step, rows in enumerate(ROWS):
        loss = model(numbers(rows, 8, seed=step), numbers(rows, 8, seed=100 + step))
        run.note("loss", loss)
        loss.backward()
        finish(run, model, optimizer)
        model.eval()
        with torch.no_grad():
            run.note("evaluated", model(numbers(4, 8, seed=200 + step), numbers(4, 8, seed=300 + step)))
        model.train()


@loop(ranks=True)
def rows_kept_for_the_next_call(run: Run) -> None:
    class Recurrent(Two):
        kept: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x).tanh()
            if self.kept is not None and self.kept.shape[0] == x.shape[0]:
                h = h + 0.1 * self.kept
            self.kept = h.detach()
            return self.b(h)

    _train(run, Recurrent())


@loop(ranks=True)
def rows_kept_of_the_last_calls(run: Run) -> None:
    class Recurrent(Two):
        def __init__(self) -> None:
            super().__init__()
            self.kept = deque[Tensor](maxlen=2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x).tanh()
            h = h + sum(kept.mean(0) for kept in self.kept)
            self.kept.append(h.detach())
            return self.b(h)

    _train(run, Recurrent())


@loop(ranks=True)
def rows_kept_for_evaluation(run: Run) -> None:
    class Remembers(Two):
        kept: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x).tanh()
            if self.training:
                self.kept = h.detach()
            elif self.kept is not None:
                h = h + self.kept[: x.shape[0]]
            return self.b(h)

    _train(run, Remembers())
