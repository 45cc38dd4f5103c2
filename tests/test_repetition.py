"""Layers captured once: the graph is the very same, and whatever is not alike is traced as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils import _pytree as pytree

from autoparallel.capture import attempt
from autoparallel.capture.functional.layers import Stack, find_stacks
from autoparallel.graph.captured import Captured
from autoparallel.graph.layers import draw_of
from autoparallel.operators.flex import is_flex
from tests import captures

LAYERS = 7


class Block(nn.Module):
    """A residual MLP; `place` may change what it computes."""

    def __init__(self, place: int, scale: float = 0.5) -> None:
        super().__init__()
        self.up, self.down, self.place, self.scale = nn.Linear(8, 16), nn.Linear(16, 8), place, scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(F.gelu(self.up(x)))


class Odd(Block):
    """The fifth layer does something else."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu() if self.place == 4 else super().forward(x)


class Counting(Block):
    """Every layer keeps statistics of its own."""

    def __init__(self, place: int) -> None:
        super().__init__(place)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


class Model(nn.Module):
    """Blocks in a row; `ends` says what of them is returned."""

    def __init__(
        self, make: Callable[[int], nn.Module], ends: Callable[[list[Tensor]], Any] = lambda xs: xs[-1]
    ) -> None:
        super().__init__()
        self.blocks, self.head, self.ends = nn.ModuleList(map(make, range(LAYERS))), nn.Linear(8, 4), ends

    def forward(self, x: Tensor) -> Any:
        found = [x]
        for block in self.blocks:
            found.append(block(found[-1]))
        return pytree.tree_map(self.head, self.ends(found))


def _capture(model: nn.Module) -> Captured:
    return captures.captured(model, torch.randn(4, 8), torch.randint(4, (4,)), loss_fn=_loss)


def _loss(output: Any, target: Tensor) -> Tensor:
    return sum(F.cross_entropy(x, target) for x in pytree.tree_leaves(output))  # type: ignore[return-value]


@pytest.fixture
def stacks(monkeypatch: pytest.MonkeyPatch) -> list[list[Stack]]:
    """What was found, call by call."""
    found: list[list[Stack]] = []

    def note(*args: Any) -> list[Stack]:
        found.append(find_stacks(*args))
        return found[-1]

    monkeypatch.setattr(attempt, "find_stacks", note)
    return found


def _whole(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Captured:
    with monkeypatch.context() as patch:
        patch.setattr(attempt, "find_stacks", lambda *args: find_stacks(*args) and [])
        return _capture(model)


def _text(captured: Captured) -> list[Any]:
    """The graph, its nodes named by their places; copies have other names than traced nodes."""
    place = {node: i for i, node in enumerate(captured.graph.nodes)}
    names = captured.parameters | captured.buffers
    kept = ("module", "differentiable", "backward", "batch_factors")
    return [
        (
            names.get(node.name) or node.target,
            str(fx.map_arg((node.args, node.kwargs), place.__getitem__)),
            [node.meta.get(k) for k in kept],
            node.meta["key"] if node.op == "call_function" else "",
            [(str(v.shape), v.dtype) for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, Tensor)],
        )
        for node in captured.graph.nodes
    ]


def _require_same(a: Captured, b: Captured) -> None:
    assert _text(a) == _text(b)
    assert [run.members for run in a.runs] == [run.members for run in b.runs]
    assert list(a.parameters.values()) == list(b.parameters.values())
    assert a.mutated == b.mutated


def test_the_graph_is_that_of_the_whole_trace(stacks: list[list[Stack]], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Model(Block)
    captured = _capture(model)
    assert stacks == [[Stack("model.blocks", 1, LAYERS - 1)]]
    assert len(captured.parameters) == 4 * LAYERS + 2
    (run,) = captured.runs  # the first layer reads the input
    assert run.members == tuple(f"blocks.{i}" for i in range(1, LAYERS))
    assert [captured.parameters[name] for name in run.placeholders[-1]] == [
        f"blocks.6.{name}" for name in ("up.weight", "up.bias", "down.weight", "down.bias")
    ]
    _require_same(captured, _whole(model, monkeypatch))


class Noisy(Block):
    """Draws twice; `dead` draws once more, and nobody reads it."""

    dead = False

    def forward(self, x: Tensor) -> Tensor:
        if self.dead:
            torch.rand_like(x)
        return super().forward(F.dropout(x, 0.1)) * torch.rand(8)


class Wasteful(Noisy):
    dead = True


class Dropping(Model):
    """Draws before the layers and after them, too."""

    def forward(self, x: Tensor) -> Any:
        return F.dropout(super().forward(F.dropout(x, 0.2)), 0.3) + torch.rand(4)


@pytest.mark.wide
def test_draws_count_on_from_layer_to_layer(stacks: list[list[Stack]], monkeypatch: pytest.MonkeyPatch) -> None:
    model = Dropping(Noisy)
    captured, whole = _capture(model), _whole(model, monkeypatch)
    assert stacks == [[Stack("model.blocks", 0, LAYERS)]]  # the first reads what a dropout gives, not a layer
    assert captured.draws == whole.draws == 2 * LAYERS + 3
    assert [n for node in captured.graph.nodes if (n := draw_of(node)) is not None] == list(range(captured.draws))
    _require_same(captured, whole)
    assert [len(run.members) for run in captured.runs] == [LAYERS - 1]


@pytest.mark.wide
def test_draws_that_nobody_reads_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Dropping(Wasteful)
    captured, whole = _capture(model), _whole(model, monkeypatch)
    assert captured.draws == whole.draws == 3 * LAYERS + 3
    _require_same(captured, whole)


@pytest.mark.parametrize(
    ("make", "ends", "first"),
    [
        (lambda i: Block(i, 0.5 if i != 4 else 0.25), lambda xs: xs[-1], None),
        pytest.param(Odd, lambda xs: xs[-1], None, marks=pytest.mark.wide),
        pytest.param(Block, lambda xs: xs[1:], None, marks=pytest.mark.wide),
        pytest.param(Block, lambda xs: xs[-1] + xs[3], None, marks=pytest.mark.wide),
        pytest.param(Block, lambda xs: xs[-1] / len(xs), None, marks=pytest.mark.wide),
        pytest.param(Block, lambda xs: xs[-1] * torch.tensor(1 / len(xs)), None, marks=pytest.mark.wide),
        pytest.param(lambda i: Block(i).requires_grad_(i > 1), lambda xs: xs[-1], 2, marks=pytest.mark.wide),
        pytest.param(lambda i: Block(i, 0.5 if i else 0.25), lambda xs: xs[-1] + xs[1], 1, marks=pytest.mark.wide),
        pytest.param(Counting, lambda xs: xs[-1], 1, marks=pytest.mark.wide),
    ],
    ids=[
        "a constant",
        "code",
        "all are returned",
        "one is read later",
        "their number",
        "a tensor of their number",
        "frozen",
        "the first differs",
        "buffers change",
    ],
)
def test_what_is_not_alike_is_traced(
    make: Callable[[int], nn.Module],
    ends: Callable[[list[Tensor]], Any],
    first: int | None,
    stacks: list[list[Stack]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = Model(make, ends)
    captured = _capture(model)
    assert stacks == ([[]] if first is None else [[Stack("model.blocks", first, LAYERS - first)]])
    _require_same(captured, _whole(model, monkeypatch))


class Attention(Block):
    """Scores by a function that knows its scale."""

    def forward(self, x: Tensor) -> Tensor:
        scale, rows = self.scale, x[:, None, None]
        return x + self.down(self.up(flex_attention(rows, rows, rows, score_mod=lambda s, *_: s * scale)[:, 0, 0]))


@pytest.mark.slow
@pytest.mark.parametrize("other", [2, 3])
def test_functions_of_flex_attention_are_compared(other: int, stacks: list[list[Stack]]) -> None:
    captured = _capture(Model(lambda i: Attention(i, 2 if i != 4 else other)))
    assert stacks == [[Stack("model.blocks", 1, LAYERS - 1)] if other == 2 else []]
    functions = [node.target for node in captured.graph.nodes if is_flex(node.target)]
    assert [function is functions[0] for function in functions] == [i != 4 or other == 2 for i in range(LAYERS)]
