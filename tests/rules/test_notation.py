"""A rule from its notation: what is summed, what stays whole, what is added."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from autoparallel.rules.calls import dims_of
from autoparallel.rules.core import Rule, RuleError, dim_names, dimwise, make_rule
from autoparallel.rules.matmul import product
from tests.rules.examples import real
from tests.rules.proof import Call, Example

aten = torch.ops.aten


def _node(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    example = Example(target, args, kwargs)
    return Call(example, [False] * len(example.tensors), False).graph()[1]


def _product(*shapes: tuple[int, ...]) -> fx.Node:
    return _node(aten.mm.default, *(real(*shape) for shape in shapes))


class TestReductions:
    def test_a_named_factor_that_the_result_lacks_is_summed(self) -> None:
        assert make_rule(_product((4, 6), (6, 2)), "m k, k n -> m n").reductions == {"k": "sum"}

    def test_a_kind_that_is_given_goes_before(self) -> None:
        rule = make_rule(_product((4, 6), (6, 2)), "m k, k n -> m n", reductions={"k": "mean"})
        assert rule.reductions == {"k": "mean"}

    def test_a_blocked_factor_is_not_summed(self) -> None:
        rule = make_rule(_product((4, 6), (6, 2)), "m k, k n -> m n", blocked=["k"])
        assert rule.reductions == {} and rule.factors() == ["m", "n"]

    def test_leading_dims_are_never_summed(self) -> None:
        with pytest.raises(RuleError, match=r"factor '\.\.\.0' is reduced"):
            make_rule(_node(aten.sum.default, real(4, 6)), "... k -> ")

    def test_a_part_of_a_composed_dim_is_summed(self) -> None:
        node = _node(aten.sum.dim_IntList, real(6), [0])
        assert make_rule(node, "(a b) -> ", sizes={"a": 2, "b": 3}).reductions == {"a": "sum", "b": "sum"}


class TestDimwise:
    def test_names_that_begin_with_x_are_blocked(self) -> None:
        node = _node(aten.cumsum.default, real(4, 6), 1)
        rule = dimwise(node, [dim_names(2, [1])], dim_names(2, [1], "xo"))
        assert str(rule) == "d0 x1 -> d0 xo1" and rule.blocked == {"x1", "xo1"} and rule.factors() == ["d0"]

    def test_the_rest_of_a_composed_dim_is_blocked(self) -> None:
        node = _node(aten.relu.default, real(6))
        rule = dimwise(node, [["(g xc)"]], ["(g xc)"], sizes={"g": 2, "xc": 3})
        assert rule.blocked == {"xc"} and rule.factors() == ["g"]


class TestProduct:
    @pytest.mark.parametrize(("shape", "dims"), [((4, 2), "m n"), ((2,), "n"), ((), "")], ids=["whole", "last", "none"])
    def test_what_is_added_has_the_last_dims_of_the_result(self, shape: tuple[int, ...], dims: str) -> None:
        node = _node(aten.addmm.default, real(*shape), real(4, 6), real(6, 2))
        rule = product(node, "+, m k, k n -> m n")
        assert str(rule) == f"{dims}, m k, k n -> m n" and rule.additive == {0}
        assert rule.linear == (frozenset({1}), frozenset({2})) and rule.flops == 2

    def test_a_call_may_lack_what_is_added(self) -> None:
        rule = product(_node(aten.linear.default, real(4, 6), real(2, 6)), "... k, n k, + -> ... n")
        assert str(rule) == "...0 k, n k -> ...0 n" and rule.additive == frozenset()


@pytest.mark.parametrize(
    ("target", "args", "dims"),
    [
        (aten.softmax.int, (-1,), [1]),
        (aten.flip.default, ([0, -1],), [0, 1]),
        (aten.sum.dim_IntList, (None,), [0, 1]),
        (aten.roll.default, ([2],), [0, 1]),
        (aten.sum.default, (), [0, 1]),
    ],
)
def test_the_dims_of_a_call_count_from_the_front(target: Any, args: tuple[Any, ...], dims: list[int]) -> None:
    assert dims_of(_node(target, real(4, 6), *args)) == dims


def test_a_rule_of_another_call_says_so() -> None:
    with pytest.raises(RuleError, match="is for 1 tensors, the call has 2"):
        make_rule(_product((4, 6), (6, 2)), "m k -> m k")
    with pytest.raises(RuleError, match=r"'k'.*sizes 6 and 2"):
        make_rule(_product((4, 6), (6, 2)), "m k, n k -> m n")
    with pytest.raises(RuleError, match="'sum', 'mean' or 'composite'"):
        Rule(((("m",),),), (), {"m": 6}, reductions={"m": "max"})
