"""`reduce_gradient_norm`: one sum for each set of axes and norms, one all-reduce for all of them."""

from __future__ import annotations

import math

import pytest

from autoparallel.placements import parse_layout
from autoparallel.runtime.norm_program import NormProgram, reduce_gradient_norm
from tests.passes.support import show


def build(
    layouts: dict[str, str],
    p: float = 2.0,
    sizes: tuple[int, ...] = (2, 2),
    norms: list[set[str]] | None = None,
) -> NormProgram:
    names = ("dp", "tp", "cp")[: len(sizes)]
    gradients = {name: parse_layout(text) for name, text in layouts.items()}
    return reduce_gradient_norm(gradients, p, names, sizes, "mesh0", norms)


def program(layouts: dict[str, str], p: float = 2.0, sizes: tuple[int, ...] = (2, 2)) -> list[str]:
    return show(build(layouts, p, sizes).module)


def test_the_example() -> None:
    assert program({"w": "I,S0", "b": "I,I"}) == [
        "grads_0",
        "grads_1",
        "local_sum = norm.local_sum(grads_0, 2.0)",
        "local_sum_1 = norm.local_sum(grads_1, 2.0)",
        "count_once = norm.count_once(local_sum, ['mesh0/dp'])",
        "count_once_1 = norm.count_once(local_sum_1, ['mesh0/dp', 'mesh0/tp'])",
        "pack = norm.pack([count_once, count_once_1], [local_sum, local_sum_1], 2.0, [[0, 1]])",
        "reduce_packed = norm.reduce_packed(pack, 2.0, 'mesh0/dp+tp')",
        "finish_norm = norm.finish_norm(reduce_packed, 2.0)",
        "return finish_norm",
    ]


def test_parameters_with_the_same_axes_are_one_set() -> None:
    found = build({"a": "S0,I", "b": "S1,I", "c": "I,S0", "d": "S0,S0", "e": "I,I", "f": "S0,I"})
    assert found.sets == (("a", "b", "f"), ("c",), ("d",), ("e",)), "which dim is cut makes no difference"


def test_norms_may_overlap_and_be_of_nothing() -> None:
    found = build({"a": "S0,I", "b": "S0,I", "c": "I,I"}, norms=[{"a", "c"}, {"a", "b"}, {"frozen"}])
    assert found.sets == (("a",), ("b",), ("c",)), "those that count in the same norms, sharded over the same axes"
    lines = show(found.module)
    assert any(line.endswith("2.0, [[0, 2], [0, 1], []])") for line in lines), lines
    assert sum("reduce_packed(" in line for line in lines) == 1, "one collective for all norms"


def test_what_counts_in_no_norm_is_no_input() -> None:
    assert build({"a": "S0,I", "b": "S0,I"}, norms=[{"b"}]).sets == (("b",),)
    with pytest.raises(ValueError, match="none of the gradients counts"):
        build({"a": "S0,I"}, norms=[set()])


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, 0.5, math.inf])
@pytest.mark.parametrize("sizes", [(2,), (2, 2), (2, 1, 4)], ids=str)
def test_there_is_one_collective_for_everything(p: float, sizes: tuple[int, ...]) -> None:
    rows = ",".join(["S0"] * len(sizes))
    whole = ",".join(["I"] * len(sizes))
    lines = program({"a": rows, "b": whole}, p, sizes)
    assert sum("reduce_packed(" in line for line in lines) == 1


def test_an_axis_of_one_rank_has_no_replicas() -> None:
    lines = program({"a": "I,I"}, sizes=(1, 2))
    assert "count_once = norm.count_once(local_sum, ['mesh0/tp'])" in lines
    alone = program({"a": "I,I"}, sizes=(1, 1))
    assert not any("reduce_packed" in line for line in alone), "nobody to talk to"
    assert "count_once = norm.count_once(local_sum, [])" in alone


@pytest.mark.parametrize("p", [0.0, -1.0, -math.inf, math.nan])
def test_p_must_be_positive(p: float) -> None:
    with pytest.raises(ValueError, match="norm_type must be positive or inf"):
        program({"a": "I,I"}, p)
