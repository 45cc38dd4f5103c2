"""What is made of as many rows as values select is one call, and the rest is sharded as ever."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import autoparallel
from autoparallel.capture.attempt import ON_SELECTED
from autoparallel.graph.captured import Captured
from autoparallel.operators.control_flow import inner_graphs, is_selection
from tests.captures import captured
from tests.runtime.support import mesh_of, run_on_ranks, whole


class Selects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Any:
        h = self.down(self.up(x).relu())
        return self.select(h)

    def select(self, h: Tensor) -> Any:
        raise NotImplementedError


def selections(of: Captured) -> list[fx.Node]:
    return [node for node in of.graph.nodes if is_selection(node.target)]


def calls(graph: fx.Graph, behind: fx.Node | None = None) -> list[str]:
    nodes = (n for n in graph.nodes if n.op == "call_function" and (behind is None or n > behind))
    names = (getattr(n.target, "__name__", "").removesuffix(".default") for n in nodes)
    return [name for name in names if name not in ("getitem", "ge", "sym_size.int", "_assert_scalar")]


def test_what_has_a_size_again_is_outside() -> None:
    class Sums(Selects):
        def select(self, h: Tensor) -> Any:
            return h[h > 0].exp().sum().log() * h.mean()

    graph = captured(Sums(), torch.randn(8, 8))
    (selection,) = selections(graph)
    (inside,) = inner_graphs(selection.target)
    assert calls(inside.graph) == ["index.Tensor", "exp", "sum"]
    assert {"linear", "relu", "gt.Scalar", "log", "mean", "mul.Tensor"} <= {*calls(graph.graph)}


def test_two_selections_are_two_calls_unless_one_reads_of_both() -> None:
    class Apart(Selects):
        def select(self, h: Tensor) -> Any:
            return h[h > 0].sum() * h[h < 0].sum()

    class Together(Selects):
        def select(self, h: Tensor) -> Any:
            return torch.cat([h[h > 0], h[h < 0]]).sum()

    assert len(selections(captured(Apart(), torch.randn(8, 8)))) == 2
    assert len(selections(captured(Together(), torch.randn(8, 8)))) == 1


def test_what_lies_between_two_parts_of_a_selection_is_inside() -> None:
    class Centres(Selects):
        def select(self, h: Tensor) -> Any:
            rows = h[h > 0]
            centre = rows.mean().tanh()  # has a size, and rows are read again with it
            beside = h.sin().sum()
            return (rows - centre).square().sum() + beside

    graph = captured(Centres(), torch.randn(8, 8))
    (selection,) = selections(graph)
    (inside,) = inner_graphs(selection.target)
    assert "tanh" in calls(inside.graph) and "sin" not in calls(inside.graph)


def test_what_reads_a_selection_early_comes_after_it() -> None:
    class Early(Selects):
        def select(self, h: Tensor) -> Any:
            rows = h[h > 0]
            early = rows.sum() * h.mean()
            late = h.cos().mean()  # an operand of the selection, computed after what reads of it
            return early, (rows * late).sum()

    model, x = Early().double(), torch.randn(8, 8, dtype=torch.float64)
    graph = captured(model, x)
    names = [node.name for node in graph.graph.nodes]
    (selection,) = selections(graph)
    assert all(names.index(operand.name) < names.index(selection.name) for operand in selection.all_input_nodes)
    graph.graph.lint()


def _losses(h: Tensor) -> Tensor:
    mask = h[:, 0] > 0
    return F.cross_entropy(h[mask], h[mask].argmin(1), ignore_index=2)


@pytest.mark.parametrize(
    ("loss", "inside", "behind"),
    [
        (_losses, ["index.Tensor", "index.Tensor", "argmin", "cross_entropy_sum", "cross_entropy_weight", "stack"],
         ["select.int", "select.int", "detach", "weighted_mean"]),
        (lambda h: h[h > 0].exp().mean(), ["index.Tensor", "exp", "sum.dim_IntList"], ["weighted_mean"]),
        (lambda h: h[h[:, 0] > 0].mean(0).square(), ["index.Tensor", "sum.dim_IntList", "require_sizes"],
         ["div.Tensor", "square"]),
        (lambda h: h[h > 0].sum() / len(h[h > 0]), ["index.Tensor", "sum"], ["gt.Scalar", "mean_or_sum"]),
        (lambda h: F.l1_loss(h[h > 0], h.exp()[h > 0]), ["index.Tensor", "index.Tensor", "l1_loss", "sum.dim_IntList"],
         ["weighted_mean"]),
        (lambda h: torch.stack([rows := h[h > 0], rows - rows.mean()]).abs().sum(),
         ["index.Tensor", "sum.dim_IntList", "weighted_mean", "sub.Tensor", "stack", "abs", "sum"], []),
    ],
    ids=["classes", "mean", "over rows", "by their number", "of each", "from their mean"],
)  # fmt: skip
def test_means_of_selected_rows_are_quotients(loss: Any, inside: list[str], behind: list[str]) -> None:
    class Loss(Selects):
        def select(self, h: Tensor) -> Any:
            return loss(h)

    graph = captured(Loss(), torch.randn(8, 8))
    (selection,) = selections(graph)
    (inner,) = inner_graphs(selection.target)
    assert calls(inner.graph) == inside
    assert [name for name in calls(graph.graph, selection) if name != "sum"] == behind


def test_parameters_that_selected_rows_read_are_named(caplog: pytest.LogCaptureFixture) -> None:
    class Heads(Selects):
        def select(self, h: Tensor) -> Any:
            return self.reduce(F.linear(h[h[:, 0] > 0], self.up.weight, self.up.bias))

        def reduce(self, rows: Tensor) -> Tensor:
            return rows.cumsum(0).sum()

    class Sums(Heads):
        def reduce(self, rows: Tensor) -> Tensor:
            return rows.sum()

    named = ON_SELECTED.partition(",")[0].replace("%d", "2")
    captured(Sums(), torch.randn(8, 8))
    assert named not in caplog.text, "each row is left alone, so that they are sharded"
    captured(Heads(), torch.randn(8, 8))
    assert named in caplog.text


def test_what_numbers_size_is_one_call() -> None:
    class Splits(Selects):
        def select(self, h: Tensor) -> Any:
            best = h.argmax(-1)
            parts = h.split(torch.bincount(best, minlength=8).tolist())
            return torch.cat([part.exp() for part in parts])[best.argsort()] * h

    graph = captured(Splits(), torch.randn(8, 8))
    (selection,) = selections(graph)
    (inside,) = inner_graphs(selection.target)
    names = calls(inside.graph)
    assert {"split_with_sizes", "exp", "cat", "require_sizes"} <= {*names} and "linear" not in names
    assert "mul.Tensor" in calls(graph.graph)


class Views(nn.Module):
    """As many rows as are positive, where the rest takes two of each."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)[x > 0].view(x.shape[0], 2).sum(1)


class Adds(Views):
    """Where eager takes one number for all."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)[x > 0] + x[:, 0]


def _words_of(model: Any, positive: int) -> str:
    x = -torch.ones(4, 8)
    x[:, :positive] = 1.0
    if not positive:
        x[0, 0] = 1.0
    try:
        model(x)
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def _selecting_on_ranks(plan: str) -> list[str]:
    views = autoparallel.compile(Views(), mesh_of(2), plan=plan)
    adds = autoparallel.compile(Adds(), mesh_of(2), plan=plan)
    return [_words_of(views, 2), _words_of(views, 3), _words_of(adds, 1), _words_of(adds, 0)]


@pytest.mark.parametrize("plan", ["fsdp", "tensor_parallel"])
def test_too_many_rows_end_all_ranks(plan: str) -> None:
    for views, more, adds, one in run_on_ranks(_selecting_on_ranks, plan, world_size=2):
        assert views == adds == "nothing was raised"
        assert "[12]" in more and "[8]" in more and "test_selections.py" in more, more
        assert "[1]" in one and "[4]" in one, one


def test_rows_of_which_each_keeps_some_leave_the_batch_open(caplog: pytest.LogCaptureFixture) -> None:
    class Keeps(Selects):
        """A mixture of depths."""

        def select(self, h: Tensor) -> Any:
            best = h.sum(-1).topk(4, dim=1).indices
            mask = torch.zeros(h.shape[0], h.shape[1], dtype=torch.bool).scatter(1, best, True)
            return self.down(self.up(h[mask].view(h.shape[0], 4, 8)))

    model = autoparallel.compile(Keeps())
    for rows in (4, 6, 5):
        assert model(torch.randn(rows, 8, 8)).shape == (rows, 4, 8)
    assert "once more" not in caplog.text


class Contrasts(Selects):
    """Rows of two masks beside each other."""

    def forward(self, x: Tensor) -> Any:
        h = self.down(self.up(x).relu())
        return self.contrast(h[x[:, 0] > 0], h[x[:, 0] < 0])

    def contrast(self, few: Tensor, many: Tensor) -> Tensor:
        raise NotImplementedError


def _by_number(few: Tensor, many: Tensor) -> Tensor:
    distance = (few - many).square()
    return distance.sum() / distance.shape[0]


def _later(few: Tensor, many: Tensor) -> Tensor:
    both = few * many
    return F.mse_loss(both, many.exp()) + F.l1_loss(few.exp(), both)


@pytest.mark.parametrize(
    ("contrast", "broadcasts"),
    [
        (lambda few, many: (few - many).square().mean(), True),
        (lambda few, many: F.mse_loss(few * many, many), True),
        (F.mse_loss, False),
        (_by_number, False),
        (_later, False),
        (lambda few, many: torch.cdist(few, many).sum() / few.shape[0], True),
        (lambda few, many: (few[:, None] - many[None]).square().sum() / few.shape[0], True),
    ],
    ids=["of each", "loss of all", "loss", "number", "later", "pairs", "pairs by hand"],
)
def test_one_row_for_all_is_as_in_eager_or_refused(contrast: Any, broadcasts: bool) -> None:
    class Contrast(Contrasts):
        def contrast(self, few: Tensor, many: Tensor) -> Tensor:
            return contrast(few, many)

    plain = Contrast().double()
    model = autoparallel.compile(copy.deepcopy(plain))
    pairs, one = torch.randn(4, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)
    pairs[:, 0], one[:, 0] = torch.tensor([1, 1, -1, -1]), torch.tensor([-1, 1, -1, -1])
    for inputs in (pairs, one) if broadcasts else (pairs,):
        ours, theirs = model(inputs), plain(inputs)
        assert torch.allclose(ours, theirs, rtol=1e-12)
        ours.backward(), theirs.backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(whole(p.grad), q.grad, rtol=1e-12)
    if not broadcasts:
        with pytest.raises(RuntimeError, match=r"test_selections\.py.*(\n.*)*one row that stands for all"):
            model(one)
