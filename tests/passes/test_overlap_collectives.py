"""`overlap_collectives`: small programs, before and after, as text; what they compute, and in which order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autoparallel.comm import collectives
from autoparallel.comm.simulate import simulate
from autoparallel.graph.sizes import Sizes
from autoparallel.passes.chunk_linears import chunk_linears
from autoparallel.passes.overlap_collectives import overlap_collectives
from autoparallel.passes.verify_placements import verify_placements
from tests.passes.support import captured, placed, show

MODES = {"w0/aten.linear#0": ["shard:n"], "w1/aten.linear#0": ["shard:n"]}
PARAMETERS = {"w0.weight": "S0", "w1.weight": "S0"}


class Branches(nn.Module):
    """A product that is gathered, and what does not read it."""

    def __init__(self) -> None:
        super().__init__()
        self.w0 = nn.Linear(4, 4, bias=False)
        self.w1 = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w1(self.w0(x) * x.tanh())


def _programs() -> tuple[fx.GraphModule, fx.GraphModule]:
    """The program of a rank as it waits at once, and as it does not."""
    plain, _ = placed(captured(Branches(), torch.rand(8, 4)), MODES, PARAMETERS)
    graph = captured(Branches(), torch.rand(8, 4))
    sizes = Sizes(graph.actual)
    program, _ = placed(graph, MODES, PARAMETERS)
    chunk_linears(program, chunks=1, axis_sizes=(2,), sizes=sizes)
    overlap_collectives(program)
    program.graph.lint()
    program.recompile()
    return plain, program


def test_before_and_after() -> None:
    plain, program = _programs()
    assert show(plain)[3:] == [
        "linear = aten.linear(args_0, p_model_w0_weight)  S1",
        "tanh = aten.tanh(args_0)  I",
        "redistribute = collectives.redistribute(linear, 'S1', 'I', 'mesh0/tp')  I",
        "mul = aten.mul.Tensor(redistribute, tanh)  I",
        "redistribute_1 = collectives.redistribute(mul, 'I', 'R', 'mesh0/tp')  R",
        "linear_1 = aten.linear(redistribute_1, p_model_w1_weight)  S1",
        "redistribute_2 = collectives.redistribute(linear_1, 'S1', 'I', 'mesh0/tp')  I",
        "return [redistribute_2]",
    ]
    assert show(program)[3:] == [
        "linear = aten.linear(args_0, p_model_w0_weight)  S1",
        "start_redistribution = in_flight.start_redistribution(linear, 'S1', 'I', 'mesh0/tp')  S1",
        "tanh = aten.tanh(args_0)  I",
        "redistribute = in_flight.finish_redistribution(start_redistribution, 'S1', 'I', 'mesh0/tp')  I",
        "mul = aten.mul.Tensor(redistribute, tanh)  I",
        "redistribute_1 = chunked.redistribute_then_linear(mul, 'I', 'R', 'mesh0/tp', 1, [p_model_w1_weight], "
        "[None])  R",
        "getitem = _operator.getitem(redistribute_1, 0)  S1",
        "redistribute_2 = collectives.redistribute(getitem, 'S1', 'I', 'mesh0/tp')  I",
        "return [redistribute_2]",
    ]


class Order(TorchDispatchMode):
    """Notes products, and when collectives start and are waited for."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.seen: list[str] = []
        patch.setattr(collectives, "_start_all_reduce", self._noting("all_reduce", collectives._start_all_reduce))
        for kind in ("all_gather", "reduce_scatter"):
            patch.setitem(collectives._STARTERS, kind, self._noting(kind, collectives._STARTERS[kind]))

    def _noting(self, kind: str, starter: Callable[..., Any]) -> Callable[..., Any]:
        def start(*arguments: object) -> object:
            self.seen.append(f"start {kind}")
            wait = starter(*arguments)

            def finish() -> object:
                self.seen.append(f"wait for {kind}")
                return wait()

            return finish

        return start

    def __torch_dispatch__(self, func: object, types: object, args: object = (), kwargs: object = None) -> object:
        name = func._schema.name.removeprefix("aten::")  # type: ignore[attr-defined]
        if name in ("mm", "addmm", "tanh", "tanh_backward"):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))  # type: ignore[operator, misc]


def test_what_stands_between_runs_meanwhile_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    _, program = _programs()
    order = Order(monkeypatch)

    def rank(index: int) -> None:
        x, w0, w1 = (torch.rand(n, 4, requires_grad=True) for n in (8, 4, 4))
        with order:
            program(w0, w1, x)[0].sum().backward()

    simulate(rank, (1,), ("tp",))
    assert order.seen == [
        "mm", "start all_gather", "tanh", "wait for all_gather", "mm", "start all_gather", "wait for all_gather",
        "mm",  # the gradient of what the second layer reads
        "start all_reduce",
        "mm",  # that of its weight
        "wait for all_reduce", "tanh_backward", "mm", "mm",
    ]  # fmt: skip


def test_it_computes_the_same() -> None:
    plain, program = _programs()
    torch.manual_seed(0)
    x, w0, w1 = (torch.rand(n, 4, dtype=torch.float64) for n in (8, 4, 4))

    def run(module: fx.GraphModule, index: int) -> list[Tensor]:
        inputs = [part.detach().requires_grad_() for part in (w0.chunk(2)[index], w1.chunk(2)[index], x)]
        result = module(*inputs)[0]
        return [result, *torch.autograd.grad(result.square().sum(), inputs)]

    before, after = (simulate(lambda index, p=p: run(p, index), (2,), ("tp",)) for p in (plain, program))
    for one, other in zip(before, after, strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-14)


class Cut(nn.Module):
    """A product of rows that were cut, and what does not read it."""

    def __init__(self) -> None:
        super().__init__()
        self.w0 = nn.Linear(4, 4, bias=False)
        self.w1 = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.w0(x)
        return x.tanh() * self.w1(y)


@pytest.mark.parametrize(
    ("mode", "at_rest", "src"), [("I", "I", "I"), ("shard:n", "S0", "S1")], ids=["sliced", "moved"]
)
def test_rows_that_were_cut_are_right(mode: str, at_rest: str, src: str) -> None:
    modes = {"w0/aten.linear#0": [mode], "w1/aten.linear#0": ["shard:...0"]}
    plain, _ = placed(captured(Cut(), torch.rand(8, 4)), modes, {"w0.weight": at_rest})
    program, specification = placed(captured(Cut(), torch.rand(8, 4)), modes, {"w0.weight": at_rest})
    overlap_collectives(program)
    verify_placements(program, specification)
    program.recompile()
    assert f"finish_redistribution(start_redistribution, '{src}', 'S0', 'mesh0/tp')" in "\n".join(show(program))
    w0 = torch.rand(4, 4, dtype=torch.float64)
    x, w1 = torch.rand(8, 4, dtype=torch.float64), torch.rand(4, 4, dtype=torch.float64)

    def run(module: fx.GraphModule, index: int) -> list[Tensor]:
        mine = w0.chunk(2)[index] if at_rest == "S0" else w0
        inputs = [part.detach().requires_grad_() for part in (mine, w1, x)]
        result = module(*inputs)[0]
        return [result, *torch.autograd.grad(result.square().sum(), inputs[:2])]

    before, after = (simulate(lambda index, p=p: run(p, index), (2,), ("tp",)) for p in (plain, program))
    for one, other in zip(before, after, strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-14)


def test_where_nothing_else_computes_it_stays_one_call() -> None:
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False))
    modes = {"0/aten.linear#0": ["shard:n"], "1/aten.linear#0": ["shard:k"]}
    program, _ = placed(captured(model, torch.rand(8, 4)), modes, {"0.weight": "S0", "1.weight": "S1"})
    before = show(program)
    overlap_collectives(program)
    assert show(program) == before
