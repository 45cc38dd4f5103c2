"""`NormProgram`: one sum for each set of axes and norms, one all-reduce for all of them."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch

from autoparallel.placements import parse_layout
from autoparallel.runtime.norms import program as norm_program
from autoparallel.runtime.norms.program import NormProgram
from tests.runtime.support import OneRank


def build(
    layouts: dict[str, str],
    p: float = 2.0,
    sizes: tuple[int, ...] = (2, 2),
    norms: list[set[str]] | None = None,
) -> NormProgram:
    names = ("dp", "tp", "cp")[: len(sizes)]
    gradients = {name: parse_layout(text) for name, text in layouts.items()}
    return NormProgram(gradients, p, names, sizes, "mesh0", norms or [set(gradients)])


def test_the_example() -> None:
    program = build({"w": "I,S0", "b": "I,I"})
    assert program.sets == (("w",), ("b",))
    assert program.replicas == [["mesh0/dp"], ["mesh0/dp", "mesh0/tp"]], "along these only the first rank counts"
    assert program.parts == [[0, 1]]
    assert program.group == "mesh0/dp+tp"


def test_parameters_with_the_same_axes_are_one_set() -> None:
    found = build({"a": "S0,I", "b": "S1,I", "c": "I,S0", "d": "S0,S0", "e": "I,I", "f": "S0,I"})
    assert found.sets == (("a", "b", "f"), ("c",), ("d",), ("e",)), "which dim is cut makes no difference"


def test_norms_may_overlap_and_be_of_nothing() -> None:
    found = build({"a": "S0,I", "b": "S0,I", "c": "I,I"}, norms=[{"a", "c"}, {"a", "b"}, {"frozen"}])
    assert found.sets == (("a",), ("b",), ("c",)), "those that count in the same norms, sharded over the same axes"
    assert found.parts == [[0, 2], [0, 1], []]


def test_what_counts_in_no_norm_is_no_input() -> None:
    assert build({"a": "S0,I", "b": "S0,I"}, norms=[{"b"}]).sets == (("b",),)
    nothing = build({"a": "S0,I"}, norms=[set(), {"frozen"}])
    assert nothing().tolist() == [0.0, 0.0]
    assert nothing.group is None, "nothing is sent for it"


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, 0.5, math.inf])
@pytest.mark.parametrize("sizes", [(2,), (2, 2), (2, 1, 4)], ids=str)
def test_there_is_one_collective_for_everything(p: float, sizes: tuple[int, ...]) -> None:
    rows = ",".join(["S0"] * len(sizes))
    whole = ",".join(["I"] * len(sizes))
    program = build({"a": rows, "b": whole}, p, sizes, norms=[{"a"}, {"a", "b"}])
    with mock.patch.object(norm_program, "reduce_packed", lambda packed, *_: sent.append(packed) or packed), OneRank(2):
        sent: list[torch.Tensor] = []
        norms = program([torch.full((3,), 2.0)], [torch.full((4,), -2.0)])
    assert [tuple(packed.shape) for packed in sent] == [(2, 2)], "a share and a flag of each norm"
    expected = [2.0, 2.0] if math.isinf(p) else [2 * 3 ** (1 / p), 2 * 7 ** (1 / p)]
    assert norms.tolist() == pytest.approx(expected)


def test_an_axis_of_one_rank_has_no_replicas() -> None:
    assert build({"a": "I,I"}, sizes=(1, 2)).replicas == [["mesh0/tp"]]
    alone = build({"a": "I,I"}, sizes=(1, 1))
    assert alone.replicas == [[]]
    assert alone.group is None, "nobody to talk to"


@pytest.mark.parametrize("p", [0.0, -1.0, -math.inf, math.nan])
def test_p_must_be_positive(p: float) -> None:
    with pytest.raises(ValueError, match="norm_type must be positive or inf"):
        build({"a": "I,I"}, p)
