"""Every sharding rule, proved by execution."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoparallel.rules import matmul, operator_name, ruled_targets
from autoparallel.rules.core import _RULES, Rule, make_rule
from autoparallel.rules.elementwise import elementwise
from tests.rules.examples import FAMILIES, examples_of, real
from tests.rules.proof import Disproved, Example, Proof, never_sharded, prove, prove_all

aten = torch.ops.aten


def _names(targets: list[Any]) -> list[str]:
    return [f"{operator_name(t)}" for t in targets]


def test_every_rule_has_an_example() -> None:
    shown = examples_of()
    assert _names([t for t in ruled_targets() if t not in shown]) == []
    assert _names([t for t in shown if t not in ruled_targets()]) == []


@pytest.mark.wide_where(lambda family: family not in ("complexes", "indexing", "random"))
@pytest.mark.slow_where(lambda family: family == "elementwise")
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
        monkeypatch.setitem(_RULES, example.target, maker)
        with pytest.raises(Disproved, match=match):
            prove(example)

    def test_a_maximum_declared_a_sum(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def maker(node: Any) -> Rule:
            return make_rule("m n -> m", [(6, 6)], (6,), reductions={"n": "sum"})

        self._refuted(monkeypatch, Example(aten.amax.default, (real(6, 6), [1])), maker, "the result is wrong")

    def test_a_bias_not_declared_additive(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def maker(node: Any) -> Rule:
            return matmul._contract(node, "m k, n k, n -> m n")

        example = Example(aten.linear.default, (real(6, 6), real(6, 6), real(6)))
        self._refuted(monkeypatch, example, maker, "shard:k.* the result is wrong")

    def test_a_nonlinear_operator_declared_linear(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def maker(node: Any) -> Rule:
            return elementwise(node, linear=[(0,)])

        self._refuted(monkeypatch, Example(aten.relu.default, (real(6, 6),)), maker, "partial:0.* the result is wrong")

    def test_a_mean_declared_a_sum(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def maker(node: Any) -> Rule:
            return make_rule("m n -> m", [(6, 6)], (6,), reductions={"n": "sum"}, linear=[(0,)])

        self._refuted(monkeypatch, Example(aten.mean.dim, (real(6, 6), [1])), maker, "shard:n.* the result is wrong")

    def test_a_sum_whose_gradient_is_counted_on_every_rank(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Values right, gradients wrong: a product with a factor that the rule does not shard where it must.
        def maker(node: Any) -> Rule:
            return make_rule("m n, 1 n -> m n", [(6, 6), (1, 6)], (6, 6), linear=[(0, 1)])

        example = Example(aten.mul.Tensor, (real(6, 6), real(1, 6)))
        self._refuted(monkeypatch, example, maker, "partial:0.* the result is wrong")

    def test_an_argument_left_global(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def maker(node: Any) -> Rule:
            return make_rule("a b -> (a b)", [(6, 6)], (36,), sizes={"a": 6, "b": 6}, blocked=["b"])

        example = Example(aten.reshape.default, (real(6, 6), [36]))
        self._refuted(monkeypatch, example, maker, "invalid for input of size")

    def test_a_dim_that_is_looked_along_declared_free(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def maker(node: Any) -> Rule:
            return make_rule("m n -> m n", [(6, 6)], (6, 6))

        self._refuted(monkeypatch, Example(aten.cumsum.default, (real(6, 6), 1)), maker, "shard:n.* is wrong")
