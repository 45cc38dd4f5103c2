"""`verify_placements`: every kind of corruption is refused, and says which operator and which layouts."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from autoparallel.comm.collectives import redistribute
from autoparallel.passes.specification import PlacementError, Specification
from autoparallel.passes.verify_placements import verify_placements
from autoparallel.placements import Invariant, Replicate, Shard
from autoparallel.placements.modes import parse_mode
from benchmarks.mutants import Mutant
from benchmarks.mutations import Program
from tests.passes.support import MLP, PAIR_MODES, PAIR_PARAMETERS, captured, placed


def program() -> tuple[fx.GraphModule, Specification]:
    return placed(captured(MLP(), torch.rand(8, 4)), PAIR_MODES, PAIR_PARAMETERS)


def node(module: fx.GraphModule, name: str) -> fx.Node:
    return next(n for n in module.graph.nodes if n.name == name)


def drop_a_collective(module: fx.GraphModule) -> None:
    first = node(module, "redistribute")
    first.replace_all_uses_with(first.args[0])


def lay_a_parameter_otherwise(module: fx.GraphModule) -> None:
    node(module, "p_model_w2_weight").meta["placements"] = (Shard(0),)


def lay_a_result_otherwise(module: fx.GraphModule) -> None:
    node(module, "linear_1").meta["placements"] = (Shard(0),)


def redistribute_from_elsewhere(module: fx.GraphModule) -> None:
    node(module, "redistribute_1").replace_input_with(node(module, "linear_2"), node(module, "linear"))


def read_another_tensor(module: fx.GraphModule) -> None:
    node(module, "linear").replace_input_with(node(module, "args_0"), node(module, "p_model_pre_weight"))


def forget_the_layouts(module: fx.GraphModule) -> None:
    for key in ("needs", "modes", "placements"):
        node(module, "linear_1").meta.pop(key)


def call_a_summand_whole(module: fx.GraphModule) -> None:
    node(module, "redistribute_1").meta["placements"] = (Replicate,)


def swap_the_operands_layouts(module: fx.GraphModule) -> None:
    node(module, "linear").meta["placements"] = (Shard(1),)


def redistribute_otherwise_than_noted(module: fx.GraphModule) -> None:
    last = node(module, "redistribute_1")
    last.args = (last.args[0], "P", "R", last.args[3])


def note_another_way_to_run(module: fx.GraphModule) -> None:
    node(module, "linear_1").meta["modes"] = (parse_mode("shard:k"),)


def forget_that_it_is_trained(module: fx.GraphModule) -> None:
    node(module, "linear_2").meta["differentiable"] = False


def call_another_operator(module: fx.GraphModule) -> None:
    node(module, "linear_2").target = torch.ops.aten.matmul.default


CORRUPTIONS: dict[Callable[[fx.GraphModule], Any], str] = {
    drop_a_collective: r"w1/aten\.linear#0 runs as shard:n and needs operand 0 as R; it lies as I",
    lay_a_parameter_otherwise: r"p_model_w2_weight#0 enters as S1; it is said to lie as S0",
    lay_a_result_otherwise: r"w1/aten\.linear#0 runs as shard:n and gives S1; it is said to lie as S0",
    redistribute_from_elsewhere: r"w2/aten\.linear#0->I: redistributes from P, its operand lies as I",
    read_another_tensor: r"pre/aten\.linear#0 reads p_model_pre_weight where its rule gives it args_0",
    forget_the_layouts: r"w1/aten\.linear#0 has no layouts",
    call_a_summand_whole: r"w2/aten\.linear#0->I becomes I; it is said to lie as R",
    redistribute_otherwise_than_noted: r"w2/aten\.linear#0->I: redistributes from P to R over the axes \(0,\), noted",
    note_another_way_to_run: r"w1/aten\.linear#0 runs as shard:n, not as shard:k",
    forget_that_it_is_trained: r"w2/aten\.linear#0 is differentiable, and was laid out as if it were otherwise",
    swap_the_operands_layouts: r"pre/aten\.linear#0 runs as I and gives I; it is said to lie as S1",
    call_another_operator: r"w2/aten\.linear#0 must be aten\.linear\.default on a rank; it is aten\.matmul\.default",
}


@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda c: c.__name__)
def test_a_corrupted_program_is_refused(corrupt: Callable[[fx.GraphModule], Any]) -> None:
    module, specification = program()
    corrupt(module)
    with pytest.raises(PlacementError, match=CORRUPTIONS[corrupt]):
        verify_placements(module, specification)


def test_a_right_program_passes_and_is_not_changed() -> None:
    module, specification = program()
    before = str(module.graph)
    for _ in range(2):
        verify_placements(module, specification)
    assert str(module.graph) == before
    assert any(n.target is redistribute for n in module.graph.nodes)
    assert node(module, "linear").meta["placements"] == (Invariant,)


class Mean(nn.Module):
    """A mean over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w(x).mean()


def mean_program() -> tuple[fx.GraphModule, Specification]:
    """A program over two axes."""
    graph = captured(Mean(), torch.rand(8, 4))
    linear, mean = [n.meta["key"] for n in graph.graph.nodes if n.op == "call_function"]
    modes = {linear: ["shard:...0", "I"], mean: ["shard:d0", "I"]}
    return placed(graph, modes, axes=(("dp", 2), ("tp", 2)))


def communicate_over_another_axis(module: fx.GraphModule) -> None:
    last = [n for n in module.graph.nodes if n.target is redistribute][-1]
    last.args = (*last.args[:3], "mesh0/tp")


def communicate_over_another_mesh(module: fx.GraphModule) -> None:
    last = [n for n in module.graph.nodes if n.target is redistribute][-1]
    last.args = (*last.args[:3], "mesh1/dp")


def forget_to_divide(module: fx.GraphModule) -> None:
    division = next(n for n in module.graph.nodes if "scales" in n.meta)
    division.replace_all_uses_with(division.args[0])


def divide_by_another_count(module: fx.GraphModule) -> None:
    division = next(n for n in module.graph.nodes if "scales" in n.meta)
    division.args = (division.args[0], 4)


def sum_for_mean(module: fx.GraphModule) -> None:
    next(n for n in module.graph.nodes if "mean" in n.name).target = torch.ops.aten.sum.default


def take_a_parameter_as_it_does_not_lie(module: fx.GraphModule) -> None:
    node(module, "p_model_w_weight").meta["placements"] = (Invariant, Shard(0))


def return_a_summand(module: fx.GraphModule) -> None:
    output = module.graph.output_node()
    output.args = ((next(n for n in module.graph.nodes if "scales" in n.meta),),)


def return_another_tensor(module: fx.GraphModule) -> None:
    module.graph.output_node().args = ((node(module, "linear"),),)


FAULTS: dict[Callable[[fx.GraphModule], Any], str] = {
    communicate_over_another_axis: r"redistributes from P, its operand lies as P,I|no step|noted",
    communicate_over_another_mesh: r"communicates over 'mesh1/dp', which is no group of the mesh",
    forget_to_divide: r"aten\.mean#0 is of one of 2 parts, and is read without taking that into account",
    divide_by_another_count: r"aten\.mean#0 is of one of 2 parts",
    sum_for_mean: r"aten\.mean#0 must be aten\.mean\.default on a rank; it is aten\.sum\.default",
    take_a_parameter_as_it_does_not_lie: r"p_model_w_weight",
    return_a_summand: r"output 0 leaves as P,I, not as I,I",
    return_another_tensor: r"output 0 is linear, not /aten\.mean#0",
}


@pytest.mark.parametrize("corrupt", FAULTS, ids=lambda c: c.__name__)
def test_a_program_over_two_axes_that_is_not_what_it_must_be_is_refused(
    corrupt: Callable[[fx.GraphModule], Any],
) -> None:
    module, specification = mean_program()
    verify_placements(module, specification)
    corrupt(module)
    with pytest.raises(PlacementError, match=FAULTS[corrupt]):
        verify_placements(module, specification)


# ------------------------------------------------------------------------------------------- any fault of any program

FEW = (("mlp", "tensor_parallel", (2, 2)), ("functions", "tensor_parallel", (2, 2)))
PROGRAMS = (*FEW, ("gpt", "fsdp", (2,)), ("norm", "data_parallel", (2,)), ("moe", "tensor_parallel", (2,)))
KINDS = ("layout", "collective", "sum for mean", "mean for sum", "weight", "argument", "parameter", "gradient")
"""What a fault's kind begins with: a placement, a redistribution, a kind of reduction, a parameter's way."""


@cache
def faulty(model: str, plan: str, mesh: tuple[int, ...]) -> tuple[Program, list[Mutant]]:
    """A program, and every fault of it that changes something."""
    made = Program(model, plan, mesh)
    return made, [m for m in made.mutants() if m.kind.startswith(KINDS) and not m.equivalent]


def is_refused(made: Program, mutant: Mutant) -> bool:
    """Whether the verifier objects to one fault."""
    graph = made.captured.copy()
    try:
        if mutant.on_graph is not None:
            mutant.on_graph(graph.graph)
            verify_placements(graph.module, made.asked)
        chains = made.hoisted(graph)
        if mutant.on_chain is not None:
            chains = [mutant.on_chain(c) if c.name == mutant.key else c for c in chains]
        verify_placements(graph.module, made.asked, chains)
    except PlacementError:
        return True
    return False


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(FEW), st.data())
def test_a_program_with_any_one_fault_is_refused(which: tuple[str, str, tuple[int, ...]], data: Any) -> None:
    refuse_any(which, data)


@pytest.mark.wide
@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(PROGRAMS), st.data())
def test_programs_of_more_models_with_any_one_fault_are_refused(
    which: tuple[str, str, tuple[int, ...]], data: Any
) -> None:
    refuse_any(which, data)


def refuse_any(which: tuple[str, str, tuple[int, ...]], data: Any) -> None:
    made, mutants = faulty(*which)
    mutant = mutants[data.draw(st.integers(0, len(mutants) - 1))]
    assert is_refused(made, mutant), f"{mutant.kind} of {mutant.key}: {mutant.detail}"


@pytest.mark.wide_where(lambda which: which not in FEW)
@pytest.mark.parametrize("which", PROGRAMS, ids=lambda which: which[0])
def test_a_right_program_with_its_chains_passes(which: tuple[str, str, tuple[int, ...]]) -> None:
    made, _ = faulty(*which)
    graph = made.captured.copy()
    verify_placements(graph.module, made.asked)
    verify_placements(graph.module, made.asked, made.hoisted(graph))
