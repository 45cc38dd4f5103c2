"""Whole numbers of the inputs that Python reads belong to the kind of call."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import autoparallel
from autoparallel.comm.world import make_mesh
from autoparallel.graph.input_values import Input, Result, Step, Values, mapped
from autoparallel.hardware import CPU
from autoparallel.planner.draft import call_of
from autoparallel.planner.planner import Planner
from autoparallel.planner.request.request import Request
from tests.captures import captured
from tests.distributed import run_distributed


class Splits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        parts = self.head(x).split(lengths.tolist(), dim=1)
        return torch.stack([part.mean((1, 2)) for part in parts]).prod(0)


def batch(*lengths: int, rows: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 7, 8, dtype=torch.float64), torch.tensor(lengths)


@pytest.mark.wide
def test_only_the_input_that_is_read_is_kept() -> None:
    leaves = batch(3, 4)
    graph = captured(Splits().double(), *leaves, values=True)
    read = graph.state.inputs[0]
    assert graph.state.read_of(leaves) == (None, leaves[1])
    assert [value.value for value in read.reads] == [(int, 3), (int, 4)]


def test_what_is_read_is_planned_without_ranks() -> None:
    """``python -m autoparallel plan --real-tensors`` and ``verify`` give a call its values, as a loop does; the batch
    stays open."""
    request = Request((("dp", 2),), CPU, "fsdp")
    graph = Planner(Splits().double(), request).capture(call_of(batch(3, 4)))
    assert [value.value for value in graph.state.inputs[0].reads] == [(int, 3), (int, 4)] and graph.batches


@pytest.mark.wide
def test_of_many_numbers_none_is_read_while_sizes_are_open() -> None:
    leaves = batch(*[1] * 3, *[0] * 20, 4)
    graph = captured(Splits().double(), *leaves, values=True)
    assert not graph.batches and [kind for kind, *_ in (read.value for read in graph.state.inputs[0].reads)] == [list]


def test_the_inputs_are_not_changed_and_slices_have_bounds() -> None:
    x = torch.arange(6)
    first = Result(Step(0, Tensor.add_, (Input(0), 1), {}, True), 0)
    second = Result(Step(1, Tensor.__getitem__, (first, slice(Input(1), None)), {}, False), 0)
    values = Values([x, torch.tensor(4)])
    assert values.of(second).tolist() == [5, 6] and x.tolist() == [*range(6)]
    assert mapped({"a": [slice(1, 2)], "b": (3,)}, lambda x: x and 2 * x) == {"a": [slice(2, 4)], "b": (6,)}


def _calls() -> tuple[list[float], int, list[str]]:
    logs: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logs.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("autoparallel").addHandler(handler)
    mesh = make_mesh("cpu", (("dp", 2),))
    torch.manual_seed(0)
    plain = Splits().double()
    model = autoparallel.compile(Splits().double(), mesh, plan="fsdp")
    model.load_state_dict(plain.state_dict())
    off = []
    model.eval()  # parameters are laid out for a batch that divides, of which nobody has the values
    for lengths, rows in (((3, 4), 3), ((3, 4), 4), ((2, 5), 4), ((1, 6), 4), ((5, 2), 4), ((3, 4), 4)):
        model.train(rows == 4)
        x, sizes = batch(*lengths, rows=rows)
        ours, theirs = model(x, sizes), plain(x, sizes)
        off.append(float((ours - theirs).detach().abs().max()))
    explained = str(model.plan.explain())
    x, sizes = batch(3, 4)
    part = sizes.chunk(2)[torch.distributed.get_rank()]
    for given in (DTensor.from_local(sizes, mesh, [Replicate()]), DTensor.from_local(part, mesh, [Shard(0)])):
        off.append(float((model(x, given) - plain(x, sizes)).detach().abs().max()))
    logging.getLogger("autoparallel").removeHandler(handler)
    assert explained
    return off, len(list(model._kinds)), logs


@pytest.mark.slow
def test_each_value_is_a_kind_of_its_own() -> None:
    results = run_distributed(_calls, world_size=2)
    for off, kinds, _ in results:
        assert max(off) < 1e-9
        assert kinds == 7  # a DTensor is another form of the inputs; of its parts nobody has all values: they are sizes
    logs = results[0][2]
    assert sum("has changed: the model was captured" in line for line in logs) == 3
    assert sum("compute what follows from it before the call" in line for line in logs) == 1


class Lengths(nn.Module):
    """As many numbers as there are rows."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return torch.stack([row[:n].sum((0, 1)) for row, n in zip(self.head(x), lengths.tolist(), strict=True)])


def _evaluated_first() -> float:
    torch.manual_seed(0)
    plain = Lengths().double().eval()
    model = autoparallel.compile(Lengths().double().eval(), make_mesh("cpu", (("dp", 2),)), plan="auto")
    model.load_state_dict(plain.state_dict())
    inputs = batch(3, 4, 6, rows=3)
    return float((model(*inputs) - plain(*inputs)).detach().abs().max())


@pytest.mark.wide
def test_an_odd_batch_may_come_first() -> None:
    """Parameters are planned on a batch that divides, where a model can be captured with one."""
    assert max(run_distributed(_evaluated_first, world_size=2)) < 1e-9


def _differing() -> str:
    model: Any = autoparallel.compile(Splits().double(), make_mesh("cpu", (("dp", 2),)), plan="fsdp", check_inputs=0)
    model(*batch(3, 4))
    torch.manual_seed(1)
    x, _ = batch(3, 4)
    try:
        model(x, torch.tensor([3, 4] if torch.distributed.get_rank() else [4, 3]))
    except RuntimeError as error:
        return f"{type(error).__name__} {error}"
    return ""


@pytest.mark.wide
def test_ranks_that_read_differently_are_told() -> None:
    assert all("RankMismatchError" in words for words in run_distributed(_differing, world_size=2))
