"""Every sharding rule, proved by execution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autoparallel import operators
from autoparallel.rules import has_rule, operator_name, rule_for
from autoparallel.rules.core import Rule, make_rule
from autoparallel.rules.matmul import product
from autoparallel.rules.pointwise import is_pointwise, pointwise
from autoparallel.rules.table import RULES, SECTIONS
from tests.rules.examples import FAMILIES, examples_of, real, tagged_examples
from tests.rules.proof import (
    AXIS,
    Call,
    Disproved,
    Example,
    Proof,
    Reference,
    Run,
    execute,
    never_sharded,
    prove,
    prove_all,
    ways_of,
)

aten = torch.ops.aten


@torch.library.custom_op("autoparallel_test::twice", mutates_args=(), tags=(torch.Tag.pointwise,))
def twice(x: Tensor) -> Tensor:
    return x * 2


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


TWICE = torch.ops.autoparallel_test.twice.default


def _names(targets: list[Any]) -> list[str]:
    return [f"{operator_name(t)}" for t in targets]


def test_every_rule_has_an_example() -> None:
    shown = {getattr(target, "family", target) for target in examples_of()}
    assert _names([t for t in RULES if t not in shown]) == []
    assert _names([t for t in shown if not has_rule(t)]) == []


def test_no_operator_stands_twice_in_the_table() -> None:
    assert len(RULES) == sum(map(len, SECTIONS))


class TestTaggedOperators:
    def test_what_torch_tags_as_pointwise_is_proved(self) -> None:
        proof = Proof()
        runs = []
        for example in tagged_examples():
            call = Call(example, [i not in example.constant for i in range(len(example.tensors))], True)
            reference = Reference(call)
            runs += [Run(call, reference, (way.mode,), AXIS) for way in ways_of(call)]
        wrong = execute(runs, AXIS, proof)
        assert not wrong, "\n".join(wrong)
        assert _names([e.target for e in tagged_examples() if e.target not in proof.sharded]) == []

    @pytest.mark.parametrize(
        "target",
        [
            aten.relu_.default,
            aten.add_.Tensor,
            aten.add.out,
            aten.rrelu.default,
            aten.bernoulli.p,
            aten.dropout.default,
            aten.native_dropout.default,
            torch.relu,
            operators.dropout,
        ],
    )
    def test_what_writes_or_draws_is_not_pointwise(self, target: Any) -> None:
        assert not is_pointwise(target)

    def test_several_results_have_no_rule(self) -> None:
        example = Example(aten.frexp.Tensor, (real(6, 6),))
        assert rule_for(Call(example, [False], False).graph()[1]) is None

    def test_a_user_s_tag_gives_no_rule(self) -> None:
        assert torch.Tag.pointwise in TWICE.tags and not has_rule(TWICE)

    def test_a_row_goes_before_the_tag(self) -> None:
        assert is_pointwise(aten.add.Tensor)
        call = Call(Example(aten.add.Tensor, (real(6, 6), real(6, 6))), [True, True], True)
        rule = rule_for(call.graph()[1])
        assert rule is not None and rule.linear == (frozenset({0, 1}),)


@pytest.mark.wide_where(lambda family: family != "indexing")
@pytest.mark.slow_where(lambda family: family in ("elementwise", "flex", "matmul"))
@pytest.mark.parametrize("family", FAMILIES)
def test_rules_of_a_family_are_proved(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    proof = Proof()
    examples = FAMILIES[family]
    wrong = prove_all(examples, proof)
    with capsys.disabled():
        print(f"\n{family}: {len(examples)} calls, ways proved: {proof.counts}, not divisible: {proof.skipped}")
    assert not wrong, "\n".join(wrong)
    assert _names([e.target for e in examples if e.target not in proof.sharded]) == [], "never ran sharded"
    assert never_sharded(examples, proof) == []


class TestWrongRulesAreCaught:
    def _refuted(self, monkeypatch: pytest.MonkeyPatch, example: Example, maker: Any, match: str) -> None:
        monkeypatch.setitem(RULES, example.target, maker)
        with pytest.raises(Disproved, match=match):
            prove(example)

    def test_a_maximum_declared_a_sum(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def maker(node: Any) -> Rule:
            return make_rule(node, "m n -> m")

        self._refuted(monkeypatch, Example(aten.amax.default, (real(6, 6), [1])), maker, "the result is wrong")

    def test_a_bias_not_declared_additive(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def maker(node: Any) -> Rule:
            return product(node, "m k, n k, n -> m n")

        example = Example(aten.linear.default, (real(6, 6), real(6, 6), real(6)))
        self._refuted(monkeypatch, example, maker, "shard:k.* the result is wrong")

    def test_a_nonlinear_operator_declared_linear(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def maker(node: Any) -> Rule:
            return pointwise(node, linear=[(0,)])

        self._refuted(monkeypatch, Example(aten.relu.default, (real(6, 6),)), maker, "partial:0.* the result is wrong")

    def test_a_mean_declared_a_sum(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def maker(node: Any) -> Rule:
            return make_rule(node, "m n -> m", linear=[(0,)])

        self._refuted(monkeypatch, Example(aten.mean.dim, (real(6, 6), [1])), maker, "shard:n.* the result is wrong")

    def test_a_sum_whose_gradient_is_counted_on_every_rank(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Values right, gradients wrong: a product with a factor that the rule does not shard where it must.
        def maker(node: Any) -> Rule:
            return make_rule(node, "m n, 1 n -> m n", linear=[(0, 1)])

        example = Example(aten.mul.Tensor, (real(6, 6), real(1, 6)))
        self._refuted(monkeypatch, example, maker, "partial:0.* the result is wrong")

    def test_an_argument_left_global(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def maker(node: Any) -> Rule:
            return make_rule(node, "a b -> (a b)", sizes={"a": 6, "b": 6}, blocked=["b"])

        example = Example(aten.reshape.default, (real(6, 6), [36]))
        self._refuted(monkeypatch, example, maker, "invalid for input of size")

    def test_a_dim_that_is_looked_along_declared_free(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def maker(node: Any) -> Rule:
            return make_rule(node, "m n -> m n")

        self._refuted(monkeypatch, Example(aten.cumsum.default, (real(6, 6), 1)), maker, "shard:n.* is wrong")
