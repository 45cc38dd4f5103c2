"""Attributes that calls read and change: tables for the longest input so far, counters, flags, and what a call keeps
for the next one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.capture.programs.inplace import Two
from tests.capture.programs.loops import finish, net
from tests.capture.registry import loop, program
from tests.capture.runner import Run, numbers, sgd

LENGTHS = (6, 6, 10, 4, 12, 10, 6, 6)


def over_lengths(
    run: Run,
    plain: nn.Module,
    lengths: Sequence[int] = LENGTHS,
    rows: Sequence[int] = (4,),
    change: Callable[[Any, int], None] | None = None,
    every: int = 3,
) -> None:
    """A step for each length, and evaluation in between.

    Args:
        rows: of the batches, in turn.
        change: what the loop does to the model before a step.
        every: after how many steps it is evaluated.
    """
    model = run.compile(plain.double())
    optimizer = sgd(model)
    for step, length in enumerate(lengths):
        if change is not None:
            change(run.plain, step)
        run.changed()
        x = numbers(rows[step % len(rows)], length, 8, seed=step)
        out = model(x)
        run.note("output", out)
        out.square().mean().backward()
        finish(run, model, optimizer)
        run.note_state(model)
        if step % every == every - 1:
            model.eval()
            with torch.no_grad():
                run.note("evaluated", model(x[:2]))
            model.train()


def angles(length: int, x: Tensor) -> Tensor:
    return torch.outer(torch.arange(length, device=x.device, dtype=x.dtype), torch.arange(1.0, 9.0).to(x) / 8)


class Rotary(Two):
    """A table for the length of the call before, as of protein models."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: int | None = None
        self.cos: Tensor | None = None
        self.sin: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] != self.seen or self.cos is None or self.cos.device != x.device:
            self.seen = x.shape[1]
            table = angles(x.shape[1], x)
            self.cos, self.sin = table.cos()[None], table.sin()[None]
        assert self.sin is not None
        return self.b(self.a(x) * self.cos + x.flip(-1) * self.sin)


@loop(ranks=True)
def table_of_the_length_before(run: Run) -> None:
    over_lengths(run, Rotary())


class Growing(Two):
    """A registered table for the longest input so far, as of the first Llamas."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.build(8, torch.zeros(0, dtype=torch.float64))

    def build(self, length: int, like: Tensor) -> None:
        self.longest = length
        self.register_buffer("table", angles(length, like).cos(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.longest:
            self.build(x.shape[1], x)
        return self.b(self.a(x) * self.table[: x.shape[1]])


@loop(ranks=True)
def table_of_the_longest(run: Run) -> None:
    over_lengths(run, Growing())


@loop(ranks=True)
def mask_that_is_registered_empty(run: Run) -> None:
    class Masked(Two):
        mask: Tensor | None

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", None, persistent=False)

        def causal(self, x: Tensor) -> Tensor:
            n = x.shape[1]
            if self.mask is not None and self.mask.shape[-1] >= n:
                return self.mask[:n, :n]
            mask = torch.ones((n, n), dtype=torch.bool, device=x.device).triu(1)
            self.register_buffer("mask", mask, persistent=False)
            return mask

        def forward(self, x: Tensor) -> Tensor:
            scores = self.a(x) @ x.transpose(1, 2)
            return self.b(scores.masked_fill(self.causal(x), -torch.inf).softmax(-1) @ x)

    over_lengths(run, Masked())


@loop(ranks=True)
def table_that_the_first_call_registers(run: Run) -> None:
    """As a part of the state dict."""

    class Registering(Two):
        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "table") or self.table.shape[0] != x.shape[1]:
                self.register_buffer("table", angles(x.shape[1], x).cos())
            return self.b(self.a(x) * self.table)

    over_lengths(run, Registering())


class Positions(Two):
    """A plain table, whose own size tells whether it is long enough."""

    table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or self.table.size(0) < x.size(1):
            table = torch.zeros(x.size(1), 8, dtype=x.dtype, device=x.device)
            table[:, 0::2] = angles(x.size(1), x)[:, 0::2].sin()
            self.table = table
        return self.b(self.a(x) + self.table[: x.size(1)])


@loop(ranks=True)
def table_that_tells_its_length(run: Run) -> None:
    over_lengths(run, Positions())


@loop()
def table_in_every_layer(run: Run) -> None:
    """Each of three layers alike keeps its own, and the model its mask."""

    class Masked(nn.Module):
        mask: Tensor | None = None

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Growing() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            if self.mask is None or self.mask.shape[0] != x.shape[1]:
                self.mask = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype, device=x.device).tril()
            for layer in self.layers:
                x = x + torch.tanh(self.mask @ layer(x))
            return x

    over_lengths(run, Masked())


@loop(ranks=True)
def layers_with_tables_of_their_own(run: Run) -> None:
    """Layers alike, whose tables have other values."""

    class Layer(Two):
        def __init__(self, base: float) -> None:
            super().__init__()
            self.base, self.longest, self.table = base, 0, torch.zeros(0, 8, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[1] > self.longest:
                self.longest, self.table = x.shape[1], angles(x.shape[1], x).cos() * self.base
            return x + torch.tanh(self.a(x) * self.table[: x.shape[1]])

    over_lengths(run, nn.Sequential(*(Layer(1.0 + i) for i in range(4))), (12, 6, 10, 6, 14, 4))


@loop(ranks=True)
def rows_of_the_call_before(run: Run) -> None:
    """What a call keeps has as many rows as its batch, of which one is smaller."""

    class Remembering(Two):
        before: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            out = h if self.before is None else h + self.before.mean((0, 1))
            self.before = h.detach()
            return self.b(out)

    over_lengths(run, Remembering(), (6,) * 7, rows=(4, 4, 8, 4, 2))


@loop(ranks=True)
def queue_of_keys(run: Run) -> None:
    """The last twelve, as contrastive losses keep them: it grows until it is full."""

    class Queued(Two):
        def __init__(self) -> None:
            super().__init__()
            self.queue = torch.zeros(1, 8, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            keys = self.b(x).mean(1)
            logits = self.a(x).mean(1) @ self.queue.to(x.device).T
            self.queue = torch.cat([self.queue.to(x.device), keys.detach()])[-12:]
            return logits.logsumexp(1) + keys.square().mean()

    over_lengths(run, Queued(), (6,) * 6)


@loop(ranks=True)
def states_of_the_last_calls(run: Run) -> None:
    """Each takes the place of the next: what a buffer was stands in another attribute when it is bound anew."""

    class Shifting(Two):
        last: Tensor | None = None
        third: Tensor
        fourth: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.zeros(8, dtype=torch.float64), torch.ones(8, dtype=torch.float64)
            self.register_buffer("third", torch.zeros(8)), self.register_buffer("fourth", torch.ones(8))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.a(x).mean((0, 1))
            out, before = h + self.first + 2 * self.second + 3 * self.third, self.fourth
            self.first, self.second, self.last = h.detach(), self.first, self.second[:4]
            self.third, self.fourth = self.fourth, self.third + 1
            return self.b(out), before

    model = run.compile(Shifting().double())
    optimizer = sgd(model)
    for step in range(5):
        out, before = model(numbers(4, 6, 8, seed=step))
        run.note("outputs", (out, before))
        out.square().mean().backward()
        finish(run, model, optimizer)
        run.note_state(model)


def counted(step: int) -> tuple[Any, ...]:
    return (numbers(4, 6, 8, seed=step),)


@loop(ranks=True)
def every_third_call(run: Run) -> None:
    class Counting(Two):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.b(self.a(x)) * (3 if self.calls % 3 == 0 else 1)

    over_lengths(run, Counting(), (6,) * 7)


@loop(ranks=True)
def warm_up_by_calls(run: Run) -> None:
    class Warming(Two):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.calls += 1
            return self.b(self.a(x)) * min(1.0, self.calls / 5)

    over_lengths(run, Warming(), (6,) * 8)


@loop()
def counts_down(run: Run) -> None:
    """Through 0."""

    class Counting(Two):
        left = 3

        def forward(self, x: Tensor) -> Tensor:
            self.left -= 1
            return self.b(self.a(x)) * self.left

    over_lengths(run, Counting(), (6,) * 7)


@loop(ranks=True)
def numbers_made_of_a_count(run: Run) -> None:
    class Counting(Two):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.share, self.even = 0, 0.0, True

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.share, self.even = self.calls / 4, self.calls % 2 == 0
            return self.b(self.a(x)) * self.share

    over_lengths(run, Counting(), (6, 6, 8, 4, 6))


@loop()
def counts_in_an_object(run: Run) -> None:
    class Schedule:
        step = 1

    class Counting(Two):
        def __init__(self) -> None:
            super().__init__()
            self.schedule = Schedule()

        def forward(self, x: Tensor) -> Tensor:
            self.schedule.step += 2
            return self.b(self.a(x)) / self.schedule.step

    over_lengths(run, Counting(), (6,) * 5)


class Annealed(nn.Module):
    """A loss whose second part comes slowly, and that keeps its parts to be logged."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.criterion, self.part = 0, nn.MSELoss(), torch.zeros(())

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.steps += 1
        loss = self.criterion(output, target)
        self.part = loss.detach()
        return loss + min(1.0, self.steps / 4) * output.square().mean()


@loop(ranks=True)
def loss_that_counts(run: Run) -> None:
    loss_fn = Annealed()
    model = run.compile(net().double(), loss_fn)
    optimizer = sgd(model)
    for step in range(6):
        x = numbers(4, 8, seed=step)
        loss = model(x, x.flip(0))
        run.note("loss", loss)
        run.note("parts", (loss_fn.steps, loss_fn.part))
        loss.backward()
        finish(run, model, optimizer)


@loop()
def every_other_call(run: Run) -> None:
    class Alternating(Two):
        odd = False

        def forward(self, x: Tensor) -> Tensor:
            self.odd = not self.odd
            return self.a(x) if self.odd else self.b(x)

    plain = Alternating()
    model = run.compile(plain.double())
    for step in range(6):
        out = model(*counted(step))
        run.note("output", out)
        out.square().mean().backward()
        for name, parameter in model.named_parameters():
            run.note(name, parameter.grad)
        run.note("odd", plain.odd)
        model.zero_grad()


@loop()
def counter_that_the_user_resets(run: Run) -> None:
    class Counting(Two):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.b(self.a(x)) * self.calls

    plain = Counting()
    model = run.compile(plain.double())
    for step in range(6):
        if step == 3:
            plain.calls = -4
        run.note("output", model(*counted(step)))
        run.note("calls", plain.calls)


@loop(refused="registered buffer")
def as_often_as_called(run: Run) -> None:
    """What is computed depends on the number in Python: every call would be a trace of its own."""

    class Repeating(Two):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 1

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            for _ in range(self.calls):  # refused
                x = self.a(x).tanh()
            return self.b(x)

    over_lengths(run, Repeating(), (6,) * 11)


@loop(ranks=True)
def begins_anew_at_a_number(run: Run) -> None:
    """Some numbers are asked for, from the first call on."""

    class Cycling(Two):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x) * (2 if self.calls in (0, 2) else 1)
            self.calls += 1
            if self.calls == 4:
                self.calls = 0
            return self.b(h)

    over_lengths(run, Cycling(), (6,) * 10)


@loop(refused="torch.cos")
def weighs_by_a_gamma_function(run: Run) -> None:
    """A function of Python's that torch has of no number fixes it."""

    class Weighing(Two):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 1

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.b(self.a(x)) * math.gamma(self.calls / 8)  # refused

    over_lengths(run, Weighing(), (6,) * 11)


@loop(refused="each time")
def table_that_is_replaced_and_written_to(run: Run) -> None:
    class Sums(Two):
        def __init__(self) -> None:
            super().__init__()
            self.sums: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.sums is None or self.sums.shape[0] < x.shape[1]:
                self.sums = torch.zeros(x.shape[1], 8, dtype=x.dtype, device=x.device)
            self.sums[: x.shape[1]] += x.detach().mean(0)  # refused
            return self.b(self.a(x)) + self.sums[: x.shape[1]]

    over_lengths(run, Sums(), (6, 8, 8))


@program(batch=counted)
class RegistersWhatHasAGradient(Two):
    """In the place of a buffer of another shape, which it reads to register it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.register_buffer("last", h)
        return self.b(h)


@loop()
def tables_by_length(run: Run) -> None:
    """A dict by the length holds one for each."""

    class Tables(Two):
        def __init__(self) -> None:
            super().__init__()
            self.tables: dict[int, Tensor] = {}

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[1] not in self.tables:
                self.tables[x.shape[1]] = angles(x.shape[1], x).cos()
            return self.b(self.a(x) * self.tables[x.shape[1]])

    over_lengths(run, Tables())
