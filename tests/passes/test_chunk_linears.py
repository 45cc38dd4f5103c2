"""`chunk_linears`: small programs, before and after, as text; what they compute, send and do in which order."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from autoparallel.comm.simulate import simulate
from autoparallel.graph.sizes import Sizes
from autoparallel.operators.chunked import linear_then_redistribute, redistribute_then_linear
from autoparallel.passes.chunk_linears import chunk_linears
from autoparallel.passes.specification import PlacementError, Specification
from autoparallel.passes.verify_placements import verify_placements
from tests.passes.support import captured, placed, show
from tests.passes.test_overlap_collectives import Order


class Gated(nn.Module):
    """The MLP of Llama between parts of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.pre = nn.Linear(4, 4, bias=False)
        self.gate = nn.Linear(4, 8)
        self.up = nn.Linear(4, 8, bias=False)
        self.down = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.pre(x)
        return self.down(self.gate(y).sigmoid() * self.up(y))


MODES = {
    "pre/aten.linear#0": ["shard:...1"],
    "gate/aten.linear#0": ["shard:n"],
    "up/aten.linear#0": ["shard:n"],
    "/aten.sigmoid#0": ["shard:...2"],
    "/aten.mul.Tensor#0": ["shard:...2"],
    "down/aten.linear#0": ["shard:k"],
}
PARAMETERS = {"gate.weight": "S0", "gate.bias": "S0", "up.weight": "S0", "down.weight": "S1"}
LAYOUTS = {"x": "S1", "pre.weight": "R", **PARAMETERS}


def program(chunks: int | None, rows: int = 4, **options: Any) -> tuple[fx.GraphModule, Specification]:
    """A rank's program with chunks, or with plain layers, and what it must be."""
    graph = captured(Gated(), torch.rand(rows, 6, 4))
    sizes = Sizes(graph.actual)
    module, specification = placed(graph, MODES, PARAMETERS, outputs=["S1"])
    if chunks is not None:
        chunk_linears(module, chunks=chunks, axis_sizes=(2,), sizes=sizes, **options)
    module.graph.lint()
    module.recompile()
    return module, specification


def test_before_and_after() -> None:
    assert show(program(None)[0])[8:] == [
        "redistribute_1 = collectives.redistribute(p_model_pre_weight, 'I', 'R', 'mesh0/tp')  R",
        "linear = aten.linear(redistribute, redistribute_1)  S1",
        "redistribute_2 = collectives.redistribute(linear, 'S1', 'R', 'mesh0/tp')  R",
        "linear_1 = aten.linear(redistribute_2, p_model_gate_weight, p_model_gate_bias)  S2",
        "sigmoid = aten.sigmoid(linear_1)  S2",
        "linear_2 = aten.linear(redistribute_2, p_model_up_weight)  S2",
        "mul = aten.mul.Tensor(sigmoid, linear_2)  S2",
        "redistribute_3 = collectives.redistribute(p_model_down_bias, 'I', 'P', 'mesh0/tp')  P",
        "linear_3 = aten.linear(mul, p_model_down_weight, redistribute_3)  P",
        "redistribute_4 = collectives.redistribute(linear_3, 'P', 'S1', 'mesh0/tp')  S1",
        "return [redistribute_4]",
    ]
    assert show(program(2)[0])[8:] == [
        "redistribute_1 = collectives.redistribute(p_model_pre_weight, 'I', 'R', 'mesh0/tp')  R",
        "linear = aten.linear(redistribute, redistribute_1)  S1",
        "redistribute_2 = chunked.redistribute_then_linear(linear, 'S1', 'R', 'mesh0/tp', 2, "
        "[p_model_gate_weight, p_model_up_weight], [p_model_gate_bias, None])  R",
        "getitem = _operator.getitem(redistribute_2, 0)  S2",
        "getitem_1 = _operator.getitem(redistribute_2, 1)  S2",
        "sigmoid = aten.sigmoid(getitem)  S2",
        "mul = aten.mul.Tensor(sigmoid, getitem_1)  S2",
        "redistribute_3 = collectives.redistribute(p_model_down_bias, 'I', 'P', 'mesh0/tp')  P",
        "redistribute_4 = chunked.linear_then_redistribute(mul, 'P', 'S1', 'mesh0/tp', 2, p_model_down_weight, "
        "redistribute_3)  S1",
        "return [redistribute_4]",
    ]


def test_what_the_backward_exchanges_is_put_together_in_one_chunk() -> None:
    before, after = (show(program(chunks)[0]) for chunks in (None, 1))
    merged = "chunked.redistribute_then_linear(linear, 'S1', 'R', 'mesh0/tp', 1, [p_model_gate_weight, "
    assert sum(merged in line for line in after) == 1
    assert before[-2] == after[-2] == "redistribute_4 = collectives.redistribute(linear_3, 'P', 'S1', 'mesh0/tp')  S1"


def test_frozen_layers_have_no_gradient_that_runs_beside_anything() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 8, bias=False)).requires_grad_(False)
    model[0].requires_grad_(True)
    graph = captured(model, torch.rand(8, 4))
    sizes = Sizes(graph.actual)
    module, _ = placed(graph, {"1/aten.linear#0": ["shard:n"]}, {"1.weight": "S0"})
    chunk_linears(module, chunks=1, axis_sizes=(2,), sizes=sizes)
    assert "chunked" not in str(show(module))


def test_rows_that_are_too_few_stay_together() -> None:
    assert show(program(4, rows=3)[0]) == show(program(1, rows=3)[0])


def test_layers_that_keep_what_their_products_make_stay_as_they_are() -> None:
    modes = {"0/aten.linear#0": ["shard:n"], "1/aten.linear#0": ["shard:k"]}

    def rewritten(kept: Collection[str]) -> list[str]:
        graph = captured(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4, bias=False)), torch.rand(8, 4))
        sizes = Sizes(graph.actual)
        module, _ = placed(graph, modes, {"0.weight": "S0", "0.bias": "S0", "1.weight": "S1"})
        chunk_linears(module, chunks=2, axis_sizes=(2,), sizes=sizes, kept_layers=kept)
        return show(module)

    cut, one, none = (str(rewritten(kept)).count("chunked.") for kept in ([], ["0"], ["0", "1"]))
    assert (cut, one, none) == (1, 1, 0), "nothing is exchanged for the first, whose operand is an input"


def _values(rows: int = 4) -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = {"pre.weight": (4, 4), "gate.weight": (8, 4), "gate.bias": (8,), "up.weight": (8, 4)}
    shapes |= {"down.weight": (4, 8), "down.bias": (4,), "x": (rows, 6, 4)}
    return {name: torch.rand(shape, dtype=torch.float64) - 0.5 for name, shape in shapes.items()}


def _run(module: fx.GraphModule, values: dict[str, Tensor], index: int) -> list[Tensor]:
    """This rank's part of the result, and of the gradients."""
    mine = [
        (x.chunk(2, int(PARAMETERS[name][1]))[index] if name in PARAMETERS else x).clone().requires_grad_(name != "x")
        for name, x in values.items()
    ]
    result = module(*mine)[0]
    return [result, *torch.autograd.grad(result.square().sum(), mine[:-1])]


def test_it_computes_what_one_process_does() -> None:
    values = _values()
    model = Gated().double()
    model.load_state_dict({name: x for name, x in values.items() if name != "x"})
    expected = model(values["x"])
    grads = torch.autograd.grad(expected.square().sum(), [model.get_parameter(n) for n in values if n != "x"])
    for chunks in (None, 1, 2, 3, 4):
        results = simulate(partial(_run, program(chunks)[0], values), (2,), ("tp",))
        for i, (result, *found) in enumerate(results):
            torch.testing.assert_close(result, expected.chunk(2, 1)[i], rtol=0, atol=1e-14)
            for name, grad, other in zip(values, grads, found, strict=False):
                dim = int(PARAMETERS[name][1]) if name in PARAMETERS else None
                part = grad if dim is None else grad.chunk(2, dim)[i]
                torch.testing.assert_close(other, part, rtol=0, atol=1e-13)


def test_a_smaller_batch_than_chunks_computes_the_same() -> None:
    values = _values(rows=2)
    one, other = (simulate(partial(_run, program(c)[0], values), (2,), ("tp",)) for c in (None, 4))
    for a, b in zip(one[1], other[1], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-14)


def test_what_is_cut_along_a_sequence_is_gathered_in_the_backward_alone() -> None:
    modes = {"0/aten.linear#0": ["I"], "1/aten.linear#0": ["shard:...1"]}
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).double()
    graph = captured(model, torch.rand(4, 6, 4, dtype=torch.float64))
    sizes = Sizes(graph.actual)
    module, specification = placed(graph, modes)
    chunk_linears(module, chunks=2, axis_sizes=(2,), sizes=sizes)
    verify_placements(module, specification)
    module.recompile()
    assert any("redistribute_then_linear(linear, 'I', 'S1'" in line for line in show(module))
    x = torch.rand(4, 6, 4, dtype=torch.float64)

    def rank(index: int) -> list[Tensor]:
        weights = [p.detach().clone().requires_grad_() for p in model.parameters()]
        result = module(*weights, x)[0]
        return [result, *torch.autograd.grad(result.square().sum(), weights)]

    expected = model(x)
    grads = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
    for found in simulate(rank, (2,), ("tp",)):
        for one, other in zip(found, [expected, *grads], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


def test_what_one_chunk_exchanges_runs_beside_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    order, module = Order(monkeypatch), program(2)[0]

    def rank(index: int) -> None:
        with order:
            _run(module, _values(), 0)

    simulate(rank, (1,), ("tp",))
    gathers, scatters = ["start all_gather"] * 2, ["wait for reduce_scatter"] * 2
    forward = [
        "mm", *gathers, "wait for all_gather", "addmm", "mm", "wait for all_gather", "addmm", "mm",
        "addmm", "start reduce_scatter", "addmm", "start reduce_scatter", *scatters,
    ]  # fmt: skip
    backward = [
        # The gradients of what is read and of the weight, of one chunk and then of the other.
        *gathers, "wait for all_gather", "mm", "mm", "wait for all_gather", "mm", "addmm",
        # That of what two layers read, and those of their weights meanwhile.
        "mm", "addmm", "start reduce_scatter", "mm", "addmm", "start reduce_scatter",
        "mm", "addmm", "mm", "addmm", *scatters,
        "mm", "start all_reduce", "wait for all_reduce",
    ]  # fmt: skip
    assert order.seen == [*forward, *backward]


def corrupt_the_weights(begin: fx.Node, end: fx.Node) -> None:
    *others, weights, biases = begin.args
    begin.args = (*others, [*reversed(weights)], biases)  # type: ignore[misc, arg-type]


def take_another_result(begin: fx.Node, end: fx.Node) -> None:
    one, other = begin.users
    one.args, other.args = other.args, one.args


def read_what_is_before(begin: fx.Node, end: fx.Node) -> None:
    begin.args = (begin.args[0].args[0], *begin.args[1:])  # type: ignore[union-attr]


def leave_out_the_bias(begin: fx.Node, end: fx.Node) -> None:
    end.args = (*end.args[:-1], None)


def reduce_to_another_layout(begin: fx.Node, end: fx.Node) -> None:
    end.args = (end.args[0], "P", "S0", *end.args[3:])


def gather_from_another_dim(begin: fx.Node, end: fx.Node) -> None:
    begin.args = (begin.args[0], "S0", *begin.args[2:])


FAULTS: dict[Callable[[fx.Node, fx.Node], None], str] = {
    corrupt_the_weights: "gate/aten.linear#0 reads p_model_up_weight where its rule gives it p_model_gate_weight",
    take_another_result: r"gate/aten.linear#0 reads \(redistribute_2, p_model_up_weight\) where its rule",
    read_what_is_before: "pre/aten.linear#0->R is not differentiable",
    leave_out_the_bias: "down/aten.linear#0 reads",
    reduce_to_another_layout: "redistributes from P to S0",
    gather_from_another_dim: "redistributes from S0, its operand lies as S1",
}


def test_a_right_program_is_verified_and_stays_as_it_is() -> None:
    module, specification = program(2)
    before = str(module.graph)
    verify_placements(module, specification)
    assert str(module.graph) == before


@pytest.mark.parametrize("corrupt", FAULTS, ids=lambda corrupt: corrupt.__name__)
def test_a_fault_is_refused(corrupt: Callable[[fx.Node, fx.Node], None]) -> None:
    module, specification = program(2)
    begin, end = (
        next(node for node in module.graph.nodes if node.target is target)
        for target in (redistribute_then_linear, linear_then_redistribute)
    )
    corrupt(begin, end)
    with pytest.raises(PlacementError, match=FAULTS[corrupt]):
        verify_placements(module, specification)
