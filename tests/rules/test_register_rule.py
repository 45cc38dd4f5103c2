"""Rules for the user's own operators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import autoparallel
from autoparallel.rules import RuleError, has_rule, register_rule
from autoparallel.rules.registry import USER_RULES
from tests.rules.examples import real
from tests.rules.proof import Call, Disproved, Example, Proof, prove


@torch.library.custom_op("autoparallel_test::rotate", mutates_args=())
def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotates the halves of the last dim of ``x`` [b, s, h, d] by ``angles`` [s, d / 2]."""
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


@rotate.register_fake
def _(x: Tensor, angles: Tensor) -> Tensor:
    return torch.empty_like(x)


def _rotate_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (angles,) = ctx.saved_tensors
    return rotate(grad, -angles), None


def _save(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


rotate.register_autograd(_rotate_backward, setup_context=_save)


@torch.library.custom_op("autoparallel_test::project", mutates_args=())
def project(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """``x @ w + bias``, as one operator."""
    return x @ w + bias


@project.register_fake
def _(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[1])


def _project_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, w = ctx.saved_tensors
    return grad @ w.T, x.T @ grad, grad.sum(0)


project.register_autograd(
    _project_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2])
)

ROTATE = torch.ops.autoparallel_test.rotate.default
PROJECT = torch.ops.autoparallel_test.project.default


@pytest.fixture(autouse=True)
def forget_rules() -> Iterator[None]:
    before = dict(USER_RULES)
    yield
    USER_RULES.clear()
    USER_RULES.update(before)


def _rotation() -> Example:
    return Example(ROTATE, (real(6, 6, 6, 4), real(6, 2)), constant=frozenset({1}))


def _projection() -> Example:
    return Example(PROJECT, (real(6, 6), real(6, 6), real(6)))


def test_it_is_public() -> None:
    assert autoparallel.register_rule is register_rule


def test_an_elementwise_rule_is_right_in_every_way() -> None:
    register_rule("autoparallel_test::rotate", "b s h d, s r -> b s h d", blocked=["d", "r"], linear=[[0]])
    assert has_rule(ROTATE)
    proof = prove(_rotation())
    assert proof.counts["shard"] >= 3 and proof.counts["partial"] >= 1


def test_a_reduced_factor_with_a_declared_kind_is_right_in_every_way() -> None:
    register_rule(
        "autoparallel_test::project",
        "m k, k n, n -> m n",
        reductions={"k": "sum"},
        linear=[[0], [1]],
        additive=[2],
        flops=2,
    )
    proof = prove(_projection(), Proof())
    assert proof.counts["shard"] >= 3 and proof.counts["partial"] >= 2


def test_an_overload_may_be_named() -> None:
    register_rule("autoparallel_test::rotate.default", "b s h d, s r -> b s h d", blocked=["d", "r"])
    assert has_rule(ROTATE)
    assert prove(_rotation()).counts["shard"] >= 3


def test_a_wrong_rule_is_refuted_by_the_proof() -> None:
    register_rule("autoparallel_test::rotate", "b s h d, s r -> b s h d", blocked=["r"])
    one_angle = Example(ROTATE, (real(6, 6, 6, 6), real(6, 1)), constant=frozenset({1}))  # every shape still fits
    with pytest.raises(Disproved, match=r"shard:d on \(3,\).* the result is wrong by"):
        prove(one_angle)


def test_a_reduced_factor_without_a_kind_is_refused() -> None:
    with pytest.raises(RuleError, match=r"factor 'k' of autoparallel_test::project is reduced.*reductions=\{'k'"):
        register_rule("autoparallel_test::project", "m k, k n, n -> m n")
    assert not has_rule(PROJECT)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"operator": "project", "notation": "m -> m"}, "'library::name'"),
        ({"operator": "a::b", "notation": "m, m"}, "'operands -> result'"),
        ({"operator": "a::b", "notation": "(h d) -> h"}, "composed dims"),
        ({"operator": "a::b", "notation": "m -> (m n)"}, "composed dims"),
        ({"operator": "a::b", "notation": "m k -> m", "reductions": {"k": "max"}}, "'sum' or 'mean'"),
        ({"operator": "a::b", "notation": "m k -> m k", "reductions": {"k": "sum"}}, "bears it"),
        ({"operator": "a::b", "notation": "m -> m", "reductions": {"z": "sum"}}, "'z'.*not one of its factors"),
        ({"operator": "a::b", "notation": "m -> m", "blocked": ["z"]}, "'z'.*not one of its factors"),
        ({"operator": "a::b", "notation": "m -> m", "linear": [[1]]}, "operand 1.*has 1"),
        ({"operator": "a::b", "notation": "m, m -> m", "additive": [2]}, "operand 2.*has 2"),
        ({"operator": "a::b", "notation": "m m -> m"}, "twice"),
        ({"operator": "a::b", "notation": "m -> m n"}, "no operand of 'm -> m n' bears it"),
    ],
)
def test_what_contradicts_itself_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(RuleError, match=message):
        register_rule(**arguments)


def test_a_rule_that_does_not_fit_a_call_says_so() -> None:
    register_rule("autoparallel_test::rotate", "s h d, s r -> s h d", blocked=["d", "r"])
    message = r"rule registered for autoparallel_test::rotate does not fit.*another rank than the shape \(6, 6, 6, 4\)"
    with pytest.raises(RuleError, match=message):
        prove(_rotation())
    register_rule("autoparallel_test::rotate", "b s h d -> b s h d", blocked=["d"])
    with pytest.raises(RuleError, match="is for 1 tensors, the call has 2"):
        prove(_rotation())
    register_rule("autoparallel_test::rotate", "b s h d, s d -> b s h d", blocked=["d"])
    with pytest.raises(RuleError, match=r"'d'.*sizes 4 and 2"):
        prove(_rotation())


def test_without_a_rule_it_runs_whole() -> None:
    call = Call(_rotation(), [True, False], True)
    proof = prove(_rotation())
    assert set(proof.counts) == {"I", "R"}
    assert call.differentiates
