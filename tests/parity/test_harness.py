"""The comparison itself: it must notice every kind of difference, and name the first."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from tests.parity.harness import Layout, RankTrace, Recipe, Trace, check_ranks_agree, compare, reference

RECIPE = Recipe("resnet", accumulation=2, steps=2)


def _nudge(values: dict) -> None:
    name = list(values)[-1]
    values[name] = values[name] + 1e-7 * values[name].abs().max()


def _loss(trace: Trace) -> None:
    trace.losses[1][1] = trace.losses[1][1] * (1 + 1e-8)


def _gradient(trace: Trace) -> None:
    _nudge(trace.gradients[0])


def _lost_gradient(trace: Trace) -> None:
    trace.gradients[0]["fc.bias"] = None


def _norm(trace: Trace) -> None:
    trace.norms[1] = trace.norms[1] * (1 + 1e-8)


def _norm_is_nan(trace: Trace) -> None:
    trace.norms[1] = trace.norms[1] * float("nan")


def _clipped(trace: Trace) -> None:
    _nudge(trace.clipped[1])


def _parameter(trace: Trace) -> None:
    _nudge(trace.parameters)


def _renamed(trace: Trace) -> None:
    trace.parameters["_orig_mod.fc.bias"] = trace.parameters.pop("fc.bias")


def _buffer(trace: Trace) -> None:
    trace.buffers["bn.running_var"] = trace.buffers["bn.running_var"] * (1 + 1e-7)


def _counter(trace: Trace) -> None:
    trace.buffers["bn.num_batches_tracked"] = trace.buffers["bn.num_batches_tracked"] + 1


def _dtype(trace: Trace) -> None:
    trace.parameters["fc.bias"] = trace.parameters["fc.bias"].float()


def _evaluation(trace: Trace) -> None:
    assert trace.evaluation is not None
    trace.evaluation = trace.evaluation.roll(1, 0)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (_loss, "step 1: loss"),
        (_gradient, "step 0: gradient"),
        (_lost_gradient, "step 0: gradient"),
        (_norm, "step 1: norm"),
        (_norm_is_nan, "step 1: norm"),
        (_clipped, "step 1: clipped gradient"),
        (_parameter, "after training: parameter"),
        (_renamed, "after training: parameter"),
        (_buffer, "after training: buffer"),
        (_counter, "after training: buffer"),
        (_dtype, "after training: parameter"),
        (_evaluation, "evaluation"),
    ],
)
def test_every_difference_is_named(spoil: Callable[[Trace], None], named: str) -> None:
    expected = reference(RECIPE)
    compare(copy.deepcopy(expected), expected, 0.0)
    spoiled = copy.deepcopy(expected)
    spoil(spoiled)
    with pytest.raises(AssertionError, match=named):
        compare(spoiled, expected, 1e-9)


def test_clipping_bites_and_scales_every_gradient() -> None:
    trace = reference(RECIPE)
    for norm, before, after in zip(trace.norms, trace.gradients, trace.clipped, strict=True):
        assert norm > 10 * RECIPE.max_norm
        for name, gradient in before.items():
            clipped = after[name]
            assert gradient is not None and clipped is not None
            torch.testing.assert_close(clipped, gradient * (RECIPE.max_norm / (norm + 1e-6)))


def test_different_replicas_are_found() -> None:
    def rank(shard: int, digest: str) -> RankTrace:
        return RankTrace([[1.0]], [1.0], {"w": Layout(("Shard(dim=0)",), (shard,), digest)}, None)

    check_ranks_agree([rank(0, "a"), rank(1, "b"), rank(0, "a"), rank(1, "b")])
    with pytest.raises(AssertionError, match="replicas of shard"):
        check_ranks_agree([rank(0, "a"), rank(1, "b"), rank(0, "a"), rank(1, "c")])
