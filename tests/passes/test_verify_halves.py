"""`verify_halves`: any one thing of a half that is not as it must be is refused, and says which operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from autoparallel.comm.in_flight import finish_redistribution, start_redistribution
from autoparallel.operators.late import late_linear, late_parameters
from autoparallel.passes.overlap_collectives import overlap_collectives
from autoparallel.passes.specification import Specification
from autoparallel.passes.verify_halves import verify_halves
from autoparallel.passes.verify_placements import PlacementError, verify_placements
from tests.passes.support import captured, placed

HALVES = (start_redistribution, finish_redistribution, late_parameters, late_linear)


class Crossing(nn.Module):
    """Products that are gathered while something else computes, and two that read the same."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x), self.b(x)
        y = x.tanh() * a * b
        return self.c(y) * self.d(y)


PIECES = ["shard:n", "I"]
MODES = {f"{name}/aten.linear#0": PIECES for name in "abcd"}
PARAMETERS = {f"{name}.{kind}": "S0,I" for name in "abcd" for kind in ("weight", "bias")}


def program() -> tuple[fx.GraphModule, Specification]:
    module, specification = placed(
        captured(Crossing(), torch.rand(8, 4)), MODES, PARAMETERS, axes=(("tp", 2), ("dp", 2))
    )
    verify_placements(module, specification)
    overlap_collectives(module, regions={}, axis_sizes=specification.axis_sizes)
    return module, specification


def of(module: fx.GraphModule, target: Callable[..., Any]) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.target is target]


def test_a_right_program_passes_and_is_not_changed() -> None:
    module, specification = program()
    before = str(module.graph)
    verify_halves(module, specification)
    assert str(module.graph) == before
    assert [len(of(module, target)) for target in HALVES] == [4, 4, 2, 2]


def exchange_what_is_finished(module: fx.GraphModule) -> None:
    one, other, *_ = of(module, finish_redistribution)
    first, second = one.args[0], other.args[0]
    other.prepend(one)
    one.args, other.args = (second, *one.args[1:]), (first, *other.args[1:])


def finish_twice(module: fx.GraphModule) -> None:
    one, other, *_ = of(module, finish_redistribution)
    one.append(other)
    other.args = one.args


def finish_another_way(module: fx.GraphModule) -> None:
    one = of(module, finish_redistribution)[0]
    one.args = (*one.args[:2], "R", one.args[3])


def start_behind_the_finish(module: fx.GraphModule) -> None:
    start = of(module, start_redistribution)[0]
    of(module, finish_redistribution)[0].append(start)


def never_finish(module: fx.GraphModule) -> None:
    one = of(module, finish_redistribution)[0]
    one.replace_all_uses_with(one.args[0].args[0])  # type: ignore[union-attr, arg-type]
    module.graph.erase_node(one)


def read_what_is_on_its_way(module: fx.GraphModule) -> None:
    start = of(module, start_redistribution)[0]
    next(node for node in module.graph.nodes if "tanh" in node.name).args = (start,)


def delay_behind_the_finish(module: fx.GraphModule) -> None:
    of(module, finish_redistribution)[2].append(of(module, late_parameters)[0])


def exchange_parameters(module: fx.GraphModule) -> None:
    one, other = of(module, late_parameters)
    one.args, other.args = (one.args[0], *other.args[1:]), (other.args[0], *one.args[1:])


def exchange_delays(module: fx.GraphModule) -> None:
    one, other = of(module, late_linear)
    one.args, other.args = (*one.args[:3], other.args[3]), (*other.args[:3], one.args[3])


def share_a_delay(module: fx.GraphModule) -> None:
    one, other = of(module, late_linear)
    other.args = one.args


def tell_another_length(module: fx.GraphModule) -> None:
    late = of(module, late_parameters)[0]
    late.args = (*late.args[:3], 1, 2)


def read_something_else(module: fx.GraphModule) -> None:
    layer = of(module, late_linear)[0]
    layer.args = (of(module, finish_redistribution)[0], *layer.args[1:])


def start_as_another_is_noted(module: fx.GraphModule) -> None:
    for node in (of(module, start_redistribution)[0], of(module, finish_redistribution)[0]):
        node.args = (*node.args[:2], "R", node.args[3])


def communicate_over_another_axis(module: fx.GraphModule) -> None:
    for node in (of(module, start_redistribution)[0], of(module, finish_redistribution)[0]):
        node.args = (*node.args[:3], "mesh0/dp")


def gather_another_product(module: fx.GraphModule) -> None:
    one, other, *_ = of(module, start_redistribution)
    other.args = (one.args[0], *other.args[1:])


def call_another_layer_late(module: fx.GraphModule) -> None:
    of(module, late_linear)[0].meta["key"] = "/aten.tanh#0"


FAULTS: dict[Callable[[fx.GraphModule], Any], str] = {
    exchange_what_is_finished: r"a/aten\.linear#0->I,I finishes what b/aten\.linear#0->I,I/start has started",
    finish_twice: r"b/aten\.linear#0->I,I finishes start_redistribution, which is not begun before it, or finished",
    finish_another_way: r"a/aten\.linear#0->I,I finishes as .*'R'.* what was started as .*'I'",
    start_behind_the_finish: r"a/aten\.linear#0->I,I finishes start_redistribution, which is not begun before it",
    never_finish: r"a/aten\.linear#0->I,I/start is begun, and never finished in its graph",
    read_what_is_on_its_way: r"/aten\.tanh#0 reads a/aten\.linear#0->I,I/start, which is no tensor",
    delay_behind_the_finish: r"late_parameters\w* of c must stand between start_redistribution_2,",
    exchange_parameters: r"c/aten\.linear#0 reads p_model_c_weight and p_model_c_bias; late are p_model_d_weight and",
    exchange_delays: r"c/aten\.linear#0 reads p_model_c_weight and p_model_c_bias; late are p_model_d_weight and",
    share_a_delay: r"d/aten\.linear#0 leaves gradients to late_parameters\w*, which is of no layer, or of another one",
    tell_another_length: r"late_parameters\w* of c: dim 1 of .*/start goes from 1 pieces to 1; told is .* 2 times",
    read_something_else: r"c/aten\.linear#0 reads redistribute; its gradients wait for that of .*->R,I/start",
    start_as_another_is_noted: r"a/aten\.linear#0->I,I/start: redistributes from S1 to R over .*, noted is",
    communicate_over_another_axis: r"a/aten\.linear#0->I,I/start: redistributes from S1, its operand lies as S1,I",
    gather_another_product: r"b/aten\.linear#0->I,I/start starts what a/aten\.linear#0->I,I/start would be",
    call_another_layer_late: r"/aten\.tanh#0 is no linear layer of the model",
}


@pytest.mark.parametrize("corrupt", FAULTS, ids=lambda corrupt: corrupt.__name__)
def test_a_fault_is_refused(corrupt: Callable[[fx.GraphModule], Any]) -> None:
    module, specification = program()
    corrupt(module)
    with pytest.raises(PlacementError, match=FAULTS[corrupt]):
        verify_halves(module, specification)


def test_a_start_whose_finish_is_in_another_graph_is_refused() -> None:
    module, specification = program()
    module.add_submodule("inner", fx.GraphModule(nn.Module(), fx.Graph()))
    inner = module.get_submodule("inner")
    assert isinstance(inner, fx.GraphModule)
    one = of(module, finish_redistribution)[0]
    entering = inner.graph.placeholder("started")
    inner.graph.output(inner.graph.node_copy(one, lambda x: entering))
    with pytest.raises(PlacementError, match="finishes started, which is not begun before it"):
        verify_halves(module, specification)


# ------------------------------------------------------------------------------------------ any argument of any half


@cache
def arguments() -> list[tuple[int, int, Any]]:
    """Each half by its number, each of its arguments, and every other value of the kind that stands in its place."""
    module, _ = program()
    halves = [node for node in module.graph.nodes if node.target in HALVES]
    nodes = [node.name for node in module.graph.nodes if node.op != "output"]
    found: list[tuple[int, int, Any]] = []

    def others(value: Any, i: int) -> Iterator[Any]:
        if isinstance(value, fx.Node):
            yield from (name for name in nodes if name != value.name)
        elif isinstance(value, int):
            yield from (value + 1, value - 1)
        else:
            yield from {"mesh0/dp", "mesh0/tp+dp"} if i == 3 else {"S0", "S1", "I", "R", "P"} - {value}

    for number, node in enumerate(halves):
        for i, value in enumerate(node.args):
            found += [(number, i, other) for other in others(value, i)]
    return found


def test_any_argument_of_a_half_that_is_another_is_refused() -> None:
    module, specification = program()
    halves = [node for node in module.graph.nodes if node.target in HALVES]
    names = {node.name: node for node in module.graph.nodes}
    accepted = []
    for number, i, other in arguments():
        node = halves[number]
        right = node.args
        node.args = (*right[:i], names.get(other, other) if isinstance(other, str) else other, *right[i + 1 :])
        try:
            verify_halves(module, specification)
        except PlacementError:
            pass
        else:
            accepted.append((node.name, i, other))
        node.args = right
    assert len(arguments()) > 300
    # The length along any dim stays, whichever is named.
    assert {(i, other) for _, i, other in accepted} <= {(3, 1), (3, -1)}
