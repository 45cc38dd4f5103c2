"""Sizes and numbers that change from call to call: one trace and one plan for all of them, equal to eager."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import autoparallel
from autoparallel.planner import planner
from autoparallel.planner.request.pins import Pins
from tests.distributed import run_distributed
from tests.models.gpt import GPT
from tests.runtime.support import gradients_off, mesh_of

LENGTHS = (12, 10, 12, 7, 10, 16)

Results = dict[str, Any]


def _train(make: Callable[[], nn.Module], calls: Sequence[tuple[Any, ...]], world: int, **options: Any) -> Results:
    """Makes calls of a compiled model and of a plain one: how far their losses and gradients are apart, and how many
    traces and plans there were.

    Args:
        calls: the arguments of each; a tuple of sizes stands for a tensor of them, of tokens where the model is a GPT.
    """
    torch.manual_seed(0)
    plain, model = make().double(), make().double()
    model.load_state_dict(plain.state_dict())
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("autoparallel").addHandler(handler)
    traces, plans = [], []
    capture, search = planner.capture, planner.Planner.search
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "capture", lambda *a, **k: (traces.append(1), capture(*a, **k))[1])
        patch.setattr(planner.Planner, "search", lambda *a, **k: (plans.append(1), search(*a, **k))[1])
        compiled: Any = autoparallel.compile(model, mesh_of(world), **options)
        apart = 0.0
        for step, call in enumerate(calls):
            generator = torch.Generator().manual_seed(step)
            args = [_tensor(x, make is GPT, generator) if isinstance(x, tuple) else x for x in call]
            losses = [_loss(m(*args)) for m in (compiled, plain)]
            for loss in losses:
                loss.backward()
            apart = max(apart, (losses[0] - losses[1]).abs().item())
            assert all(q.grad is not None and q.grad.abs().sum() > 0 for q in plain.parameters())
            apart = max(apart, gradients_off(compiled, plain))
    logging.getLogger("autoparallel").removeHandler(handler)
    messages = [r.getMessage() for r in records if r.levelno >= logging.WARNING]
    return {"apart": apart, "traces": len(traces), "plans": len(plans), "messages": messages}


def _tensor(size: tuple[int, ...], tokens: bool, generator: torch.Generator) -> Tensor:
    if tokens:
        return torch.randint(0, 64, size, generator=generator)
    return torch.randn(size, generator=generator, dtype=torch.float64)


def _loss(output: Any) -> Tensor:
    if isinstance(output, torch.distributed.tensor.DTensor):
        output = output.full_tensor()
    return output if output.ndim == 0 else output.square().mean()


def results_of(make: Callable[[], nn.Module], calls: Sequence[Any], world: int = 1, **options: Any) -> Results:
    results: Results = run_distributed(_train, make, calls, world, world_size=world, **options)[0]
    assert results["apart"] < 1e-9
    return results


# ------------------------------------------------------------------------------------------------------------- lengths


class Cumulative(nn.Module):
    """Reads along its second dim: whatever is cut there must come from everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x).softmax(1).mul(x).square().mean()


def test_all_lengths_have_two_traces_and_two_plans() -> None:
    results = results_of(Cumulative, [((4, n, 6),) for n in LENGTHS], plan="data_parallel")
    assert (results["traces"], results["plans"], results["messages"]) == (2, 2, [])


def _evaluate(lengths: Sequence[int]) -> tuple[list[int], float]:
    """How many kinds of calls there are after each, in evaluation after two lengths of training."""
    model = Cumulative().double()
    compiled: Any = autoparallel.compile(model, mesh_of(1), plan="fsdp")
    kinds, apart = [], 0.0
    for number, length in enumerate(lengths):
        compiled.train(number < 2)
        x = torch.randn(4, length, 6, dtype=torch.float64)
        project = compiled.project
        weight, bias = project.weight.full_tensor(), project.bias.full_tensor()
        expected = F.linear(x, weight, bias).softmax(1).mul(x).square().mean()
        apart = max(apart, (compiled(x) - expected).abs().item())
        kinds.append(len(compiled._kinds))
    return kinds, apart


def test_a_length_that_is_open_in_training_is_so_in_evaluation() -> None:
    ((kinds, apart),) = run_distributed(_evaluate, (12, 10, 12, 7, 9), world_size=1)
    assert kinds == [1, 2, 3, 3, 3] and apart < 1e-9


@pytest.mark.wide
@pytest.mark.slow_where(lambda plan: plan in ("data_parallel", "tensor_parallel"))
@pytest.mark.parametrize("plan", ["data_parallel", "fsdp", "tensor_parallel", "auto"])
def test_lengths_of_a_gpt_on_two_ranks(plan: str) -> None:
    results = results_of(GPT, [((4, n),) for n in LENGTHS], 2, plan=plan)
    assert results["traces"] == 2 and not results["messages"]


class TwoLengths(nn.Module):
    """An encoder's and a decoder's length."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.q(x), self.k(y), y).square().mean()


@pytest.mark.wide
def test_lengths_that_part_ways() -> None:
    """Two that were the same at first are known for two as soon as they differ."""
    sizes = [(5, 5), (7, 7), (7, 4), (6, 3), (8, 9)]
    results = results_of(TwoLengths, [((4, a, 6), (4, b, 6)) for a, b in sizes])
    assert results["traces"] <= 4


class Narrow(Cumulative):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.shape[1] > 6 else x * 2)


@pytest.mark.wide
def test_a_question_about_a_length_has_a_trace_for_each_answer() -> None:
    results = results_of(Narrow, [((4, n, 6),) for n in (12, 10, 5, 9, 1)])
    assert results["traces"] == 4  # 12, all that are longer than 6, 5, and 1, which is never open


class Unrolled(Cumulative):
    def forward(self, x: Tensor) -> Tensor:
        steps = [self.project(x[:, t]) * (t + 1) for t in range(x.shape[1])]  # the line
        return torch.stack(steps).square().mean()


@pytest.mark.wide
def test_a_length_that_the_model_fixes_is_named_once() -> None:
    results = results_of(Unrolled, [((4, n, 6),) for n in (5, 3, 4, 2, 3)])
    assert results["traces"] == 4
    (message,) = results["messages"]
    assert "for t in range(x.shape[1])]  # the line" in message and "captured and planned once more" in message


def _sharded_lengths(lengths: Sequence[int]) -> Results:
    """Lengths are cut wherever they can be."""
    search = planner.Planner.search

    def cut(self: planner.Planner, *args: Any) -> Any:
        try:
            return search(self, *args)
        except autoparallel.PlanError:
            return search(planner.Planner(self.model, replace(self.request, pins=Pins())), *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner.Planner, "search", cut)
        return _train(Cumulative, [((4, n, 6),) for n in lengths], 2, pins={"project": (Shard(1),)})


@pytest.mark.wide
def test_a_length_that_a_plan_cannot_cut_is_planned_again() -> None:
    results: Results = run_distributed(_sharded_lengths, (12, 10, 7, 16, 9), world_size=2)[0]
    assert results["apart"] < 1e-9
    assert (results["traces"], results["plans"]) == (2, 4)  # for 12, for all even ones, for 7, for 9
    (message,) = results["messages"]
    assert "were planned once more" in message and "into 2 parts" in message


# ------------------------------------------------------------------------------------------------------------- batches


class Contrastive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        similar = self.project(x) @ x.t()
        return F.cross_entropy(similar, torch.tensor(list(range(len(similar)))))  # the line


def test_a_batch_that_the_model_fixes_is_still_sharded() -> None:
    results = results_of(Contrastive, [((n, 6),) for n in (4, 2, 8)], 2, plan="data_parallel")
    (message,) = results["messages"]
    assert "torch.tensor(list(range(len(similar)))))  # the line" in message


class Neighbours(nn.Module):
    """Its first input has no batch, and as many rows as divide it."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(6, 6)

    def forward(self, adjacency: Tensor, x: Tensor) -> Tensor:
        return self.project(adjacency @ x).square().mean()


@pytest.mark.wide
def test_a_first_input_without_a_batch() -> None:
    results_of(Neighbours, [((4, 4), (n, 4, 6)) for n in (8, 6, 4)], 2, plan="data_parallel")


class TimeMajor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(6, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.project(x).mean(0) - y).square().mean()


@pytest.mark.wide
def test_inputs_with_time_first() -> None:
    results_of(TimeMajor, [((n, 12, 6), (12, 6)) for n in (4, 6, 8)], 2, plan="fsdp")


class Checked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        torch._check_tensor_all(x.isfinite())  # the line
        if (x > 1e3).any():  # the line
            raise ValueError("too large")
        return self.project(x).square().mean()


@pytest.mark.wide
def test_a_check_of_values_is_left_out_and_named_once() -> None:
    messages = results_of(Checked, [((4, 6),), ((6, 6),)])["messages"]
    assert len(messages) == 2
    assert all("leaves out a check of values" in message and "# the line" in message for message in messages)


# ------------------------------------------------------------------------------------------------------------- numbers


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(6, 6)

    def forward(self, x: Tensor, scale: float, step: int) -> Tensor:
        return (self.project(x) * scale + step).square().mean() * (1 - scale)


def test_numbers_that_change_have_two_traces() -> None:
    results = results_of(Scaled, [((4, 6), s / 10, s) for s in range(1, 6)], plan="data_parallel")
    assert (results["traces"], results["messages"]) == (2, [])


class MadeWhole(Scaled):
    def forward(self, x: Tensor, scale: float, step: int) -> Tensor:
        length = int(x.shape[0] * 0.5)
        return self.project(x)[: int(length)].sum() / float(x.shape[0]) * int(step)


def test_rows_that_are_made_whole_numbers_have_one_trace() -> None:
    results = results_of(MadeWhole, [((4 + s, 6), 0.5, 1) for s in range(6)])
    assert (results["traces"], results["messages"]) == (1, []), results


class Compared(Scaled):
    def forward(self, x: Tensor, scale: float, step: int) -> Tensor:
        return super().forward(x, scale, step) if scale > 0.25 else self.project(x).square().mean()


@pytest.mark.wide
def test_a_number_that_the_model_compares_has_a_trace_for_each_answer() -> None:
    results = results_of(Compared, [((4, 6), s / 10, 1) for s in range(1, 5)])
    (message,) = results["messages"]
    assert results["traces"] == 3 and "what the model asks" in message, results


class Counted(Scaled):
    def forward(self, x: Tensor, scale: float, step: int) -> Tensor:
        return super().forward(x, scale, sum(2 for k in range(3, 20) if step > k))


@pytest.mark.wide
def test_many_answers_are_named() -> None:
    results = results_of(Counted, [((4, 6), 0.5, s) for s in range(1, 20)])
    assert [m for m in results["messages"] if "16 traces by now" in m], results
