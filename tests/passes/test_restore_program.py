"""`restore_program`: any one thing of a half that is not as it must be is refused, and says which operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from autoparallel.comm.in_flight import finish_redistribution, start_redistribution
from autoparallel.passes.overlap_collectives import overlap_collectives
from autoparallel.passes.restore_program import restore_program
from autoparallel.passes.specification import PlacementError, Specification
from autoparallel.passes.verify_placements import verify_placements
from tests.passes.support import captured, placed

HALVES = (start_redistribution, finish_redistribution)


class Crossing(nn.Module):
    """Products that are gathered while something else computes."""

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
    overlap_collectives(module)
    return module, specification


def of(module: fx.GraphModule, target: Callable[..., Any]) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.target is target]


def verify(module: fx.GraphModule, specification: Specification) -> None:
    """Holds a program to what it must be, as after a pass."""
    module.graph.lint()
    verify_placements(module, specification)


def test_a_right_program_passes_and_is_not_changed() -> None:
    module, specification = program()
    before = str(module.graph)
    verify(module, specification)
    assert str(module.graph) == before
    assert [len(of(module, target)) for target in HALVES] == [3, 3]
    restored = restore_program(module)
    assert not [node for node in restored.nodes if node.target in HALVES]


def exchange_what_is_finished(module: fx.GraphModule) -> None:
    one, other, *_ = of(module, finish_redistribution)
    first, second = one.args[0], other.args[0]
    one.args, other.args = (second, *one.args[1:]), (first, *other.args[1:])


def finish_twice(module: fx.GraphModule) -> None:
    one, other, *_ = of(module, finish_redistribution)
    one.append(other)
    other.args = one.args


def finish_another_way(module: fx.GraphModule) -> None:
    one = of(module, finish_redistribution)[0]
    one.args = (*one.args[:2], "R", one.args[3])


def never_finish(module: fx.GraphModule) -> None:
    one = of(module, finish_redistribution)[0]
    one.replace_all_uses_with(one.args[0].args[0])  # type: ignore[union-attr, arg-type]
    module.graph.erase_node(one)


def read_what_is_on_its_way(module: fx.GraphModule) -> None:
    start = of(module, start_redistribution)[0]
    next(node for node in module.graph.nodes if "tanh" in node.name).args = (start,)


def start_as_another_is_noted(module: fx.GraphModule) -> None:
    for node in (of(module, start_redistribution)[0], of(module, finish_redistribution)[0]):
        node.args = (*node.args[:2], "R", node.args[3])


def communicate_over_another_axis(module: fx.GraphModule) -> None:
    for node in (of(module, start_redistribution)[0], of(module, finish_redistribution)[0]):
        node.args = (*node.args[:3], "mesh0/dp")


def gather_another_product(module: fx.GraphModule) -> None:
    one, other, *_ = of(module, start_redistribution)
    other.args = (one.args[0], *other.args[1:])


ONCE = r"a/aten\.linear#0->I,I/start must be finished once, as it is begun, and read by nothing else; it is read by "
FAULTS: dict[Callable[[fx.GraphModule], Any], str] = {
    exchange_what_is_finished: r"redistributes from S1|reads redistribute",
    finish_twice: ONCE + r"a/aten\.linear#0->I,I, b/aten\.linear#0->I,I",
    finish_another_way: ONCE + r"a/aten\.linear#0->I,I",
    never_finish: ONCE + "nothing",
    read_what_is_on_its_way: ONCE,
    start_as_another_is_noted: r"a/aten\.linear#0->I,I: redistributes from S1 to R over .*, noted is",
    communicate_over_another_axis: r"a/aten\.linear#0->I,I: redistributes from S1, its operand lies as S1,I",
    gather_another_product: r"reads redistribute",
}


@pytest.mark.parametrize("corrupt", FAULTS, ids=lambda corrupt: corrupt.__name__)
def test_a_fault_is_refused(corrupt: Callable[[fx.GraphModule], Any]) -> None:
    module, specification = program()
    corrupt(module)
    with pytest.raises(PlacementError, match=FAULTS[corrupt]):
        verify(module, specification)


def test_a_finish_of_what_is_not_begun_in_its_graph_is_refused() -> None:
    module, specification = program()
    start, finish = (of(module, target)[0] for target in HALVES)
    finish.args = (start.args[0], *finish.args[1:])
    module.graph.erase_node(start)
    with pytest.raises(PlacementError, match=r"a/aten\.linear#0->I,I is no call of the model"):
        verify(module, specification)


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
            verify(module, specification)
        except (PlacementError, RuntimeError):  # the latter where a node reads what comes behind it
            pass
        else:
            accepted.append((node.name, i, other))
        node.args = right
    assert len(arguments()) > 100
    assert not accepted
