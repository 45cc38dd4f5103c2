"""Any plan is right, not the good ones alone: random programs whose operators have random prices.

Where every way to run an operator costs what a digest says, "auto" takes layouts that no sensible price would lead to,
all of them legal: partial sums through views, lookups by shards of their indices, a sequence that is cut here and whole
there.  Each program trains for two steps of two microbatches on ranks that are threads, and losses, gradients, norms
and parameters are those of one process.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import autoparallel
from autoparallel.decisions.parameters import PlanError
from autoparallel.hardware import profile_for
from autoparallel.operators import RandomState, plain_randomness
from autoparallel.planner.calls import options
from autoparallel.planner.request.request import Request
from autoparallel.rules import operator_name
from autoparallel.runtime.norms.clipping import Clipper
from tests.simulated import Rank, Simulation

WIDTH, CLASSES, ROWS, LENGTH = 12, 8, 8, 4
STEPS, ACCUMULATED, RATE, MAX_NORM = 2, 2, 0.5, 0.1


class Attention(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, count)
        self.up = nn.Parameter(torch.randn(count, WIDTH, 6) / 3)
        self.down = nn.Parameter(torch.randn(count, 6, WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weight, chosen = self.router(tokens).softmax(-1).topk(2, -1)
        gates = torch.zeros_like(tokens[:, : len(self.up)]).scatter(1, chosen, weight)
        made = torch.bmm(torch.bmm(tokens.expand(len(self.up), -1, -1), self.up).tanh(), self.down)
        return torch.einsum("te,etd->td", gates, made).view_as(x)


class Scaled(nn.Module):
    """A function of its input, times a parameter."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.scale = function, nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x) * self.scale


def _by_rank_of(x: Tensor) -> Tensor:
    return x.gather(1, x.argsort(1)) + x.flip(1).cumsum(1)


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Dropout(0.3), nn.Linear(9, WIDTH, bias=False)),
    "attention": lambda: Attention(4),
    "three heads": lambda: Attention(3),
    "experts": lambda: Experts(4),
    "normalised": lambda: nn.LayerNorm(WIDTH),
    "sorted": lambda: Scaled(_by_rank_of),
    "shifted": lambda: Scaled(lambda x: torch.cat([x[:, 1:], x[:, :1]], 1) - x.mean(1, keepdim=True)),
    "pairs": lambda: Scaled(lambda x: (x[:, :, None] - x[:, None]).abs().amax(2)),
    "folded": lambda: Scaled(lambda x: x.unflatten(2, (3, 4)).transpose(2, 3).flatten(2).softmax(-1)),
    "mixed": lambda: Scaled(lambda x: x.unflatten(0, (2, -1)).flip(0).flatten(0, 1).roll(1, 2)),
}


class Model(nn.Module):
    def __init__(self, blocks: tuple[str, ...], tied: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(BLOCKS[name]() for name in blocks)
        self.head = nn.Linear(WIDTH, CLASSES)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).flatten(0, 1)


@dataclass(frozen=True)
class Program:
    """A model, a mesh, and how the model trains on it."""

    blocks: tuple[str, ...]
    prices: int
    axes: tuple[tuple[str, int], ...] = (("dp", 2), ("tp", 2))
    tied: bool = False
    schedule: str = ""  # of a pipeline of two ranks
    microbatches: int = 1
    loss_chunks: int = 1
    linear_chunks: int = 1

    @property
    def request(self) -> Request:
        """What is planned."""
        stages: dict[str, Any] = {"microbatches": self.microbatches}
        if self.schedule:
            per_rank = 1 if self.schedule in ("gpipe", "1f1b", "zero_bubble") else 2
            stages = {"stages": 2, "pipeline": autoparallel.Pipeline(self.schedule, 2, per_rank)}
        chunks = {"loss_chunks": self.loss_chunks, "linear_chunks": self.linear_chunks}
        return Request(self.axes, profile_for("cpu"), "auto", loss_fn=_loss, **chunks, **stages)


PROGRAMS = st.builds(
    Program,
    blocks=st.lists(st.sampled_from(sorted(BLOCKS)), min_size=1, max_size=4).map(tuple),
    prices=st.integers(0, 10**6),
    axes=st.sampled_from([(("dp", 2),), (("tp", 2),), (("tp", 4),), (("dp", 2), ("tp", 2))]),
    tied=st.booleans(),
    schedule=st.sampled_from(["", "", "", "1f1b", "interleaved_1f1b", "zero_bubble", "zero_bubble_v"]),
    microbatches=st.sampled_from([1, 1, 1, 2]),
    loss_chunks=st.sampled_from([1, 1, 3]),
    linear_chunks=st.sampled_from([1, 1, 2]),
)


def _loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target.flatten())


def _batch(number: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(number)
    tokens, target = torch.randint(CLASSES, (2, ROWS, LENGTH), generator=draws)
    return tokens, target.where(torch.rand(ROWS, LENGTH, generator=draws) > 0.3, -100)


@contextmanager
def random_prices(seed: int) -> Iterator[None]:
    """Inside, each way to run an operator costs up to a hundredth of a second, by a digest of the seed and the way."""
    init, seconds = options._Pricer.__init__, options._Pricer.seconds

    def known(self: Any, node: Any, *others: Any) -> None:
        init(self, node, *others)
        self.operator = operator_name(node.target)  # not itself: of a function Python prints where it lies

    def drawn(self: Any, row: Any, moved: int) -> tuple[float, float]:
        digest = zlib.crc32(f"{seed} {self.operator} {list(row)} {moved}".encode())
        whole, again = seconds(self, row, moved)
        return whole + digest / 2**32 / 100, again

    with patch.object(options._Pricer, "__init__", known), patch.object(options._Pricer, "seconds", drawn):
        yield


Seen = dict[str, Any]


def _train(losses: Callable[[int, bool], float], step: Callable[[int], Seen]) -> list[Seen]:
    """Two steps; ``losses`` adds to the gradients what a batch gives, ``step`` tells of gradients and parameters."""
    seen = []
    for number in range(STEPS):
        first = number * ACCUMULATED
        found = [losses(first + i, i == ACCUMULATED - 1) for i in range(ACCUMULATED)]
        seen.append({"loss": found, **step(number)})
    return seen


def _alone(model: nn.Module) -> list[Seen]:
    """What one process sees."""

    def loss(number: int, last: bool) -> float:
        tokens, target = _batch(number)
        with plain_randomness(RandomState(0, number)):
            value = _loss(model(tokens), target)
            value.backward()
        return value.item()

    def step(number: int) -> Seen:
        parameters = dict(model.named_parameters())
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        grads = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
        _descend(parameters)
        after = {name: p.detach().clone() for name, p in parameters.items()}
        return {"norm": norm.item(), "grads": grads, "parameters": after}

    return _train(loss, step)


def _on_rank(rank: Rank) -> list[Seen]:
    clipper = Clipper(rank.store, rank.model)

    def loss(number: int, last: bool) -> float:
        rank.store.synchronise = last
        value = rank.loss(_batch(number), RandomState(0, number))
        value.backward()
        return value.item()

    def step(number: int) -> Seen:
        norm = clipper.clip_norm(MAX_NORM, 2.0, False, "propagate")
        grads = rank.gradients()
        _descend(rank.store.parameters)
        return {"norm": float(norm), "grads": grads, "parameters": rank.parameters()}

    return _train(loss, step)


@torch.no_grad()
def _descend(parameters: Any) -> None:
    for parameter in parameters.values():
        if parameter.grad is not None:
            parameter.sub_(parameter.grad, alpha=RATE)
            parameter.grad = None


def check(program: Program) -> None:
    """Trains it both ways, and compares all that is seen."""
    torch.manual_seed(program.prices)
    model = Model(program.blocks, program.tied).double()
    try:
        with random_prices(program.prices):
            simulation = Simulation(model, program.request, _batch(0))
    except PlanError:
        reject()
    ranks = simulation.run(_on_rank)
    for step, expected in enumerate(_alone(copy.deepcopy(model))):
        here = [rank[step] for rank in ranks]
        for seen in here:
            assert seen["loss"] == pytest.approx(expected["loss"], rel=1e-9), f"step {step}"
            assert seen["norm"] == pytest.approx(expected["norm"], rel=1e-9), f"step {step}"
            assert expected["norm"] > MAX_NORM, "the clip changes every gradient"
        for kind in ("grads", "parameters"):
            for name, value in expected[kind].items():
                found = simulation.whole(name, [seen[kind] for seen in here])
                found = torch.zeros_like(value) if found is None else found
                torch.testing.assert_close(found, value, rtol=1e-9, atol=1e-10, msg=lambda m: f"{kind} {name}: {m}")  # noqa: B023


KNOWN = [
    Program(("experts", "sorted"), 1, tied=True),
    Program(("three heads", "mlp"), 2, (("tp", 4),), linear_chunks=2),
    Program(("attention", "folded"), 3, (("tp", 2),), schedule="zero_bubble_v"),
]


@pytest.mark.wide_where(lambda program: program is not KNOWN[0])
@pytest.mark.parametrize("program", KNOWN, ids=str)
def test_known_programs(program: Program) -> None:
    check(program)


def examples(count: int, *, fixed: bool) -> settings:
    """So many programs; the same ones every time, if they are ``fixed``."""
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    return settings(max_examples=count, deadline=None, derandomize=fixed, suppress_health_check=checks, database=None)


@pytest.mark.slow
@examples(8, fixed=True)
@given(PROGRAMS)
def test_some_programs(program: Program) -> None:
    check(program)


@pytest.mark.slow
@examples(400, fixed=False)
@given(PROGRAMS)
def test_many_programs(program: Program) -> None:
    check(program)
